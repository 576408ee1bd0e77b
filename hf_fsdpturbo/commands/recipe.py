"""What the recipes share: arguments parsed strictly, data sets by TRL's two ways, what was typed and cannot work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_fsdpturbo.bounded import cut
from hf_fsdpturbo.launch_config import YAML_PREFIX
from hf_fsdpturbo.ranks import FAILURES, raise_named


def parse(parser: Any, arguments: Sequence[str] | None = None) -> tuple[Any, ...]:
    """The recipe's dataclasses, from the command line over the YAML of ``--config``.

    Raises:
        ValueError: an argument that nobody knows, as it was written, and how our fields are spelled here.
    """
    *parsed, from_yaml, from_line = parser.parse_args_and_config(
        arguments, return_remaining_strings=True, separate_remaining_strings=True
    )
    for where, words in (("the YAML of --config", from_yaml), ("the command line", from_line)):
        if words:
            spelled = [word.lstrip("-") for word in words if word.startswith("--")] or list(words)
            ours = [name.removeprefix(YAML_PREFIX) for name in spelled if name.startswith(YAML_PREFIX)]
            fix = "Correct or remove them (--help lists all)."
            if ours:
                fix = f"{YAML_PREFIX}<field> is how the accelerate config spells it: write {', '.join(ours)} here."
            raise ValueError(f"Unknown arguments in {where}: {spelled}. {fix}")
    return tuple(parsed)


def load_splits(script_args: Any, dataset_args: Any, seed: int) -> Any:
    """A mixture (``datasets``) goes before a single name (``dataset_name``), as in TRL.

    ``test_split_size`` is drawn from the process's random state, so all ranks start from the same one.

    Raises:
        ValueError: no data set is named.
    """
    from accelerate.logging import get_logger
    from datasets import load_dataset
    from transformers import set_seed
    from trl import get_dataset

    if dataset_args.datasets:
        if script_args.dataset_name:
            get_logger(__name__).warning("`datasets` is given, so `dataset_name` is not read.")
        set_seed(seed)
        return get_dataset(dataset_args)
    if script_args.dataset_name:
        return load_dataset(
            script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
        )
    raise ValueError("No dataset: give `dataset_name` (a Hub name or a folder), or `datasets` in the YAML.")


def named_splits(name: str | None, script_args: Any, dataset_args: Any, seed: int) -> Any:
    """:func:`load_splits`, whose errors are those of ``datasets``: they seldom say what was read.

    Args:
        name: ``dataset_name`` as it was typed; None: the data sets of the YAML.

    Raises:
        ValueError: naming the argument.
    """
    try:
        return load_splits(script_args, dataset_args, seed)
    except FAILURES as error:
        what = "the data sets of the YAML" if name is None else f"dataset_name={cut(name)}"
        raise_named(error.__cause__ if isinstance(error.__cause__, Exception) else error, f"reading {what}")


def refuse_typed(model_args: Any) -> None:
    """Refuse what ``ModelConfig`` offers and our trainers do not take, by the names that were typed.

    Raises:
        ValueError: naming the arguments.
    """
    adapter = getattr(model_args, "use_peft", False)
    if getattr(model_args, "load_in_8bit", False):
        fix = "Use --load_in_4bit, or leave it out." if adapter else "Leave it out."
        raise ValueError(f"--load_in_8bit: weights in 8 bits are not supported by hf_fsdpturbo. {fix}")
    if getattr(model_args, "load_in_4bit", False) and not adapter:
        raise ValueError(
            "--load_in_4bit freezes the model's weights, and without an adapter nothing would train. Add --use_peft, "
            "or leave it out."
        )
