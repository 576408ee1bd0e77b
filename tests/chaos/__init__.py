"""Runs that are killed, signalled or started twice at random moments, and what became of their checkpoints."""
