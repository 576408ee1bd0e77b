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


def model_recipes() -> dict[str, Path]:
    """The ready recipes of released models by name (``qwen3-30b-a3b/sft_8x80``), in order of name."""
    folder = root() / RECIPES / "models"
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.glob("*/*.yaml"))}


def recipes() -> dict[str, Path]:
    """What ``--config`` takes by name: the ready recipes, and those of no one size (``sft_vlm``)."""
    others = (path for path in sorted((root() / RECIPES).glob("*.yaml")) if not path.stem.startswith("demo_"))
    return {path.stem: path for path in others} | model_recipes()
