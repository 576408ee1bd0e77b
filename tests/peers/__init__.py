"""Peers: TRL's and Transformers' own trainer tests, run with our classes. Fetched, not copied: ``__main__.py``."""
