"""Sizes and memory of a layout before anything is started: ``hf-fsdpturbo plan``, by arithmetic on a meta model.

    shape.py        a model as plan sees it: FSDP units, experts, attention (``models/`` holds released sizes)
    planned_run.py  what a run is asked to do, checked
    storage.py      what a packed release is on disk, and becomes
    held.py         weights, gradients, optimizer, copies of a rank
    activations.py  what a layer keeps from forward to backward, and works with
    peak.py         the moments of a step, and the highest
    exchanged.py    bytes a rank sends, inside a node and between nodes
    search.py       layouts that fit, ranked
    command.py      the command line and what it prints
"""
