"""Figures as reports say them."""

from typing import SupportsFloat


def significant(value: SupportsFloat, digits: int = 6) -> float:
    """A figure rounded to so many significant digits."""
    return float(f"{float(value):.{digits}g}")
