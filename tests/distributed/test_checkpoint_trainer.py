"""The Trainer's own switches over our checkpoints: best, limit, weights only, pushes, async saves, first weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_fsdpturbo.checkpoint import intact
from hf_fsdpturbo.commands import export_door
from hf_fsdpturbo.export import export_checkpoint
from tests.support.reference_run import Run, build_trainer, whole_parameters
from tests.support.spawn import RankError, run_plain, run_ranks
from tests.support.tiny_models import save_tiny, texts
from tests.support.written import tensors_of

ARGS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 1}
EVALUATE = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "loss"}


def make_run(model: str, turbo: dict | None = None, **args) -> Run:
    return Run(
        model=model, data={"text": texts(16)}, eval_data={"text": texts(4, seed=1)}, args={**ARGS, **args},
        turbo={"ep_size": 2} if turbo is None else turbo, gradients=False,
    )  # fmt: skip


def names(run_dir: Path) -> list[str]:
    return sorted(name for name in os.listdir(run_dir) if name.startswith(("checkpoint", "_")))


# Best, limit, weights only


def train_to_best(run: Run, output_dir: str, best_step: int) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """Rank function: evaluation losses are dictated so that one step is best; weights then, and at the end."""
    trainer = build_trainer(run, turbo=True, output_dir=output_dir)
    at_best: dict[str, Tensor] = {}

    def evaluate(*args, **kwargs):
        step = trainer.state.global_step
        if step == best_step:
            at_best.update(whole_parameters(trainer.model))
        metrics = {"eval_loss": abs(step - best_step) + 1.0}
        trainer.log(metrics)
        return metrics

    trainer._evaluate = evaluate
    trainer.train()
    return trainer.state.best_model_checkpoint, at_best, whole_parameters(trainer.model)


@pytest.mark.parametrize("weights_only", [False, True], ids=["shards", "hub"])
@pytest.mark.parametrize("world", [1, 2])
def test_best_model_and_limit(tmp_path, weights_only, world):
    run = make_run(
        save_tiny("qwen3_moe", tmp_path / "model"), {"checkpoint_format": "dcp"} if world == 1 else None,
        **EVALUATE, save_total_limit=2, save_only_model=weights_only,
    )  # fmt: skip
    directory = tmp_path / "run"
    if world == 1:
        best, at_best, end = run_plain(train_to_best, run, str(directory), 2, timeout=60)
    else:
        best, at_best, end = run_ranks(train_to_best, world, run, str(directory), 2, timeout=60)[0]
    assert best == str(directory / "checkpoint-2")
    assert names(directory) == ["checkpoint-2", "checkpoint-4"]
    assert all(torch.equal(at_best[name], end[name]) for name in at_best)
    state = json.loads((directory / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == best
    assert (directory / "checkpoint-4" / "model.safetensors").exists() == weights_only
    assert (directory / "checkpoint-4" / "dcp").exists() != weights_only
    for name in names(directory):
        intact.check(str(directory / name))


def test_strategy_best_keeps_the_best(tmp_path):
    run = make_run(
        save_tiny("qwen3_moe", tmp_path / "model"), **EVALUATE, save_strategy="best", save_total_limit=1
    )
    best, at_best, end = run_ranks(train_to_best, 2, run, str(tmp_path / "run"), 3, timeout=60)[0]
    assert names(tmp_path / "run") == ["checkpoint-3"]
    assert best.endswith("checkpoint-3")
    assert all(torch.equal(at_best[name], end[name]) for name in at_best)


def test_each_epoch(tmp_path):
    run = make_run(
        save_tiny("qwen3_moe", tmp_path / "model"), save_strategy="epoch", max_steps=-1, num_train_epochs=2,
        per_device_train_batch_size=4,
    )  # fmt: skip
    run_ranks(train_once, 2, run, str(tmp_path / "run"), timeout=60)
    assert names(tmp_path / "run") == ["checkpoint-2", "checkpoint-4"]


def train_once(run: Run, output_dir: str, resume: str | None = None, async_save: bool = False) -> dict[str, Tensor]:
    """Rank function: weights at the end."""
    trainer = build_trainer(run, turbo=True, output_dir=output_dir)
    trainer.async_save = async_save
    trainer.train(resume_from_checkpoint=resume)
    return whole_parameters(trainer.model)


def test_weights_only_checkpoint_cannot_be_resumed(tmp_path):
    run = make_run(save_tiny("qwen3_moe", tmp_path / "model"), save_only_model=True, max_steps=1)
    run_ranks(train_once, 2, run, str(tmp_path / "run"), timeout=60)
    with pytest.raises(RankError, match="save_only_model .*no optimizer shards"):
        run_ranks(train_once, 2, run, str(tmp_path / "b"), str(tmp_path / "run" / "checkpoint-1"), timeout=60)


# Pushes


def train_and_push(run: Run, output_dir: str, strategy: str) -> list[tuple[str, list[str]]]:
    """Rank function: uploads go to a stand-in that notes the folder's name and its files."""
    import transformers.trainer as module

    uploads: list[tuple[str, list[str]]] = []

    class Api:
        def upload_folder(self, folder_path, ignore_patterns=None, **kwargs):
            from huggingface_hub.utils import filter_repo_objects

            paths = [str(p.relative_to(folder_path)) for p in Path(folder_path).rglob("*") if p.is_file()]
            sent = sorted(filter_repo_objects(paths, ignore_patterns=ignore_patterns))
            uploads.append((os.path.basename(folder_path), sent))

            class Done:
                def is_done(self):
                    return True

                done = is_done

            return Done()

    def init_hf_repo(self, *args, **kwargs):
        self.hub_model_id, self.push_in_progress = "someone/something", None

    module.hf_api = Api
    run_class = type(build_trainer(run, turbo=True)).__mro__[1]
    run_class.init_hf_repo = init_hf_repo
    trainer = build_trainer(
        run, turbo=True, output_dir=output_dir, push_to_hub=True, hub_strategy=strategy, hub_always_push=True
    )
    trainer.train()
    return uploads


