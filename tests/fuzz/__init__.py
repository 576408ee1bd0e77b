"""Bad inputs, drawn from a seed: model folders, checkpoints, settings, rows and output paths (`make fuzz`)."""
