"""``hf-fsdpturbo verify`` with its ranks on ONE GPU (or NPU): ``python -m tests.device.verify_on_one_gpu MODEL ...``.

Its words are those of ``verify``. Ranks share the device over host memory (``tests/support/ranks_on_one_gpu.py``),
since NCCL takes one rank a device: all but the transport is what several devices would run. ``--cpu`` as the first
word rehearses it without a device.
"""

from __future__ import annotations

import sys

from hf_fsdpturbo.commands import verify_door
from hf_fsdpturbo.verify import processes

if __name__ == "__main__":
    words = sys.argv[1:]
    where = ["--device", "accelerator"]
    if words[:1] == ["--cpu"]:
        words, where = words[1:], ["--device", "cpu", "--fresh"]
    processes.ENTRY = ("tests.support.ranks_on_one_gpu", *processes.ENTRY)
    sys.exit(verify_door.main([*words, *where]))
