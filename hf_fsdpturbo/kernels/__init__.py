"""Kernels: which implementation of norms, rotary embeddings and linear attention a model runs."""
