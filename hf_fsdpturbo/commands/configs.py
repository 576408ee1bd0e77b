"""``hf-fsdpturbo configs [NAME] [--out PATH]``: the shipped YAMLs (launches, recipes), listed, printed or copied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hf_fsdpturbo import shipped as files
from hf_fsdpturbo.launch_config.early_check import read_early
from hf_fsdpturbo.one_line import OneLineParser, refuse
from hf_fsdpturbo.shipped import LAUNCH_FILES, PAGES, RECIPES, launch_files, root

PROG = "hf-fsdpturbo configs"


def main(argv: Sequence[str]) -> int:
    """List all; print ``NAME``; copy it (or all launch files) to ``--out``."""
    parser = OneLineParser(PROG, "The launch files and recipes that come with the package: list, print, copy.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this one (default: list all)")
    parser.add_argument("--out", type=Path, metavar="PATH", help="copy to this file or folder")
    options = parser.parse_args(list(argv))
    shipped, recipes = launch_files(), files.recipes()
    both = shipped | recipes
    if options.name is not None and options.name not in both:
        models = ", ".join(sorted({f"{name.partition('/')[0]}/..." if "/" in name else name for name in recipes}))
        refuse(PROG, f"argument NAME: {options.name!r} is not shipped; there are {', '.join(shipped)}, {models}")
    chosen = shipped if options.name is None else {options.name: both[options.name]}
    if options.out is not None:
        try:
            copied = copy(chosen, options.out, to_folder=options.name is None)
        except (ValueError, OSError) as error:
            refuse(PROG, f"argument --out: {error}")
        print("\n".join(str(path) for path in copied))
    elif options.name is not None:
        print(chosen[options.name].read_text(encoding="utf-8"), end="")
    else:
        print(listing(shipped))
        print("\n".join(recipe_lines(recipes)))
    return 0


def listing(shipped: dict[str, Path]) -> str:
    """One line a file: name, processes, what its first comment says; then where files lie."""
    width = max(len(name) for name in shipped)
    lines = [
        f"{name:<{width}}  {read_early(path).num_processes:>2} processes  {_first_comment(path)}"
        for name, path in shipped.items()
    ]
    lines += ["", "Use one: hf-fsdpturbo sft --accelerate_config NAME ...; change one: configs NAME --out my.yaml"]
    lines += [f"{folder}: {root() / folder}" for folder in (LAUNCH_FILES, RECIPES, PAGES)]
    return "\n".join(lines)


def recipe_lines(recipes: dict[str, Path]) -> list[str]:
    """One line a model: the names of its recipes; and one of the others."""
    models = dict.fromkeys(name.partition("/")[0] for name in recipes if "/" in name)
    lines = ["", "Recipes (hf-fsdpturbo sft | dpo --config MODEL/RECIPE; RECIPE is KIND_DEVICESxGIB):"]
    for model in models:
        own = [name.partition("/")[2] for name in recipes if name.startswith(f"{model}/")]
        lines.append(f"{model}/  {' '.join(own)}")
    return [*lines, "others (--config NAME)  " + " ".join(name for name in recipes if "/" not in name)]


def copy(chosen: dict[str, Path], out: Path, to_folder: bool) -> list[Path]:
    """Copy files; never over an existing one.

    Args:
        chosen: files by name.
        out: a folder, or the new file.
        to_folder: whether ``out`` is a folder also where it does not exist yet.

    Returns:
        what was written.

    Raises:
        ValueError: a file would be replaced.
    """
    to_folder = to_folder or out.is_dir()
    targets = {path: out / path.name if to_folder else out for path in chosen.values()}
    for target in targets.values():
        if target.exists():
            raise ValueError(f"{target} exists. Choose another name.")
    if to_folder:
        out.mkdir(parents=True, exist_ok=True)
    for source, target in targets.items():
        target.write_bytes(source.read_bytes())
    return list(targets.values())


def _first_comment(path: Path) -> str:
    line = path.read_text(encoding="utf-8").splitlines()[0]
    return line.removeprefix("#").strip()
