"""Where the files lie that come with the package: launch files, recipes, pages."""

from __future__ import annotations

from pathlib import Path

LAUNCH_FILES = "accelerate_configs"
RECIPES = "recipes"
PAGES = "docs"
_PACKAGE = Path(__file__).resolve().parent


def root() -> Path:
    """The folder that holds the shipped folders: ``shipped/`` of an installed wheel, or the clone beside the package.

    ``setup.py`` puts them into a wheel; in a clone they are at the top, where people look for them.
    """
    installed = _PACKAGE / "shipped"
    return installed if installed.is_dir() else _PACKAGE.parent


def launch_files() -> dict[str, Path]:
    """The accelerate YAMLs by name (``cuda_ep8``), in order of name."""
    return {path.stem: path for path in sorted((root() / LAUNCH_FILES).glob("*.yaml"))}
