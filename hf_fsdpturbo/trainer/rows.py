"""Rows of a data set that cannot train: none at all, no text in them, token ids that the model has no row for.

What only rank 0 meets is met by all: TRL prepares data on rank 0 while the others wait for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_utils import has_length

from hf_fsdpturbo import launch_config
from hf_fsdpturbo.bounded import cut
from hf_fsdpturbo.images import ImageTokens, NamedRows, check_pictures, may_have_images, note_images, undecoded
from hf_fsdpturbo.parallelize.trainer_family import trl_classes
from hf_fsdpturbo.ranks import FAILURES, agree, everyone, raise_named, rank, together, world_size
from hf_fsdpturbo.trainer.given_arguments import GivenArguments

TEXTS = {"DPOTrainer": ("prompt", "chosen", "rejected"), "RewardTrainer": ("prompt", "chosen", "rejected")}
_NO_TEXT = ("int", "uint", "float", "double", "bool", "null", "binary", "date", "time", "duration", "mappings")
IGNORED = -100
"""The label that losses leave out."""


def refuse_rows(trainer_class: type, given: GivenArguments, config: Any) -> None:
    """Look at what costs nothing to look at: lengths, types and numbers of nulls of the columns of text.

    Args:
        trainer_class: the user's.
        given: its arguments by name.
        config: training arguments.

    Raises:
        ValueError: naming the data set, and column and row.
    """
    families = trl_classes(trainer_class)
    text = ""
    columns: tuple[str, ...] = next((TEXTS[name] for name in families if name in TEXTS), ())
    if "SFTTrainer" in families:
        text = getattr(config, "dataset_text_field", None) or "text"
        columns = (text, "prompt", "completion", "messages")
    for where, data in _data_sets(given):
        refuse_empty(where, data)
        for column in columns if given.get("formatting_func") is None else ():
            _refuse_column(where, data, column, is_text=column == text)


def refuse_empty(where: str, data: Any) -> None:
    """Refuse a data set of no rows.

    Raises:
        ValueError: naming it.
    """
    if has_length(data) and len(data) == 0:
        raise ValueError(f"{where} has no rows. Correct the data files, the split or the filter.")


def refuse_pictures(trainer_class: type, given: GivenArguments) -> None:
    """Look at the pictures of TRL's columns, each rank at a share of the rows. Collective.

    Raises:
        ValueError: naming data set, row, column and file; on every rank.
    """
    if not trl_classes(trainer_class):
        return
    with together("looking at the pictures"):
        from trl.data_utils import prepare_multimodal_messages

        for where, data in _data_sets(given):
            check_pictures(where, data, rank(), world_size(), prepare_multimodal_messages)


def some_rank_may_have_images(given: GivenArguments) -> bool:
    """Whether some rank's batches may have images; the same on all ranks. Collective."""
    with together("reading the columns of the data sets"):
        mine = may_have_images([given.get("train_dataset"), given.get("eval_dataset")], given.get("data_collator"))
    return any(everyone(mine))


