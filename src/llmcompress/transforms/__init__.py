"""Changes before rounding that move rounding errors and leave the function of the model as it is."""
