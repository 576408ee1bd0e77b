"""Issue 14, item 8: no common disk. Four ranks as two nodes, each with a folder of its own for all it writes."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.test_checkpoint_resume import ARGS, bit_equal, snapshot
from tests.support.adapter_runs import lora
from tests.support.reference_run import Run, build_trainer, forget_accelerate, whole_parameters
from tests.support.spawn import RankError, run_ranks
from tests.support.tiny_models import save_tiny, texts
from tests.support.written import tensors_of

KEPT = {"save_on_each_node": True, "gradient_accumulation_steps": 1}
LAYOUTS = {"ep2 x efsdp2": {"ep_size": 2}, "hsdp": {"ep_size": 2, "mp_replicate_size": 2}}


def on_two_nodes() -> int:
    """This rank's node; the launcher's variables and the host's name are those of two machines."""
    rank = int(os.environ["RANK"])
    os.environ.update({"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"})
    socket.gethostname = lambda: f"machine{rank // 2}"
    return rank // 2


def train(run: Run, folder: str, name: str, resume: str | bool | None = None) -> tuple[Any, dict[str, Tensor]]:
    from hf_fsdpturbo import parallel_state

    forget_accelerate()
    parallel_state._STATE = None  # the next run's layout is another
    own = f"{folder}/disk{on_two_nodes()}"
    trainer = build_trainer(run, turbo=True, output_dir=f"{own}/{name}")
    trainer.train(resume_from_checkpoint=f"{own}/{resume}" if isinstance(resume, str) else resume)
    return trainer, snapshot(trainer)


def all_of_it(runs: dict[str, Run], folder: str) -> dict[str, Any]:
    """Rank function: for each run six steps, and the same from step 3; the newest; a model saved."""
    from hf_fsdpturbo.ranks import everyone
    from hf_fsdpturbo.trainer.resumed_from import newest_checkpoint

    found: dict[str, Any] = {}
    for name, run in runs.items():
        _, whole = train(run, folder, name)
        trainer, again = train(run, folder, f"{name} again", f"{name}/checkpoint-3")
        found[name] = bit_equal(whole, again)
        if name == "hsdp":
            trainer.save_model()
            found["weights"] = whole_parameters(trainer.model)
            own = f"{folder}/disk{on_two_nodes()}/{name}"
            if os.environ["RANK"] == "3":
                shutil.rmtree(f"{own}/checkpoint-6")  # node 1 was killed before its part was whole
            everyone(None)
            found["newest"] = os.path.basename(newest_checkpoint(own, each_node=True))
    return found


def runs_of(model: str) -> dict[str, Run]:
    data = {"text": texts(40)}
    runs = {name: Run(model, data, {**ARGS, **KEPT}, turbo, gradients=False) for name, turbo in LAYOUTS.items()}
    adapter = {"peft_config": lora(init_lora_weights=False)}
    runs["adapter"] = Run(model, data, {**ARGS, **KEPT}, {"ep_size": 2}, gradients=False, trainer_kwargs=adapter)
    return runs


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> tuple[dict[str, Any], Path, str]:
    root = tmp_path_factory.mktemp("nodes")
    model = save_tiny("qwen3_moe", root / "model", attention_dropout=0.1)
    return run_ranks(all_of_it, 4, runs_of(model), str(root), timeout=150)[0], root, model


@pytest.mark.parametrize("name", [*LAYOUTS, "adapter"])
def test_item_8_resumes_bit_equal_from_each_nodes_own_disk(kept, name: str):
    found, root, _ = kept
    assert found[name] == []
    files = [sorted(os.listdir(root / f"disk{node}" / name / "checkpoint-3" / "dcp")) for node in (0, 1)]
    shards = [[file for file in names if file.endswith(".distcp")] for names in files]
    assert shards == [["__0_0.distcp", "__1_0.distcp"], ["__2_0.distcp", "__3_0.distcp"]]
    for node in (0, 1):
        there = set(os.listdir(root / f"disk{node}" / name / "checkpoint-3"))
        assert {"COMPLETE.json", "optimizer.json", "scheduler.pt", "trainer_state.json", "config.json"} <= there | {
            "config.json"
        }
        assert {f"rng_state_{rank}.pth" for rank in (2 * node, 2 * node + 1)} <= there


def test_item_8_the_newest_on_all_nodes_and_a_model(kept):
    found, root, _ = kept
    assert found["newest"] == "checkpoint-3"
    saved = tensors_of(root / "disk0" / "hsdp again")
    embedding = "model.embed_tokens.weight"
    assert torch.equal(saved[embedding], found["weights"][embedding])
    assert not (root / "disk1" / "hsdp again" / "model.safetensors").exists()


def resume_only(run: Run, folder: str, name: str) -> None:
    """Rank function."""
    train(run, folder, "x", f"{name}/checkpoint-3")


def test_item_8_what_is_missing_where(kept):
    """A file of node 1 gone: its own ranks say so. The marker gone too: the ranks that need it, and their hosts."""
    found, root, model = kept
    name = "ep2 x efsdp2"
    checkpoint = root / "disk1" / name / "checkpoint-3"
    (checkpoint / "dcp" / "__3_0.distcp").unlink()
    run = runs_of(model)[name]
    with pytest.raises(RankError, match=r"on rank 2 of 4: on host machine1: .*__3_0.distcp is missing"):
        run_ranks(resume_only, 4, run, str(root), name, timeout=60)
    marker = checkpoint / "COMPLETE.json"
    record = json.loads(marker.read_text())
    del record["files"]["dcp/__3_0.distcp"]
    marker.write_text(json.dumps(record))
    with pytest.raises(RankError, match=r"__3_0.distcp lies on no node .*rank 3 on machine1 need it"):
        run_ranks(resume_only, 4, run, str(root), name, timeout=60)
