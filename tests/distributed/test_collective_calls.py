"""Calls that all ranks must make (H1), and what a sharded model's own ways to save give (C6); one spawn."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_save_model import plain_logits, tensors
from tests.support.reference_run import Run, build_trainer
from tests.support.spawn import RankError, run_plain, run_ranks
from tests.support.tiny_models import texts


def save_in_every_way(trainer, folder: Path) -> dict[str, Any]:
    """C6: three folders that should hold the same tensors; what ``get_state_dict`` gave, and what each way raised."""
    trainer.save_model(str(folder / "save_model"))
    seen: dict[str, Any] = {"state": None, "failed": {}, "said": []}
    accelerator, file = trainer.accelerator, folder / f"rank{trainer.args.process_index}.json"

    def state_dict() -> None:
        state = accelerator.get_state_dict(trainer.model)
        seen["state"] = {name: list(tensor.shape) for name, tensor in state.items()}
        main, save = accelerator.is_main_process, accelerator.save
        unwrapped = accelerator.unwrap_model(trainer.model)
        unwrapped.save_pretrained(folder / "state_dict", is_main_process=main, state_dict=state, save_function=save)

    ways = {
        "save_pretrained": lambda: trainer.model.save_pretrained(folder / "save_pretrained"),
        "unwrapped": lambda: accelerator.unwrap_model(trainer.model).save_pretrained(folder / "unwrapped"),
        "state_dict": state_dict,
    }
    for name, way in ways.items():
        seen["failed"][name] = "has not ended"
        file.write_text(json.dumps(seen))
        try:
            way()
            del seen["failed"][name]
        except Exception as error:  # noqa: BLE001  (the test says which way must not raise)
            seen["failed"][name] = f"{type(error).__name__}: {error}"
    return seen


def calls(run: Run, folder: Path) -> None:
    """Rank function: leaves what it saw in files, as the last call ends one of the ranks."""
    from transformers import TrainerCallback

    from hf_fsdpturbo import watcher

    watcher.POLL, watcher.SITS, watcher.GOODBYE = 0.1, 1.0, 0.0
    trainer = build_trainer(run, turbo=True)
    rank = trainer.args.process_index
    seen = save_in_every_way(trainer, folder)

    def keep(error: ValueError) -> None:
        seen["said"].append(str(error))
        (folder / f"rank{rank}.json").write_text(json.dumps(seen))

    if rank == 1:
        time.sleep(3)  # works, and comes at last
    trainer.evaluate()
    try:
        trainer.model.save_pretrained(folder / "refused", variant="fp16")
    except ValueError as error:
        keep(error)
    for other in (
        lambda: trainer.save_model(str(folder / "never")),
        lambda: trainer.model.save_pretrained(folder / "never"),
        lambda: trainer.accelerator.get_state_dict(trainer.model),
    ):
        try:
            trainer.evaluate() if rank else other()
        except ValueError as error:
            keep(error)

    class SavesAlone(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.is_world_process_zero and state.global_step == 2:
                trainer.save_model(str(folder / "never"))

    trainer.add_callback(SavesAlone())
    try:
        trainer.train()
    except ValueError as error:
        keep(error)
        time.sleep(10)  # the other rank is to go first


class OddRow(ValueError):
    """What a user's collator says of a row."""


def alone(run: Run, folder: Path) -> None:
    """Rank function: first both ranks raise and go on, then rank 1 alone meets a bad row in the second step."""
    from hf_fsdpturbo import watcher
    from tests.support.reference_run import forget_accelerate

    watcher.POLL, watcher.SITS, watcher.TOGETHER = 0.1, 1.0, 0.5
    seen: list[str] = []
    for case, bad in (("all", (0, 1)), ("one", (1,))):
        forget_accelerate()
        trainer = build_trainer(run, turbo=True)
        collate, batches, rank = trainer.data_collator, [], trainer.args.process_index

        def spoilt(rows, collate=collate, batches=batches, is_bad=rank in bad):
            batches.append(rows)
            if is_bad and len(batches) == 3:  # one is read ahead
                raise OddRow("row 17 has no text")
            return collate(rows)

        trainer.data_collator = spoilt
        started = time.monotonic()
        try:
            trainer.train()
        except OddRow as error:
            store = watcher.this_rank().store
            seen.append(f"{case}: {error}; {time.monotonic() - started:.0f}; {store.check(['verdict'])}")
            (folder / f"alone{rank}.txt").write_text("\n".join(seen))
    time.sleep(10)  # rank 0 is to go first


