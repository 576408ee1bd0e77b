"""Checkpoints: sharded saving and loading, Hub export, and the rule that a checkpoint is whole or not there.

    commit.py         staging, marker, atomic rename, discovery, rotation
    dcp.py            model and optimizer as DCP shards, loaded at any topology
    rank_tensors.py   which rank holds which part of a tensor, and bringing rows to one rank
    hub_plan.py       names, writers and files of a Hub export, known before a byte is written
    hub.py            the export itself
    scheduler.py      learning-rate schedules when the optimizer's groups are others
    facts.py          topology.json: what wrote a checkpoint
    background.py     asynchronous saves
"""
