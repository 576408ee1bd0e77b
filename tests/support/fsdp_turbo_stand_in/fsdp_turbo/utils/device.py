"""torch.accelerator with Stream, as the library's own switch provides it."""

from fsdp_turbo import faults


def set_accelerator_compatible() -> None:
    faults.COMPATIBLE_ACCELERATOR_CALLS += 1
