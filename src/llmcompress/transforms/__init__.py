"""Methods that change where errors fall before anything is rounded, and leave what the model computes as it is."""
