"""Scores of cached keys and values, by which a part of them is evicted: one file each, found by the name SCORE."""
