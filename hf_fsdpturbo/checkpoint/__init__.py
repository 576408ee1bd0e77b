"""Checkpoints: sharded saving and loading, Hub export, and the rule that a checkpoint is whole or not there."""