def test_an_error_of_one_rank_in_a_step_ends_the_others_with_its_message(tiny, tmp_path):
    """Spec 13: rank 0 sits in a collective that rank 1 will not come to, and can only be ended."""
    run = Run(tiny("qwen3_moe"), {"text": texts(16, seed=2)}, {"max_steps": 4}, {"ep_size": 2}, gradients=False)
    started = time.monotonic()
    with pytest.raises(RankError) as died:
        run_ranks(alone, 2, run, tmp_path, timeout=60)
    assert time.monotonic() - started < 60
    assert (died.value.rank, died.value.kind) == (0, "Died"), str(died.value)
    assert "rank 0 is ended: rank 1 left training with OddRow: row 17 has no text" in str(died.value)
    first, second = ((tmp_path / f"alone{rank}.txt").read_text().splitlines() for rank in range(2))
    assert first[0].startswith("all: row 17 has no text")
    assert first[0].endswith("False"), "an error that all ranks have is no verdict on any"
    assert len(first) == 1
    assert second[1].startswith("one: row 17 has no text")


@pytest.fixture(scope="module")
def called(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls")
    data = {"text": texts(8, seed=2)}
    run = Run(tiny("qwen3_moe"), data, {"max_steps": 4}, {"ep_size": 2}, eval_data=data, gradients=False)
    started = time.monotonic()
    with pytest.raises(RankError) as died:
        run_ranks(calls, 2, run, folder, timeout=90)
    seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    return folder, died.value, seen, time.monotonic() - started


def test_h1_a_call_of_one_rank_is_named_and_the_rank_that_sits_in_a_collective_is_ended(called):
    _, died, (first, second), seconds = called
    assert seconds < 80
    said = first["said"][-1]
    assert said.startswith("save_model was called by rank 0 of 2 only, but all ranks must call it together: rank 1 ")
    assert "waits in" in said
    assert len(second["said"]) == 4, "rank 1 sat in a collective and could not raise"
    assert (died.rank, died.kind) == (1, "Died"), str(died)
    assert f"rank 1 is ended: {said}" in str(died)


def test_h1_calls_of_different_names_are_named_on_every_rank(called):
    for seen in called[2]:
        for said, call in zip(seen["said"][1:4], ("save_model", "save_pretrained", "get_state_dict"), strict=True):
            assert "evaluate on rank 1" in said
            assert f"{call} on rank 0" in said


def test_c6_a_model_saves_itself_as_save_model_does(called):
    folder, _, (first, second), _ = called
    assert first["failed"] == second["failed"] == {}
    expected = tensors(folder / "save_model")
    assert expected
    for name in ("save_pretrained", "unwrapped", "state_dict"):
        assert tensors(folder / name) == expected, name
    assert first["state"]
    assert second["state"] == {}, "whole tensors are rank 0's"
    assert "variant" in first["said"][0]
    logits = [run_plain(plain_logits, str(folder / name))[0] for name in ("save_model", "save_pretrained")]
    torch.testing.assert_close(*logits, rtol=0, atol=0)


def test_c6_the_state_dict_saves_the_same_values(called):
    from safetensors.torch import load_file

    folder = called[0]
    one = load_file(folder / "save_model" / "model.safetensors")
    for way in ("save_pretrained", "unwrapped", "state_dict"):
        other = load_file(folder / way / "model.safetensors")
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=0, msg=f"{way}: {name}")
