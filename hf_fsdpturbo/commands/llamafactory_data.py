"""LlamaFactory's data sets, by name or described in a YAML, as entries of TRL's ``datasets``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_fsdpturbo.bounded import cut, read_settings
from hf_fsdpturbo.commands.data_file import FORMATS
from hf_fsdpturbo.topology import positive


def mapping(key: str, value: Any) -> Mapping[str, Any]:
    """``value``, which must be a mapping.

    Raises:
        ValueError: it is none; names ``key``.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} must be a mapping, but it is {cut(value)}.")
    return value


def described_sets(value: Any, folder: Path) -> list[dict[str, Any]]:
    """``train_dataset: data.yaml``: data sets by name, each with a file and a converter.

    Raises:
        ValueError: it is no such file, or an entry has no counterpart.
    """
    path = folder / str(value)
    if not path.is_file():
        path = Path(str(value))
    if not path.is_file() or path.suffix not in (".yaml", ".yml", ".json"):
        raise ValueError(
            f"train_dataset={cut(value)} must be a YAML that describes data sets (names, each with file_name or "
            "hf_hub_url), and be there."
        )
    entries = mapping(f"train_dataset {value}", read_settings(str(path)))
    return [_entry(name, mapping(name, entry), path.parent) for name, entry in entries.items()]


def named_sets(value: Any, folder: Path, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """``dataset: a,b``: names in ``dataset_info.json`` of ``dataset_dir``.

    Raises:
        ValueError: no such file or name, or an entry has no counterpart.
    """
    base = folder / str(given.get("dataset_dir") or "data")
    info = base / "dataset_info.json"
    if not info.is_file():
        raise ValueError(f"dataset={cut(value)}: {info} is not there. Convert where LlamaFactory's data folder lies.")
    entries, wanted = mapping(str(info), read_settings(str(info))), [n.strip() for n in str(value).split(",")]
    missing = [name for name in wanted if name not in entries]
    if missing:
        raise ValueError(f"dataset={cut(value)}: {info} does not describe {', '.join(missing)}.")
    samples = given.get("max_samples")
    return [_entry(name, {"num_samples": samples, **mapping(name, entries[name])}, base) for name in wanted]


def _entry(name: str, entry: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """One data set as TRL's ``datasets`` takes it."""
    if entry.get("columns") or entry.get("tags"):
        raise ValueError(f"data set {name} renames columns or tags. Rename them in its file, then convert again.")
    samples = entry.get("num_samples")
    split = "train" if samples is None else f"train[:{positive(f'num_samples (max_samples) of {name}', samples)}]"
    if entry.get("hf_hub_url"):
        return {"path": entry["hf_hub_url"], "split": split}
    if not entry.get("file_name"):
        raise ValueError(f"data set {name} has neither file_name nor hf_hub_url.")
    file = Path(entry.get("dataset_dir") or folder) / str(entry["file_name"])
    builder = FORMATS.get(file.suffix)
    if builder is None:
        raise ValueError(f"data set {name}: {file} must end in one of {sorted(FORMATS)}.")
    return {"path": builder, "data_files": str(file), "split": split}
