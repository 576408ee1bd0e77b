"""Work of a rank that is a new interpreter: a module that imports nothing, as what is sent is a name in it."""

from __future__ import annotations


def summed(number: int) -> tuple[float, int, bool]:
    """The sum of all ranks' numbers, this rank, and whether libraries were told to stay offline before they came."""
    import huggingface_hub.constants
    import torch
    from torch import distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(float(number))
    dist.all_reduce(total)
    return float(total), dist.get_rank(), huggingface_hub.constants.HF_HUB_OFFLINE
