"""`save_model`: plain Transformers loads it, under the names the source has, and gives the trainer's logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.support.reference_run import Run, run_turbo
from tests.support.spawn import run_plain, run_ranks
from tests.support.tiny_models import texts

# name -> (family, ranks, layout, config of the tiny model)
CASES = {
    "qwen3_moe": ("qwen3_moe", 2, {"ep_size": 2}, {}),
    "qwen3_5_moe": ("qwen3_5_moe", 2, {"ep_size": 2}, {}),
    "mixtral": ("mixtral", 4, {"ep_size": 2, "dist_config": {"efsdp_size": 1}}, {}),
    "deepseek_v3": ("deepseek_v3", 4, {"ep_size": 2, "mp_replicate_size": 2}, {}),
    "gpt_oss": ("gpt_oss", 4, {"ep_size": 2}, {}),
    "one_expert_cut": ("qwen3_moe", 4, {"ep_size": 2}, {"num_experts": 2, "top_k": 1}),
    "tied": ("qwen3_moe", 2, {"ep_size": 2}, {"tie": True}),
}
PROMPT = [[1, 45, 99, 310, 7, 121, 88, 15]]


def save_and_run(trainer) -> torch.Tensor:
    """After training: save, and the logits of the sharded model (all ranks together)."""
    trainer.save_model(trainer.args.output_dir)
    trainer.model.eval()
    with torch.no_grad():
        return trainer.model(input_ids=torch.tensor(PROMPT), use_cache=False).logits.float().cpu()


def saved_run(run: Run) -> torch.Tensor:
    return run_turbo(run).extra["after"]


def plain_logits(path: str) -> tuple[torch.Tensor, dict, str, str]:
    """For a plain process: what ``AutoModelForCausalLM`` makes of a directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor(PROMPT), use_cache=False).logits.float()
    text = AutoTokenizer.from_pretrained(path).decode(PROMPT[0])
    return logits, {k: sorted(map(str, v)) for k, v in info.items() if v}, type(model).__name__, text


def tensors(path: str | Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> shape and dtype over all safetensors files of a directory."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as content:
            for key in content.keys():  # noqa: SIM118  (not a dict)
                piece = content.get_slice(key)
                found[key] = (tuple(piece.get_shape()), piece.get_dtype())
    return found


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    done: dict[str, tuple[str, str, list[torch.Tensor]]] = {}

    def get(case: str):
        if case not in done:
            family, ranks, turbo, config = CASES[case]
            source, target = tiny(family, **config), str(tmp_path_factory.mktemp(f"saved_{case}"))
            args = {"output_dir": target, "max_steps": 2}
            run = Run(source, {"text": texts(24)}, args, turbo, after_train=save_and_run, gradients=False)
            done[case] = (source, target, run_ranks(saved_run, ranks, run, timeout=60))
        return done[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_plain_transformers_gives_the_same_logits(saved, case: str):
    source, target, by_rank = saved(case)
    logits, info, name, text = run_plain(plain_logits, target)
    before, _, name_before, text_before = run_plain(plain_logits, source)
    assert not info, info
    assert name == name_before, "the class in config.json"
    assert text == text_before
    for rank in by_rank:
        torch.testing.assert_close(logits, rank, rtol=1e-5, atol=1e-6)
    assert float((logits - before).abs().max()) > 1e-3, "nothing was trained"


@pytest.mark.parametrize("case", CASES)
def test_names_shapes_and_dtypes_are_those_of_the_source(saved, case: str):
    source, target, _ = saved(case)
    assert tensors(target) == tensors(source)


@pytest.mark.parametrize("case", CASES)
def test_config_and_side_files(saved, case: str):
    source, target, _ = saved(case)
    config, before = (json.loads((Path(p) / "config.json").read_text()) for p in (target, source))
    assert "distributed_config" not in config
    assert config["architectures"] == before["architectures"]
    experts = [key for key in before if key in ("num_experts", "num_local_experts", "n_routed_experts")]
    assert experts
    assert all(config[key] == before[key] for key in experts)
    names = {file.name for file in Path(target).iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "training_args.bin"} <= names
