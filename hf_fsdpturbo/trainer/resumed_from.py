"""What a run goes on from: which checkpoint, and a look at it before any of it is read."""

from __future__ import annotations

import os
import socket
from typing import Any

from hf_fsdpturbo.bounded import check_path
from hf_fsdpturbo.checkpoint import commit, plain_trainer, state_file
from hf_fsdpturbo.checkpoint.inside import check_checkpoint_links
from hf_fsdpturbo.loading.small_files import check_small_files
from hf_fsdpturbo.ranks import everyone, from_rank0, raised_on_every_rank, rank, together


def checkpoint_of(trainer: Any, given: Any) -> Any:
    """What ``train(resume_from_checkpoint=given)`` goes on from: a path, or what is no checkpoint. Collective.

    ``True``, also as text from a command line, is the newest finished one.

    Raises:
        ValueError: there is none, or it cannot be one of ours; on every rank.
    """
    if given is True or str(given).lower() == "true":
        given = newest_checkpoint(trainer.args.output_dir, trainer._saving.each_node)
    check_given(given, trainer.args)
    return given


def newest_checkpoint(run_dir: str, each_node: bool = False) -> str:
    """The newest finished checkpoint of a run, ours or plain Trainer's; says what it skipped. Collective.

    Args:
        run_dir: where they are.
        each_node: on each node's own disk: the newest that is finished on all of them.

    Raises:
        ValueError: there is none; on every rank.
    """
    if each_node:
        return _newest_on_all(run_dir)
    found: list[Any] = [None, []]
    with together(f"looking for checkpoints in {run_dir}"):
        if rank() == 0:
            commit.restore_moved_aside(run_dir)
            found = list(commit.last_checkpoint(run_dir, _may_be_taken))
            for note in found[1]:
                print(f"[hf_fsdpturbo] resume: {note}", flush=True)
    newest, notes = from_rank0(found)
    if newest is None:
        raise ValueError(
            "resume_from_checkpoint=True: No valid checkpoint found in output directory "  # as Trainer says it
            f"({run_dir}): none is finished. {'. '.join(notes)}"
        )
    return newest


def check_given(checkpoint: Any, args: Any) -> None:
    """Look at what is to be resumed from before it is read. Collective where there is something.

    Raises:
        ValueError: no path, a link that leads out, or a ``trainer_state.json`` that cannot be this checkpoint's; on
            every rank.
    """
    if not isinstance(checkpoint, str):
        return
    with raised_on_every_rank(f"resuming from {checkpoint}"):
        check_path("resume_from_checkpoint", checkpoint)
        if rank() == 0:
            check_checkpoint_links(checkpoint)
            check_small_files(checkpoint)
            state_file.check_state(checkpoint, args)


def refuse_stray_scaler(checkpoint: str | None, accelerator: Any) -> None:
    """Trainer loads ``scaler.pt`` wherever there is one, also into a run that has no gradient scaler. Collective.

    Raises:
        ValueError: there is one; on every rank.
    """
    if checkpoint is None:
        return
    with raised_on_every_rank(f"resuming from {checkpoint}"):
        path = os.path.join(checkpoint, "scaler.pt")
        if accelerator.scaler is None and os.path.exists(path):
            raise ValueError(f"{path} is of a run in fp16, and this run has no gradient scaler. Remove the file.")


def _newest_on_all(run_dir: str) -> str:
    with together(f"looking for checkpoints in {run_dir}"):
        mine = {step for step, path in commit.checkpoints(run_dir) if commit.is_finished(path)}
    by_rank = everyone((socket.gethostname(), sorted(mine)))
    common = set.intersection(*(set(steps) for _, steps in by_rank))
    if not common:
        raise ValueError(
            f"resume_from_checkpoint=True, but no checkpoint in output_dir {run_dir} is finished on every node: "
            f"{dict(by_rank)}. Start anew, or give one that is."
        )
    return os.path.join(run_dir, f"checkpoint-{max(common)}")


def _may_be_taken(checkpoint: str) -> bool:
    return commit.is_finished(checkpoint) or plain_trainer.is_whole(checkpoint)
