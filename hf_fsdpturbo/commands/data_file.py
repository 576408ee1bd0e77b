"""One file as a data set: ``--dataset_name rows.jsonl`` is the mixture of that file alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
"""File name ending -> builder of ``datasets``."""


def format_of(name: str) -> str | None:
    """The builder that reads ``name`` where it is such a file, else None."""
    path = Path(name)
    return FORMATS.get(path.suffix) if path.is_file() else None


def with_file(script_args: Any, dataset_args: Any) -> tuple[Any, Any]:
    """Both arguments; where ``dataset_name`` is a file, it is said as TRL takes files: one entry of ``datasets``.

    Args:
        script_args: ``trl.ScriptArguments``.
        dataset_args: ``trl.DatasetMixtureConfig``.
    """
    name = script_args.dataset_name
    builder = format_of(name) if name and not dataset_args.datasets else None
    if builder is None:
        return script_args, dataset_args
    streaming = dataset_args.streaming or script_args.dataset_streaming
    mixture = replace(dataset_args, datasets=[{"path": builder, "data_files": name}], streaming=streaming)
    return replace(script_args, dataset_name=None), mixture
