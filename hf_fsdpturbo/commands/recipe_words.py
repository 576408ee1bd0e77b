"""What can be said of a recipe's own arguments before any rank starts: first without imports, then by TRL's parser."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hf_fsdpturbo.arguments.command_line import options_on_line
from hf_fsdpturbo.bounded import parse_yaml, read_text
from hf_fsdpturbo.commands.data_file import FORMATS
from hf_fsdpturbo.commands.known_names import unknown_names
from hf_fsdpturbo.hub_names import is_cached, is_path, offline
from hf_fsdpturbo.launch_config import YAML_PREFIX
from hf_fsdpturbo.shipped import recipes

RECIPES = {
    "sft": "hf_fsdpturbo.commands.sft",
    "dpo": "hf_fsdpturbo.commands.dpo",
    "reward": "hf_fsdpturbo.commands.reward",
}
MODEL, DATA = "model_name_or_path", "dataset_name"
CONFIGS = ("config.json", "adapter_config.json")


def with_shipped_recipe(name: str, words: Sequence[str]) -> tuple[list[str], int | None]:
    """The words with the path of a shipped recipe for ``--config NAME``, and its number of devices; else None.

    Args:
        name: of the command.
        words: of the recipe.

    Raises:
        ValueError: it is another command's recipe.
    """
    given = _value(words, "config")
    path = None if given is None or Path(given).is_file() else recipes().get(given)
    if given is None or path is None:
        return list(words), None
    kind, _, devices = path.stem.partition("_")
    command = "dpo" if kind == "dpo" else "sft"
    if command != name:
        raise ValueError(f"--config: {given} is a recipe of {command}. Use hf-fsdpturbo {command}.")
    found = [str(path) if word == given else word.replace(f"--config={given}", f"--config={path}") for word in words]
    return found, int(devices.partition("x")[0]) if "/" in given else None


def read_recipe(words: Sequence[str]) -> dict[str, Any]:
    """The YAML of ``--config``; empty without one.

    Raises:
        ValueError: no value, no such file, or no mapping in it.
    """
    text = _value(words, "config")
    if text is None:
        return {}
    path = Path(text)
    if not path.is_file():
        raise ValueError(f"--config: there is no file or shipped recipe {text!r}; see hf-fsdpturbo configs.")
    try:
        recipe = parse_yaml(read_text(text), text)
    except ValueError as error:
        raise ValueError(f"--config: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"--config: {text} must be a YAML mapping (key: value), but it is {type(recipe).__name__}.")
    return recipe


def check_early(words: Sequence[str], recipe: dict[str, Any]) -> None:
    """Model and data set are named, and what is written as a path is there.

    Raises:
        ValueError: naming the argument.
    """
    model = str(_given(MODEL, words, recipe) or "")
    if not model:
        raise ValueError(f"--{MODEL} is missing: a Hub name, or a folder with config.json and weights.")
    data = str(_given(DATA, words, recipe) or "")
    if not data and not recipe.get("datasets"):
        raise ValueError(f"--{DATA} is missing: a Hub name, a folder, a file, or a datasets: list in the YAML.")
    _check_model(model, words, recipe)
    there = Path(data).is_file() or Path(data).is_dir()  # a pipe would be waited for
    if data and not there and (Path(data).suffix in FORMATS or is_path(data)):
        raise ValueError(f"--{DATA}: there is no file or folder {data!r}. Correct the path.")


def _check_model(model: str, words: Sequence[str], recipe: dict[str, Any]) -> None:
    elsewhere = "model_init_kwargs"  # may name a cache, a folder inside the model's, another format
    if Path(model).is_dir():
        if not any((Path(model) / name).exists() for name in CONFIGS) and not _given(elsewhere, words, recipe):
            raise ValueError(f"--{MODEL}: the folder {model!r} has no config.json. Give the folder of a model.")
    elif is_path(model):
        raise ValueError(f"--{MODEL}: there is no folder {model!r}. Correct the path, or give a Hub name.")
    elif offline() and not _given(elsewhere, words, recipe):
        revision = _given("model_revision", words, recipe)
        if not is_cached(model, CONFIGS, revision):
            raise ValueError(
                f"--{MODEL}: there is no folder {model!r}, nor is it{f' ({revision})' if revision else ''} in the "
                "Hub's cache, and HF_HUB_OFFLINE=1 forbids to ask the Hub. Correct the name, or unset HF_HUB_OFFLINE."
            )


def _given(name: str, words: Sequence[str], recipe: dict[str, Any]) -> Any:
    return _value(words, name) or recipe.get(name)


def check_by_parser(name: str, words: Sequence[str], recipe: dict[str, Any]) -> None:
    """Every name and every type, by the parser that the ranks will use; nothing is built. Imports TRL.

    Raises:
        ValueError: an argument that nobody knows, or a value of the wrong type.
    """
    written = [word[2:].partition("=")[0] for word in words if word.startswith("--") and len(word) > 2]
    keys = [str(key) for key in recipe if key != "env"]
    for names, where in ((keys, "the YAML of --config"), (written, "the command line")):
        _refuse_unknown([f"--{unknown}" for unknown in unknown_names(name, names)], where)
    parser = recipe_parser(name)
    parser.error = _raise  # type: ignore[method-assign]
    given = {key: value for key, value in recipe.items() if key != "env"}
    _refuse_unknown(parser.set_defaults_with_config(**given)[::2], "the YAML of --config")
    _, rest = argparse.ArgumentParser.parse_known_args(parser, _without_config(words))
    _refuse_unknown(rest, "the command line")


def given_values(name: str, words: Sequence[str], recipe: dict[str, Any]) -> dict[str, Any]:
    """What the user gave, by argument, as the parser reads it: the command line over the YAML. Imports TRL.

    Raises:
        ValueError: as :func:`check_by_parser`.
    """
    check_by_parser(name, words, recipe)
    parser = recipe_parser(name)
    unset = object()
    defaults = vars(argparse.ArgumentParser.parse_known_args(parser, [])[0])
    line = argparse.Namespace(**dict.fromkeys(defaults, unset))
    argparse.ArgumentParser.parse_known_args(parser, _without_config(words), line)
    found = {key: value for key, value in vars(line).items() if value is not unset}
    settings = {key: value for key, value in recipe.items() if key != "env"}
    parser.set_defaults_with_config(**settings)
    read = vars(argparse.ArgumentParser.parse_known_args(parser, [])[0])
    return {key: read[key] for key in settings if key in read} | found


def recipe_parser(name: str) -> Any:
    """The parser of a recipe."""
    return importlib.import_module(RECIPES[name]).make_parser()


def help_parsers(name: str) -> tuple[Any, Any]:
    """Parsers that print the help of a recipe: our fields, then TRL's classes without them."""
    from transformers import HfArgumentParser
    from trl import TrlParser

    from hf_fsdpturbo.arguments import FSDPTurboArguments

    bare: dict[str, Any] = {"add_help": False, "usage": argparse.SUPPRESS}
    theirs = [
        next(cls for cls in each.__mro__ if not cls.__module__.startswith("hf_fsdpturbo."))
        for each in recipe_parser(name).dataclass_types
    ]
    return HfArgumentParser(FSDPTurboArguments, **bare), TrlParser(theirs, **bare)


def _raise(message: str) -> NoReturn:
    raise ValueError(message)


def _refuse_unknown(words: list[str], where: str) -> None:
    if words:
        names = [word for word in words if word.startswith("--")] or words
        ours = [name.lstrip("-").removeprefix(YAML_PREFIX) for name in names if YAML_PREFIX in name]
        fix = "--help lists all."
        if ours:
            fix = f"{YAML_PREFIX}<field> is how the accelerate config spells it: write {', '.join(ours)} here."
        raise ValueError(f"{', '.join(names)} in {where}: no such argument. {fix}")


def _value(words: Sequence[str], name: str) -> str | None:
    """The last value of ``--name value`` or ``--name=value``; dashes are as good as underscores.

    Raises:
        ValueError: ``--name`` is the last word or is followed by another option.
    """
    texts = [text for option, text in options_on_line(words) if option in (name, name.replace("_", "-"))]
    if None in texts:
        raise ValueError(f"--{name}: a value is missing.")
    return texts[-1] if texts else None


def _without_config(words: Sequence[str]) -> list[str]:
    index = words.index("--config") if "--config" in words else len(words)
    return [*words[:index], *words[index + 2 :]]
