"""Sizes of released models, one ``config.json`` each in ``models/``, by the name that ``plan`` takes."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "models"


def released_names() -> list[str]:
    """Shipped names, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def released_file(name: str) -> Path | None:
    """The config of a shipped name; None for any other."""
    return FOLDER / f"{name}.json" if name in released_names() else None