def _data_sets(given: GivenArguments | dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in ("train_dataset", "eval_dataset"):
        value = given.get(name)
        parts = value if isinstance(value, Mapping) else {"": value}
        for part, data in parts.items():
            yield part_name(name, part), data


def part_name(argument: str, part: Any) -> str:
    """A data set in words: ``eval_dataset 'code'`` of a mapping of several, ``eval_dataset`` alone without a part."""
    return f"{argument}{f' {part!r}' if part else ''}"


def _refuse_column(where: str, data: Any, column: str, is_text: bool) -> None:
    """Refuse nulls, and what no text or message can be; of a stream nothing is known ahead.

    Args:
        where: the data set, for messages.
        data: it.
        column: one of its columns, or of other data sets.
        is_text: it holds text, and never messages.
    """
    table, features = getattr(data, "data", None), getattr(data, "features", None)
    if table is None or not isinstance(features, Mapping) or column not in features:
        return
    feature = features[column]
    kind = str(getattr(feature, "dtype", ""))
    if isinstance(feature, Mapping) and is_text:
        kind = f"mappings of {sorted(feature)}"
    if kind.startswith(_NO_TEXT):
        raise ValueError(f"{where}: column {column!r} holds {kind}, but text is needed. Correct the data files.")
    if sum(name in features for name in ("text", "messages", "conversations", "prompt")) > 1:
        return  # several formats in one, which data_columns names
    in_order = table.num_rows == len(data)  # else a selection of the table's rows, and nulls may be outside it
    if in_order and table.column(column).null_count:
        row = table.column(column).is_null().index(True).as_py()
        raise ValueError(f"{where}: row {row} has no {column!r} (null). Correct or drop such rows.")


@contextlib.contextmanager
def rank0_first() -> Iterator[None]:
    """In place of ``trl.trainer.utils.global_then_local_main_first`` (TRL 1.16): rank 0, each node's first, the rest.

    There a failure of the rank that goes first leaves the others in its barrier; here each turn ends with an exchange.

    Raises:
        CheckpointError: some rank failed; on every rank. In one process a ValueError that says what was being done.
    """
    what, error = "preparing the data set", None
    turn = 0 if rank() == 0 else 1 if launch_config.local_rank() == 0 else 2
    for _ in range(turn if world_size() > 1 else 0):
        agree(None, what)
    try:
        yield
    except FAILURES as caught:
        error = caught
    if world_size() == 1:
        if error is not None:
            raise_named(error, what)
        return
    agree(error, what)
    for _ in range(turn + 1, 3):
        agree(None, what)


class TokensInRange:
    """A collator whose batches are looked at before the model sees them: on a GPU, a wrong id ends the process.

    Args:
        collate: the trainer's own.
        rows: of the model's embedding.
        counts_images: add how many images each row has, for an evaluation that leaves out rows.
    """

    def __init__(self, collate: Any, rows: int, *, counts_images: bool = False) -> None:
        self.collate, self.rows, self.counts_images = collate, rows, counts_images

    def __call__(self, features: Any) -> Any:
        """The batch of ``collate``.

        Raises:
            ValueError: naming key, row and id.
        """
        batch = self.collate(features)
        if self.counts_images:
            note_images(batch, features)
        for key, value in batch.items() if isinstance(batch, Mapping) else ():
            if not isinstance(value, Tensor) or not value.numel():
                continue
            if str(key).endswith("input_ids") and (value.is_floating_point() or value.dtype == torch.bool):
                raise ValueError(f"{key} of a batch holds {value.dtype}, but token ids are whole numbers. Correct it.")
            if value.dtype in (torch.int64, torch.int32):
                if str(key).endswith("input_ids"):
                    self._check(key, value)
                elif str(key).endswith("labels") and value.ndim == 2:
                    self._check(key, value.masked_fill(value == IGNORED, 0))
        return batch

    def _check(self, key: str, ids: Tensor) -> None:
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low >= 0 and high < self.rows:
            return
        place = ((ids < 0) | (ids >= self.rows)).nonzero()[0].tolist()
        raise ValueError(
            f"{key} of a batch: row {place[0]} has token id {cut(int(ids[tuple(place)]))}, but the model's embedding "
            f"has rows 0 to {self.rows - 1}. Use the model's own tokenizer, or data made with it."
        )


@contextlib.contextmanager
def checked_batches(trainer: Any, dataset: Any, counts_images: bool = False) -> Iterator[Any]:
    """While open, the data loader that the trainer makes of the yielded data set has :class:`TokensInRange` in it.

    In that is :class:`NamedRows`.

    Raises:
        ValueError: the data set has no rows, or has lost them all while it was prepared.
    """
    if has_length(dataset) and len(dataset) == 0:
        raise ValueError(
            "The data set has no rows left to train or evaluate on: preparation leaves out rows that have no tokens. "
            "Correct the data files, or the column names."
        )
    own, rows = trainer.data_collator, embedding_rows(trainer.model)
    if rows is None:
        yield dataset
        return
    where = next((name for name, data in _data_sets(vars(trainer)) if data is dataset), "the data set")
    dataset, decoders = undecoded(dataset)
    named = NamedRows(own, decoders, where, ImageTokens.of(getattr(trainer.model, "config", None)))
    trainer.data_collator = TokensInRange(named, rows, counts_images=counts_images)
    try:
        yield dataset
    finally:
        trainer.data_collator = own


def embedding_rows(model: Any) -> int | None:
    """Rows of a language model's input embedding; None where there is none to ask."""
    ask = getattr(model, "get_input_embeddings", None)
    try:
        found = None if ask is None else ask()
    except (NotImplementedError, AttributeError):  # Transformers' answer for models without one
        found = None
    return found.num_embeddings if isinstance(found, nn.Embedding) else None
