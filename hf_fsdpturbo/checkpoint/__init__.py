"""Checkpoints: sharded saving and loading, Hub export, and the rule that a checkpoint is whole or not there.

    commit.py         staging, marker, atomic rename, discovery, rotation
    intact.py         is a finished one as it was written; checksums.py
    dcp.py            model and optimizer as tensors of a DCP directory, loaded at any topology
    dcp_save.py       writing the directory; dcp_read.py reading it
    shard_file.py     one rank's file of it: chunks and the list that proves them
    dcp_index.py      its index, read by plain_pickle.py without running code; tiling.py: do chunks make up a tensor
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