def test_pushes_hold_weights_and_whole_checkpoints(tmp_path):
    run = make_run(save_tiny("qwen3_moe", tmp_path / "model"), max_steps=2)
    first, second = run_ranks(train_and_push, 2, run, str(tmp_path / "run"), "all_checkpoints", timeout=60)
    assert second == []
    assert [folder for folder, _ in first] == ["run", "checkpoint-1", "run", "checkpoint-2"]
    for folder, files in first:
        if folder == "run":
            assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(files)
            assert not [file for file in files if file.startswith(("checkpoint", "_"))]
        else:
            assert {"COMPLETE.json", "dcp/.metadata", "trainer_state.json"} <= set(files)


# Asynchronous


def test_async_saves_are_the_same_and_whole(tmp_path):
    """Training goes on while a save is written; what is saved is the state at the call."""
    run = make_run(save_tiny("qwen3_moe", tmp_path / "model"), save_total_limit=3)
    a = run_ranks(train_once, 2, run, str(tmp_path / "sync"), None, False, timeout=60)[0]
    b = run_ranks(train_once, 2, run, str(tmp_path / "async"), None, True, timeout=60)[0]
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert names(tmp_path / "async") == names(tmp_path / "sync") == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
    for name in names(tmp_path / "async"):
        intact.check(str(tmp_path / "async" / name))
    for mode in ("sync", "async"):
        export_checkpoint(str(tmp_path / mode / "checkpoint-3"), str(tmp_path / f"{mode}-hub"), 10**9)
    sync, later = tensors_of(tmp_path / "sync-hub"), tensors_of(tmp_path / "async-hub")
    assert all(torch.equal(sync[name], later[name]) for name in sync)


def fail_in_background(run: Run, output_dir: str) -> str:
    """Rank function: the disk of rank 1 is full from step 2 on."""
    from tests.distributed.test_checkpoint_faults import fill_disk

    trainer = build_trainer(run, turbo=True, output_dir=output_dir)
    trainer.async_save = True
    fill_disk(trainer, 2)
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return "nothing"


def test_async_failure_reaches_every_rank(tmp_path):
    run = make_run(save_tiny("qwen3_moe", tmp_path / "model"))
    for text in run_ranks(fail_in_background, 2, run, str(tmp_path / "run"), timeout=60):
        assert "background" in text
        assert "No space left" in text
    assert names(tmp_path / "run") == ["checkpoint-1", "_saving"][:1] or "checkpoint-1" in names(tmp_path / "run")
    intact.check(str(tmp_path / "run" / "checkpoint-1"))


# First weights


