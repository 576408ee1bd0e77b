"""Rows in Alpaca's and ShareGPT's formats, as LlamaFactory reads them, become TRL's conversational ones.

    Alpaca    instruction, input, output (system, history)         -> prompt, completion
              instruction, input, chosen, rejected                 -> prompt, chosen, rejected
    ShareGPT  conversations of {from, value} (system)              -> messages
              conversations, chosen, rejected                      -> prompt, chosen, rejected

The tokenizer's chat template then writes them, where LlamaFactory has templates of its own by name. Every rank
converts for itself: the same rows give the same ones. What TRL takes as it is stays, as plain TRL trains on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any

from hf_fsdpturbo.bounded import cut

Row = Mapping[str, Any]
Messages = list[dict[str, str]]
Convert = Callable[[Row], dict[str, Any]]

ROLES = {"human": "user", "gpt": "assistant", "system": "system", "observation": "tool"}
"""ShareGPT's speakers -> roles of chat templates; roles themselves stay."""
KNOWN = {*ROLES.values(), *ROLES}
FOREIGN = KNOWN - set(ROLES.values())
PEEKED = 100
"""Rows in which the first message is looked for."""


def converted(data: Any, text: str = "text") -> Any:
    """A data set, or several by name, with rows of a known foreign format converted; others as they are.

    Args:
        data: a ``Dataset``, an ``IterableDataset``, or a dict of them.
        text: the column that TRL takes as it is, where it is there.

    Raises:
        ValueError: a row that cannot be converted: its number, column and rule.
    """
    if isinstance(data, dict):
        return type(data)({name: converted(part, text) for name, part in data.items()})
    columns = getattr(data, "column_names", None)
    if columns is None:  # a stream that does not say
        columns = list(next(iter(data), {}))
    convert = converter_of(columns, data, text)
    if convert is None:
        return data
    gone = [column for column in columns if column != "images"]
    return data.map(lambda row, number: _at(convert, row, number), with_indices=True, remove_columns=gone)


def converter_of(columns: list[str], data: Iterable[Row], text: str = "text") -> Convert | None:
    """What converts rows with these columns; None where TRL understands them, or nobody does.

    Args:
        columns: names.
        data: the rows; speakers tell ShareGPT's messages from TRL's.
        text: the column that TRL takes as it is.
    """
    names = set(columns)
    if {"chosen", "rejected"} <= names and "prompt" not in names:
        if "instruction" in names:
            return alpaca_pair
        return sharegpt_pair if "conversations" in names else None
    if text in names or {"prompt", "completion"} <= names:
        return None
    for column in ("messages", "conversations"):
        if column in names:
            return partial(sharegpt, column=column) if _speakers(data, column) & FOREIGN else None
    return alpaca if {"instruction", "output"} <= names else None


def _speakers(data: Iterable[Row], column: str) -> set[Any]:
    """Who speaks in the first row in which anybody does."""
    spoken = next((row[column] for row in islice(data, PEEKED) if row.get(column)), None)
    return {m.get("from") for m in spoken if isinstance(m, Mapping)} if isinstance(spoken, list) else set()


def alpaca(row: Row) -> dict[str, Any]:
    """``{"prompt": messages, "completion": messages}``."""
    return {"prompt": _asked(row), "completion": [_message("assistant", row["output"], "output")]}


def alpaca_pair(row: Row) -> dict[str, Any]:
    """``{"prompt": messages, "chosen": messages, "rejected": messages}``."""
    answers = {name: [_message("assistant", row[name], name)] for name in ("chosen", "rejected")}
    return {"prompt": _asked(row), **answers}


def sharegpt(row: Row, column: str = "conversations") -> dict[str, Any]:
    """``{"messages": messages}``."""
    return {"messages": _spoken(row, column)}


def sharegpt_pair(row: Row) -> dict[str, Any]:
    """``{"prompt": messages, "chosen": messages, "rejected": messages}``."""
    answers = {name: [_turn(row[name], name)] for name in ("chosen", "rejected")}
    return {"prompt": _spoken(row), **answers}


def _asked(row: Row) -> Messages:
    """System prompt, history, and instruction with input."""
    messages = _system(row)
    for question, answer in row.get("history") or []:
        messages += [_message("user", question, "history"), _message("assistant", answer, "history")]
    text = row["instruction"] if not row.get("input") else f"{row['instruction']}\n{row['input']}"
    return [*messages, _message("user", text, "instruction")]


def _spoken(row: Row, column: str = "conversations") -> Messages:
    turns = [_turn(turn, column) for turn in row[column] or []]
    if not turns:
        raise ValueError(f"{column} is empty. Leave the row out")
    return turns if turns[0]["role"] == "system" else _system(row) + turns


def _system(row: Row) -> Messages:
    return [_message("system", row["system"], "system")] if row.get("system") else []


def _turn(turn: Any, column: str) -> dict[str, str]:
    if not isinstance(turn, Mapping):
        raise ValueError(f"{column} has {cut(turn)} where a mapping of 'from' and 'value' must be. Correct it")
    speaker = turn.get("from") or turn.get("role")
    if speaker not in KNOWN:
        raise ValueError(f"{column} has the speaker {cut(speaker)}, but must be one of {sorted(KNOWN)}. Rename it")
    said = turn["value"] if turn.get("value") is not None else turn.get("content")
    return _message(ROLES.get(str(speaker), str(speaker)), said, column)


def _message(role: str, content: Any, column: str) -> dict[str, str]:
    if not isinstance(content, str):
        raise ValueError(f"{column} holds {cut(content)} where text must be. Correct it, or leave the row out")
    return {"role": role, "content": content}


def _at(convert: Convert, row: Row, number: int) -> dict[str, Any]:
    try:
        if row.get("tools"):
            raise ValueError(f"tools holds {cut(row['tools'])}, which is not converted. Leave the column out")
        return convert(row)
    except ValueError as error:
        raise ValueError(f"row {number} of the data set: {error}.") from error
