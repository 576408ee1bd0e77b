"""Optimizers: torch's AdamW in one pass over the gradients, clip included (``one_pass.py``)."""
