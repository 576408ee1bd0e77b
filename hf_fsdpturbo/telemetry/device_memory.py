"""Memory of this rank's device: the most that was allocated so far, and what is reserved; on CPU, of the process."""

from __future__ import annotations

import resource
import sys

import torch


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """``(peak, reserved)`` in bytes since the process began; on CPU its largest resident size, and 0.

    The peak is not reset: who resets it (``torch.cuda.reset_peak_memory_stats``) begins anew here too.
    """
    if device.type == "cpu":
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return size * (1 if sys.platform == "darwin" else 1024), 0
    module = torch.get_device_module(device.type)
    return int(module.max_memory_allocated(device)), int(module.memory_reserved(device))
