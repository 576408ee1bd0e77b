"""A stand-in for FSDPTurbo: the entry points, layouts and published faults that its public description lists."""
