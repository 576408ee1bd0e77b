"""What trackers got of a run: tensorboard's event files and trackio's local database, read back; or a writer's calls.

By step and by the console's names: ``{(step, name): value}``.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

Points = dict[tuple[int, str], float]
TRACKERS = ("tensorboard", "trackio")


def importable() -> list[str]:
    """Those that are installed."""
    return [name for name in TRACKERS if importlib.util.find_spec(name) is not None]


def track(folder: Path) -> dict[str, Any]:
    """Arguments of a run that these report; where trackio keeps its database is set, before it is imported."""
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    return {"report_to": importable() or "none", "project": "tested", "run_name": "a_run"}


class Writer:
    """Stands in for tensorboard's ``SummaryWriter``, where that is not installed."""

    def __init__(self) -> None:
        self.points: Points = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.points[step, console_name(name)] = float(value)

    def add_text(self, *args: Any) -> None:
        """Arguments and the model's config."""

    flush = close = add_text


def with_writer(writer: Writer) -> Any:
    """Transformers' own callback for tensorboard, with another writer (its constructor wants the package)."""
    from transformers.integrations import TensorBoardCallback

    callback = TensorBoardCallback.__new__(TensorBoardCallback)
    callback._SummaryWriter, callback.tb_writer, callback.logging_dir = None, writer, ""
    return callback


def console_name(name: str) -> str:
    """Transformers puts ``train/`` before names, and ``eval/`` in place of ``eval_``."""
    kind, _, rest = name.partition("/")
    return rest if kind == "train" else f"eval_{rest}"


def read_back(name: str, folder: Path) -> Points:
    """What one of :data:`TRACKERS` has of a run with :func:`track` whose ``output_dir`` is ``folder``."""
    if name == "trackio":
        from trackio.sqlite_storage import SQLiteStorage

        logs = SQLiteStorage.get_logs("tested", "a_run")
        return {
            (log["train/global_step"], console_name(key)): float(value)
            for log in logs
            for key, value in log.items()
            if key.startswith(("train/", "eval/")) and key != "train/global_step"
        }
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Points = {}
    for file in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file)).Reload()
        for key in events.Tags()["scalars"]:
            found |= {(event.step, console_name(key)): event.value for event in events.Scalars(key)}
    return found


def console(history: list[dict[str, Any]]) -> Points:
    """The trainer's own lines."""
    return {(log["step"], name): float(value) for log in history for name, value in log.items() if name != "step"}
