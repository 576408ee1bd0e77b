"""Frozen weights that stay in 4 bits: packed on their ranks, gathered packed, in full for one layer at a time.

And the numbers of packed releases in full: block_scales.py, packed_pairs.py. Which method a config or a setting names:
methods.py.
"""
