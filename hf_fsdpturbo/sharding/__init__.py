"""Cutting the model up: experts over ep, their parameters over efsdp, everything else over all ranks."""
