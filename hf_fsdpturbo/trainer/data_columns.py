"""The columns of a data set against those that TRL's trainers understand: named before the model is loaded.

Only what TRL would fail on, or drop every row of, is refused: a formatting function, prepared data and trainers that
TRL does not have are left alone.
"""

from __future__ import annotations

from typing import Any

from hf_fsdpturbo.parallelize.trainer_family import trl_classes
from hf_fsdpturbo.trainer.given_arguments import GivenArguments

FORMATS = "https://huggingface.co/docs/trl/dataset_formats"
PREFERENCES = ("DPOTrainer", "RewardTrainer")
PREPARED = ("input_ids", "prompt_ids", "chosen_ids", "chosen_input_ids")
SHAREGPT_SPEAKERS = ("human", "gpt")


def refuse_columns(trainer_class: type, given: GivenArguments, config: Any) -> None:
    """Look at the training and the evaluation sets.

    Args:
        trainer_class: the user's.
        given: its arguments by name.
        config: training arguments.

    Raises:
        ValueError: naming the columns that were found, those that are understood, and how to rename.
    """
    families = trl_classes(trainer_class)
    skipped = (getattr(config, "dataset_kwargs", None) or {}).get("skip_prepare_dataset")
    prepare = getattr(trainer_class, "_prepare_dataset", None)
    theirs = prepare is not None and prepare.__module__.startswith("trl.")
    if given.get("formatting_func") is not None or skipped or not theirs:
        return
    for name in ("train_dataset", "eval_dataset"):
        value = given.get(name)
        for part, data in value.items() if _is_several(value) else [("", value)]:
            where, columns = f"{name}{f' {part!r}' if part else ''}", getattr(data, "column_names", None)
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
        hint = ""
        if {"instruction", "output"} <= set(columns):
            hint = " This is Alpaca's format: make 'prompt' of instruction and input, and rename output 'completion'."
        raise ValueError(f"{where} has the columns {columns}, but SFT understands {understood}.{hint} See {FORMATS}.")
    if all(_has_nulls(data, name) for names in present for name in names):
        raise ValueError(
            f"{where} has rows without {[name for names in present for name in names]}: data sets of several formats "
            f"were mixed. SFT understands one format at a time: {understood}. Convert them to one. See {FORMATS}."
        )
    for column in ("conversations", "messages"):
        if column in columns and (speakers := _speakers(data, column)) & set(SHAREGPT_SPEAKERS):
            raise ValueError(
                f"{where} {column} is in ShareGPT's format (from: {sorted(speakers)}), whose speakers chat templates "
                f"do not know: every row would be dropped. Write role 'user' for human and 'assistant' for gpt, and "
                f"content for value. See {FORMATS}."
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


def _speakers(data: Any, column: str) -> set[str]:
    row = next(iter(data), None)
    messages = (row or {}).get(column) or []
    return {m.get("from") or m.get("role") or "" for m in messages if isinstance(m, dict)}
