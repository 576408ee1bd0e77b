"""Routers of a model: which modules they are, how fast they learn, and the correction biases that balance experts."""
