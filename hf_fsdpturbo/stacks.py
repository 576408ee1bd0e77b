"""Where the threads of this process stand: their stacks as text, and the collective that one of them waits in."""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from types import FrameType

import torch.distributed as dist

# Where a main thread is that waits for other ranks: gloo waits in the call, other backends wherever the host next
# needs a value from the device.
_COLLECTIVE = ("torch/distributed/", "torch/autograd/graph.py")
_DEVICE = ("torch/", "transformers/", "accelerate/", "trl/")
_WORK = ("torch/serialization.py", "torch/utils/data/", "torch/distributed/checkpoint/filesystem.py")
_BACKWARD = "_engine_run_backward"
"""Where a main thread waits for autograd's own thread, which is the one that knows the collective."""

_PACKAGES = re.compile("/(?:site|dist)-packages/")
_LIBRARY = os.path.dirname(os.__file__)


def main_frames() -> list[FrameType]:
    """The main thread's frames, the innermost first."""
    return _outwards(sys._current_frames().get(threading.main_thread().ident or 0))


def waits_in(frames: list[FrameType]) -> str | None:
    """The collective that a thread stands in and who called it, in words; None where it does something else.

    Args:
        frames: the thread's, the innermost first.
    """
    files = [inside_packages(each.f_code.co_filename) for each in frames]
    inner = next((file for file in files if file), "")
    places = _COLLECTIVE if dist.get_backend() == "gloo" else _DEVICE
    if not inner.startswith(places) or inner.startswith(_WORK):
        return None
    callers = [each for each, file in zip(frames, files, strict=True) if file and not file.startswith("torch/")]
    at = f", called by {_named(callers[0])}" if callers else ""
    return f"{frames[files.index(inner)].f_code.co_name}{at}"


def waiting() -> str | None:
    """As :func:`waits_in` for the main thread; where that waits for a backward, for the thread that runs it."""
    main = main_frames()
    found = waits_in(main)
    if found is None or not found.startswith(_BACKWARD):
        return found
    others = [_outwards(frame) for frame in sys._current_frames().values()]
    in_backward = [
        words for frames in others if frames and frames[-1] is not main[-1] and (words := _group_call(frames))
    ]
    return next(iter(in_backward), found)


def stands_in(frames: list[FrameType]) -> str:
    """The innermost function that is no part of Python's own library, in words."""
    named = [each for each in frames if inside_packages(each.f_code.co_filename)]
    return _named((named or frames)[0]) if frames else "no Python code"


def all_stacks() -> str:
    """Python stacks of all threads, the main one first, each innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    nameless = "made outside of Python, such as autograd's"
    return "\n".join(
        f"Thread {names.get(ident, nameless)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in found
    )


def inside_packages(file: str) -> str:
    """``torch/nn/modules/module.py``; the file itself for a user's; empty for Python's own library."""
    *_, rest = _PACKAGES.split(file.replace(os.sep, "/"))
    if rest != file.replace(os.sep, "/"):
        return rest
    return "" if file.startswith((_LIBRARY, "<")) else file


def _outwards(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _group_call(frames: list[FrameType]) -> str | None:
    inner = next((file for each in frames if (file := inside_packages(each.f_code.co_filename))), "")
    return waits_in(frames) if inner.startswith("torch/distributed/") else None


def _named(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
