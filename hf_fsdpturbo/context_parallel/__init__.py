"""Ulysses context parallelism: cp ranks share a batch, each computes a slice of the sequence, losses see the whole.

    install.py           the one call that makes a model context-parallel
    boundary.py          cut at the base model's entry, gather at its exit
    ulysses.py           attention: sequence <-> heads; local_attention.py runs the user's kernel on whole heads
    delta_rule.py        the gated delta rule and its convolution
    collectives.py       the exchanges
    exactness.py         what cannot be exact is refused by name
    sharded_head.py      opt-in for SFT: the LM head on the slice
"""
