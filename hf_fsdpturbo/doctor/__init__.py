"""`hf-fsdpturbo doctor`: is this machine ready? `report.py` asks, `checks.py` judges, `probes.py` runs in children."""
