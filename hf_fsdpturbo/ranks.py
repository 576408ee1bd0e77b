"""Who am I, what do the others say, and do all go on together: a failure on one rank is raised on all of them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

# Note [Failures that ranks exchange]
# Whatever reading, writing and converting raise (tokenizers raise a bare Exception on a full disk): no rank may leave
# a block alone, and nothing is swallowed, as all ranks raise it again. DCP's own exception derives from BaseException
# and is already the same on every rank; it is agreed on once more, harmlessly.
FAILURES = (Exception, CheckpointException)


class CheckpointError(ValueError):
    """Saving or loading failed; raised on every rank with the message of the rank where it happened."""


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def everyone(value: Any) -> list[Any]:
    """What each rank passed, by rank; any picklable objects. Collective; in one process ``[value]``."""
    values = [value]
    if world_size() > 1:
        values = [None] * world_size()
        with torch.device("cpu"):  # the caller may be building a model on meta
            dist.all_gather_object(values, value)
    return values


def from_rank0(value: Any) -> Any:
    """What rank 0 passed, on all ranks; any picklable object. Collective."""
    shared = [value]
    if world_size() > 1:
        with torch.device("cpu"):
            dist.broadcast_object_list(shared, src=0)
    return shared[0]


# The ranks of one machine

_node: tuple[Any, dist.ProcessGroup | None, list[int]] | None = None


def node() -> tuple[dist.ProcessGroup | None, list[int]]:
    """A group in host memory of the ranks on this machine, and which these are; the first of them is its leader.

    Made once (collective then). None for a rank that is alone there.
    """
    global _node
    if world_size() == 1:
        return None, [0]
    if _node is None or _node[0] is not dist.group.WORLD:
        names = everyone(socket.gethostname())
        mine = [index for index, name in enumerate(names) if name == names[rank()]]
        backend = "gloo" if dist.is_gloo_available() else None
        group = dist.new_group(mine, backend=backend, use_local_synchronization=True) if len(mine) > 1 else None
        _node = dist.group.WORLD, group, mine
    return _node[1], _node[2]


def everyone_on_node(value: Any) -> list[Any]:
    """What each rank of this machine passed, in the order of :func:`node`. Collective there."""
    group, mine = node()
    values: list[Any] = [None] * len(mine)
    if group is None:
        return [value]
    with torch.device("cpu"):
        dist.all_gather_object(values, value, group=group)
    return values


def from_node_leader(value: Any) -> Any:
    """What the leader of this machine passed, on all its ranks. Collective there."""
    group, mine = node()
    shared = [value]
    if group is not None:
        with torch.device("cpu"):
            dist.broadcast_object_list(shared, src=mine[0], group=group)
    return shared[0]


def own_from_node_leader(values: list[Any] | None) -> Any:
    """The one of the leader's values, one a rank of this machine, that is for this rank. Collective there.

    Args:
        values: on the leader, in the order of :func:`node`; None elsewhere.
    """
    group, mine = node()
    if group is None:
        assert values is not None
        return values[0]
    own: list[Any] = [None]
    with torch.device("cpu"):
        dist.scatter_object_list(own, values, src=mine[0], group=group)
    return own[0]


def on_ranks(failed: list[int]) -> str:
    """`` on rank 1, 3 of 8``; empty in one process."""
    return "" if world_size() == 1 else f" on rank {', '.join(map(str, failed))} of {world_size()}"


def agree(error: BaseException | None, what: str) -> None:
    """Exchange failures; every rank must call it.

    Args:
        error: what failed here, or None.
        what: what was being done, for the message.

    Raises:
        CheckpointError: some rank failed; names the ranks and the first message.
    """
    message = None if error is None or _only_elsewhere(error) else _first_line(error)
    failed = {index: text for index, text in enumerate(everyone(message)) if text is not None}
    if failed:
        first = next(iter(failed.values()))
        raise CheckpointError(f"{what} failed{on_ranks(list(failed))}: {first}") from error


def _only_elsewhere(error: BaseException) -> bool:
    """DCP raises one rank's failure on all ranks: only the rank where it happened reports it."""
    return isinstance(error, CheckpointException) and bool(error.failures) and rank() not in error.failures


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        causes = [str(cause[0]) for cause in error.failures.values()]
        return "; ".join(dict.fromkeys(causes)) or "DCP failed"
    text = str(error).strip() or repr(error)
    first = error.__context__ if error.__cause__ is None and not error.__suppress_context__ else None
    if isinstance(first, OSError) and not isinstance(error, OSError):  # tidying up after a full disk failed, too
        text = f"{text} (after {first})"
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Run a block that holds no collective on every rank; a failure in it anywhere is raised everywhere.

    Raises:
        CheckpointError: the block failed on some rank.
    """
    error: BaseException | None = None
    try:
        yield
    except CheckpointError:
        raise  # agreed on already, inside
    except FAILURES as caught:
        error = caught
    agree(error, what)


@contextlib.contextmanager
def raised_on_every_rank(what: str, rename: bool = True) -> Iterator[None]:
    """As :func:`together`, but what all ranks met alike is raised as it is: it needs no list of ranks.

    Args:
        what: what is being done, for the message; its last word is what it is done to.
        rename: an error of another package is raised as one that says this; False leaves it as it is.

    Raises:
        ValueError: the error itself where all ranks met the same and it is ours, else one that says what was being
            done, and on which ranks it failed. In one process ImportError and MemoryError stay as they are.
    """
    error: BaseException | None = None
    try:
        yield
    except CheckpointError:
        raise  # agreed on already, inside
    except FAILURES as caught:
        error = caught
    messages = everyone(None if error is None else str(error))
    if error is not None and len(set(messages)) == 1:
        if not rename:
            raise error
        if isinstance(error, ValueError) or world_size() == 1:
            raise_named(error, what)
    agree(error, what)


_AS_THEY_ARE = (ImportError, MemoryError, torch.OutOfMemoryError)


def raise_named(error: BaseException, what: str) -> NoReturn:
    """Raise a foreign error as a ValueError that says what was being done: Transformers' own seldom name the file.

    Raises:
        ValueError: in its place; our own, and those of ``_AS_THEY_ARE``, stay what they are.
    """
    subject = what.rpartition(" ")[2]
    if isinstance(error, _AS_THEY_ARE) or not isinstance(error, Exception):
        raise error
    if isinstance(error, ValueError) and (_is_ours(error) or subject in str(error)):
        raise error
    raise ValueError(f"{what} failed: {_first_line(error)}") from error


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised it."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and str(place.tb_frame.f_globals.get("__name__")).startswith(__package__ + ".")
