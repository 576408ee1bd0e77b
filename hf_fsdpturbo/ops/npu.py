"""All calls of torch_npu: the one file that imports it, late; never run on the hardware."""

import importlib
from types import ModuleType

from hf_fsdpturbo.compat import require


def load_torch_npu() -> ModuleType:
    """torch_npu, imported now. Raises MissingDependencyError (a ValueError) where it is not installed."""
    require("torch_npu", "the Ascend NPU path")
    return importlib.import_module("torch_npu")
