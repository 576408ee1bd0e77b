"""``hf-fsdpturbo doctor``: is this machine ready?

    report.py   asks and prints
    checks.py   judges
    probes.py   runs in child processes
"""
