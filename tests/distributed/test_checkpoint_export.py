"""Hub export from ranks: names and bits of the source, loads in plain Transformers, every rank writes its own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from tests.support.reference_run import Run, build_trainer
from tests.support.spawn import run_ranks
from tests.support.tiny_models import save_tiny, texts
from tests.support.written import tensors_of

SMALL_FILE = 20_000  # bytes: several files a rank, even for a tiny model


def weight_hashes(directory: str | Path) -> dict[str, str]:
    files = [*Path(directory).glob("*.safetensors"), *Path(directory).glob("*.index.json")]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}


def export_all(cases: list[tuple[Run, str, int]]) -> list[dict[str, str]]:
    """Rank function: build each trainer and save its model twice; hashes of both."""
    results = []
    for run, directory, file_bytes in cases:
        trainer = build_trainer(run, turbo=True)
        trainer.hub_file_bytes = file_bytes
        trainer.save_model(directory)
        trainer.save_model(f"{directory}-again")
        results.append(weight_hashes(directory))
    return results


def make_run(model: str, turbo: dict, **more) -> Run:
    return Run(model=model, data={"text": texts(8)}, turbo=turbo, gradients=False, **more)


CASES = {
    "qwen3_moe": {},
    "qwen3_5_moe": {"layers": 4},
    "mixtral": {},
    "deepseek_v3": {},
    "gpt_oss": {},
    "qwen3_moe tied": {"tie": True},
    "qwen3_moe bf16": {"dtype": "bfloat16"},
}
LAYOUTS = {
    "ep2": (2, {"ep_size": 2}),
    "ep2 x efsdp2": (4, {"ep_size": 2}),
    "ep4 x efsdp2, input dim": (8, {"ep_size": 4}),
    "hsdp": (4, {"ep_size": 2, "mp_replicate_size": 2, "dist_config": {"efsdp_size": 1}}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_bits_and_reload(tmp_path, layout):
    world, turbo = LAYOUTS[layout]
    experts = 4 if "input dim" in layout else 8
    cases, sources = [], {}
    for case, options in CASES.items():
        if case == "gpt_oss" and experts == 4:
            continue  # its biases cannot be cut below one expert
        sources[case] = save_tiny(case.split()[0], tmp_path / f"{case} source", num_experts=experts, **options)
        dtype = options.get("dtype", "float32")
        run = make_run(sources[case], turbo, model_kwargs={"dtype": dtype})
        cases.append((run, str(tmp_path / case), SMALL_FILE))
    run_ranks(export_all, world, cases, timeout=150)
    for case, source in sources.items():
        want, got = tensors_of(source), tensors_of(tmp_path / case)
        assert sorted(got) == sorted(want), case
        wrong = [n for n in want if want[n].dtype != got[n].dtype or not torch.equal(want[n], got[n])]
        assert not wrong, (case, wrong[:5])
        assert weight_hashes(tmp_path / case) == weight_hashes(f"{tmp_path / case}-again"), case
        index = json.loads((tmp_path / case / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) >= world, case
        check_plain_load(source, tmp_path / case)


def check_plain_load(source: str, exported: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = torch.arange(1, 25).view(2, 12)
    logits = []
    for path in (source, str(exported)):
        model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, dtype="auto")
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), (path, info)
        with torch.no_grad():
            logits.append(model.eval()(input_ids=ids).logits)
        assert model.config.architectures == [type(model).__name__]
    assert torch.equal(*logits)
    assert AutoTokenizer.from_pretrained(exported)("text").input_ids