def first_weights(runs: list[Run], directory: str) -> list[dict[str, Tensor]]:
    """Rank function: weights of freshly built trainers, and their exports."""
    results = []
    for number, run in enumerate(runs):
        trainer = build_trainer(run, turbo=True, output_dir=f"{directory}/{number}")
        results.append(whole_parameters(trainer.model))
        trainer.hub_file_bytes = 20_000
        trainer.save_model(trainer.args.output_dir)
        results[-1] |= {f"exported {n}": t for n, t in tensors_of(trainer.args.output_dir).items()}
    return results


MODES = ["init_on_meta", "init_on_rank0", "init_on_default"]
KINDS = ["qwen3_moe", "qwen3_5_moe", "gpt_oss", "deepseek_v3"]


@pytest.fixture(scope="module")
def by_mode(tmp_path_factory) -> dict[str, list[dict[str, Tensor]]]:
    """First weights of each kind in each mode, all from one spawn."""
    folder, runs = tmp_path_factory.mktemp("modes"), []
    for kind in KINDS:
        model = save_tiny(kind, folder / kind, tie=kind == "qwen3_moe")
        runs += [make_run(model, {"ep_size": 2, "init_config": {"name": mode}}) for mode in MODES]
    found = run_ranks(first_weights, 4, runs, str(folder / "out"), timeout=150)[0]
    return {kind: found[3 * number : 3 * number + 3] for number, kind in enumerate(KINDS)}


@pytest.mark.parametrize("kind", KINDS)
def test_init_modes_give_the_same_weights(by_mode, kind):
    meta, *others = by_mode[kind]
    assert len(meta) > 30
    for mode, weights in zip(MODES[1:], others, strict=True):
        assert weights.keys() == meta.keys(), mode
        assert not [name for name in meta if not torch.equal(meta[name], weights[name])], mode


def test_dcp_path(tmp_path):
    """From checkpoint-N, from its DCP directory, with another dtype; in one process; a foreign one is refused."""
    trained = make_run(save_tiny("qwen3_moe", tmp_path / "model"), max_steps=2)
    end = run_ranks(train_once, 2, trained, str(tmp_path / "run"), timeout=60)[0]
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    options = [{"ep_size": 4, "dcp_path": checkpoint}, {"ep_size": 4, "dcp_path": f"{checkpoint}/dcp"}]
    runs = [make_run(trained.model, {"dist_config": option}) for option in options]
    half = make_run(trained.model, {"dist_config": {**options[0], "param_storage_dtype": "bfloat16"}})
    *found, bf16 = run_ranks(first_weights, 4, [*runs, half], str(tmp_path / "out"), timeout=90)[0]
    one = make_run(trained.model, {"dist_config": {"dcp_path": checkpoint}})
    alone = run_plain(first_weights, [one], str(tmp_path / "alone"), timeout=60)
    for weights in (*found, *alone):
        assert not [name for name in end if not torch.equal(end[name], weights[name])]
    assert not [name for name in end if not torch.equal(end[name].bfloat16(), bf16[name])]
    other = save_tiny("qwen3_moe", tmp_path / "other", num_experts=4)
    with pytest.raises(RankError, match="experts.gate_up_proj"):
        run_ranks(first_weights, 4, [make_run(other, {"dist_config": options[0]})], "", timeout=60)


# Command line


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe", "gpt_oss"])
def test_export_command(tmp_path, kind, capsys):
    """checkpoint-N to Hub files without a process group: the same tensors as save_model, names as the source."""
    source = save_tiny(kind, tmp_path / "model", tie=kind == "qwen3_moe")
    run = make_run(source, max_steps=1)
    run_ranks(train_and_save, 2, run, str(tmp_path / "run"), timeout=60)
    out = tmp_path / "out"
    assert export_door.main([str(tmp_path / "run" / "checkpoint-1"), str(out), "--max-file-size", "50KB"]) == 0
    got, want = tensors_of(out), tensors_of(tmp_path / "run")
    assert sorted(got) == sorted(want) == sorted(tensors_of(source))
    assert not [name for name in want if not torch.equal(got[name], want[name])]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert {"config.json", "tokenizer.json"} <= set(os.listdir(out))
    assert not {"topology.json", "COMPLETE.json", "optimizer.json", "trainer_state.json"} & set(os.listdir(out))
    with pytest.raises(SystemExit, match="2"):
        export_door.main([str(tmp_path / "run" / "checkpoint-1"), str(out)])
    assert "is not empty" in capsys.readouterr().err


def train_and_save(run: Run, output_dir: str) -> None:
    """Rank function."""
    trainer = build_trainer(run, turbo=True, output_dir=output_dir)
    trainer.train()
    trainer.save_model()
