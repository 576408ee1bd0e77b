"""The columns of a data set against those that TRL's trainers understand: named before the model is loaded.

Rows in Alpaca's and ShareGPT's formats are converted first. Only what TRL would fail on, or drop every row of, is
refused: a formatting function, prepared data and trainers that TRL does not have are left alone.
"""

from __future__ import annotations

import logging
from typing import Any

from hf_fsdpturbo import launch_config
from hf_fsdpturbo.parallelize.trainer_family import trl_classes
from hf_fsdpturbo.ranks import raised_on_every_rank
from hf_fsdpturbo.trainer.data_formats import converted
from hf_fsdpturbo.trainer.given_arguments import GivenArguments
from hf_fsdpturbo.trainer.rows import part_name, refuse_rows

FORMATS = "https://huggingface.co/docs/trl/dataset_formats"
PREFERENCES = ("DPOTrainer", "RewardTrainer")
PREPARED = ("input_ids", "prompt_ids", "chosen_ids", "chosen_input_ids")

logger = logging.getLogger(__name__)


def check_data(trainer_class: type, given: GivenArguments, config: Any) -> None:
    """:func:`convert_columns`, then what is wrong with rows and columns. Collective.

    Raises:
        ValueError: naming the data set, and column and row.
    """
    with raised_on_every_rank("converting the rows of a data set"):  # it writes files: one rank's disk may be full
        convert_columns(trainer_class, given, config)
    refuse_rows(trainer_class, given, config)
    refuse_columns(trainer_class, given, config)


def convert_columns(trainer_class: type, given: GivenArguments, config: Any) -> None:
    """Rows in Alpaca's and ShareGPT's formats become TRL's, in the training and the evaluation sets.

    Args:
        trainer_class: the user's.
        given: its arguments by name; data sets are replaced.
        config: training arguments.

    Raises:
        ValueError: a row that cannot be converted; names data set, row, column and rule.
    """
    if not set(trl_classes(trainer_class)) & {"SFTTrainer", *PREFERENCES} or _left_alone(trainer_class, given, config):
        return
    for name in ("train_dataset", "eval_dataset"):
        value, text = given.get(name), getattr(config, "dataset_text_field", "text")
        parts = value if _is_several(value) else {"": value}
        found = {part: _converted(part_name(name, part), data, text) for part, data in parts.items()}
        if any(found[part] is not data for part, data in parts.items()):
            given[name] = type(value)(found) if _is_several(value) else found[""]


def _converted(where: str, data: Any, text: str) -> Any:
    columns = getattr(data, "column_names", ())
    if not hasattr(data, "column_names") or any(column in (columns or ()) for column in PREPARED):
        return data
    try:
        found = converted(data, text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if found is not data and launch_config.rank() == 0:
        logger.warning("%s: rows with the columns %s become TRL's (docs/from_llamafactory.md).", where, columns)
    return found


def _left_alone(trainer_class: type, given: GivenArguments, config: Any) -> bool:
    """Whether TRL does not prepare the rows, or a function of the user's reads them."""
    skipped = (getattr(config, "dataset_kwargs", None) or {}).get("skip_prepare_dataset")
    prepare = getattr(trainer_class, "_prepare_dataset", None)
    theirs = prepare is not None and prepare.__module__.startswith("trl.")
    return given.get("formatting_func") is not None or bool(skipped) or not theirs


def refuse_columns(trainer_class: type, given: GivenArguments, config: Any) -> None:
    """Look at the training and the evaluation sets, after :func:`convert_columns`.

    Args:
        trainer_class: the user's.
        given: its arguments by name.
        config: training arguments.

    Raises:
        ValueError: naming the columns that were found, those that are understood, and how to rename.
    """
    families = trl_classes(trainer_class)
    if _left_alone(trainer_class, given, config):
        return
    for name in ("train_dataset", "eval_dataset"):
        value = given.get(name)
        for part, data in value.items() if _is_several(value) else [("", value)]:
            where, columns = part_name(name, part), getattr(data, "column_names", None)
            if not isinstance(columns, list) or not columns or any(column in columns for column in PREPARED):
                continue
            if "SFTTrainer" in families:
                _refuse_sft(where, data, columns, getattr(config, "dataset_text_field", "text"))
            elif any(family in families for family in PREFERENCES):
                _refuse_preferences(where, columns, next(f for f in PREFERENCES if f in families))


def _is_several(value: Any) -> bool:
    return isinstance(value, dict) and not hasattr(value, "column_names") or type(value).__name__ == "DatasetDict"


def _refuse_sft(where: str, data: Any, columns: list[str], text: str) -> None:
    understood = f"{text!r} (--dataset_text_field names another), 'messages', or 'prompt' and 'completion'"
    formats = [(text,), ("messages",), ("conversations",), ("prompt", "completion")]
    present = [names for names in formats if set(names) <= set(columns)]
    if not present:
        raise ValueError(f"{where} has the columns {columns}, but SFT understands {understood}. See {FORMATS}.")
    if all(_has_nulls(data, name) for names in present for name in names):
        raise ValueError(
            f"{where} has rows without {[name for names in present for name in names]}: data sets of several formats "
            f"were mixed. SFT understands one format at a time: {understood}. Convert them to one. See {FORMATS}."
        )


def _refuse_preferences(where: str, columns: list[str], family: str) -> None:
    missing = [column for column in ("chosen", "rejected") if column not in columns]
    if missing:
        raise ValueError(
            f"{where} has the columns {columns}, but {family} needs 'chosen' and 'rejected' (and takes 'prompt'); "
            f"{missing} are missing. Rename them with dataset.rename_column. See {FORMATS}."
        )


def _has_nulls(data: Any, column: str) -> bool:
    table = getattr(data, "data", None)  # a map-style set keeps an Arrow table, a stream none
    return table is not None and table.column(column).null_count > 0
