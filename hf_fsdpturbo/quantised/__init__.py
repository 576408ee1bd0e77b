"""Frozen weights that stay in 4 bits: packed on their ranks, gathered packed, in full for one layer at a time."""
