"""Checkpoints: sharded saving and loading, Hub export, and the rule that a checkpoint is whole or not there.

    commit.py         staging, marker, atomic rename, discovery, rotation
    dcp.py            model and optimizer as DCP shards, loaded at any topology
    layouts.py        which rank holds which rows of a tensor
    rank_tensors.py   bringing rows to one rank
    conversion_groups.py  tensors that one conversion of Transformers needs together, and whether it goes row by row
    hub_plan.py       names, writers and files of a Hub export, known before a byte is written
    unused.py         tensors of the release that the model class does not use, carried into exports
    hub.py            the export itself
    scheduler.py      learning-rate schedules when the optimizer's groups are others
    facts.py          topology.json: what wrote a checkpoint
    background.py     asynchronous saves
"""
