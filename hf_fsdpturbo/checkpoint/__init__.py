"""Checkpoints: sharded saving and loading, Hub export, and the rule that a checkpoint is whole or not there.

    agreement.py   a failure on one rank is raised on all
    commit.py      staging, marker, atomic rename, discovery, rotation
    dcp.py         model and optimizer as DCP shards, loaded at any topology
    boxes.py       which rank holds which part of a tensor, and bringing rows to one rank
    hub_plan.py    names, writers and files of a Hub export, known before a byte is written
    hub.py         the export itself
    scheduler.py   learning-rate schedules when the optimizer's groups are others
    facts.py       topology.json: what wrote a checkpoint
    adapters.py    LoRA adapters as PEFT's files
    headers.py     safetensors headers
    background.py  asynchronous saves
    push.py        uploads to the Hub
    hooks.py       `CheckpointHooks`: the Trainer overrides
"""
