"""QLoRA, experts included, equals one process of stock PEFT and TRL on the same dequantised weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from tests.support.adapter_runs import adapter_tensors, lora, plain_adapter, plain_logits
from tests.support.compare import TOLERANCE, compare, distance
from tests.support.packed_runs import (
    SIZES,
    against_dequantised,
    four_bits,
    held,
    resume_and_take,
    save_dequantised,
    save_released,
    train_and_save,
)
from tests.support.preference_runs import pairs
from tests.support.reference_run import Run
from tests.support.spawn import run_plain, run_ranks
from tests.support.tiny_models import texts

ACCUMULATE = {"gradient_accumulation_steps": 2}
RECOMPUTE = {"gradient_checkpointing": True}
FUSED, EAGER = {"ep_dispatcher": "fused"}, {"ep_dispatcher": "eager"}
NESTED = {"bnb_4bit_use_double_quant": True}
ONE_EXPERT = {"num_experts": 2, "top_k": 1, "hidden_size": 128, "moe_intermediate_size": 128}
ATTENTION = {"target_parameters": None}
GPT_OSS = {"kind": "gpt_oss", "intermediate_size": 64, "moe_intermediate_size": None}
"""Stacks ``[E, in, out]`` with biases, which stay in full, and a forward of their own."""
RELEASED = {"release": "mxfp4"}
"""In place of bitsandbytes' settings: the experts stay as an MXFP4 release packs them."""
ONE_STACK = {"num_experts": 2, "top_k": 1}
EVERYWHERE = {"target_modules": "all-linear", "modules_to_save": ["k_proj"]}
Job = tuple[str, dict, dict, dict, dict, dict]
EP2, EP4 = {"ep_size": 2}, {"ep_size": 4}
# ranks -> run -> (trainer, training arguments, LoRA changes, bnb changes, model changes, our fields)
RUNS: dict[int, dict[str, Job]] = {
    1: {
        "fused": ("sft", {}, {}, {}, {}, FUSED),
        "recompute": ("sft", {**ACCUMULATE, **RECOMPUTE}, EVERYWHERE, NESTED, {}, EAGER),
        "mxfp4": ("sft", RECOMPUTE, {}, RELEASED, {}, FUSED),
    },
    2: {
        "ep1": ("sft", {}, {}, NESTED, {}, {"ep_size": 1, **FUSED}),
        "ep2_eager": ("sft", {**ACCUMULATE, **RECOMPUTE}, EVERYWHERE, NESTED, {}, {**EP2, **EAGER}),
        "ep2_fused": ("sft", {}, {}, {}, {}, {**EP2, **FUSED}),
        "ep2_domino": ("sft", {}, ATTENTION, {"bnb_4bit_quant_type": "fp4"}, {}, {**EP2, "ep_dispatcher": "domino"}),
        "ep2_gpt_oss": ("sft", {}, {}, {}, GPT_OSS, {**EP2, **FUSED}),
        "ep2_dpo": ("dpo", RECOMPUTE, {}, {}, {}, {**EP2, **FUSED}),
        "mxfp4_ep1": ("sft", {**ACCUMULATE, **RECOMPUTE}, {}, RELEASED, {}, {"ep_size": 1, **FUSED}),
        "mxfp4_ep2": ("sft", ACCUMULATE, {}, RELEASED, {}, {**EP2, **EAGER}),
        "mxfp4_ep2_dpo": ("dpo", {}, {}, RELEASED, {}, {**EP2, **FUSED}),
    },
    4: {
        "ep4": ("sft", RECOMPUTE, {}, {}, {}, {**EP4, **FUSED}),
        "ep2_efsdp2": ("sft", ACCUMULATE, {}, NESTED, {}, {**EP2, **FUSED}),
        # one expert a rank: its matrices are cut into blocks of their input
        "one_expert": ("sft", RECOMPUTE, {}, NESTED, ONE_EXPERT, EP2),
        "hsdp2_ep2": ("sft", {}, {}, {}, {}, {**EP2, "mp_replicate_size": 2, **FUSED}),
        "mxfp4_ep4": ("sft", {}, {}, RELEASED, {}, {**EP4, **FUSED}),
        "mxfp4_ep2_efsdp2": ("sft", RECOMPUTE, {}, RELEASED, {}, {**EP2, **FUSED}),
        # its rows are cut
        "mxfp4_one_expert": ("sft", ACCUMULATE, ATTENTION, RELEASED, ONE_STACK, {**EP2, "ep_dispatcher": "domino"}),
    },
}
CASES = [(world_size, name) for world_size, runs in RUNS.items() for name in runs]


@pytest.fixture(scope="module")
def outcome(tiny: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict]:
    done: dict[int, dict] = {}
    plain: dict[tuple, str] = {}
    released: dict[str, tuple[str, str]] = {}

    def dequantised(path: str, *how: Any) -> str:
        if (path, *how) not in plain:
            plain[path, *how] = save_dequantised(path, str(tmp_path_factory.mktemp("plain")), *how)
        return plain[path, *how]

    def release(sizes: dict) -> tuple[str, str]:
        if (key := str(sizes)) not in released:
            folder = str(tmp_path_factory.mktemp("released"))
            released[key] = save_released(folder, hidden_size=64, intermediate_size=64, **sizes)
        return released[key]

    def get(world_size: int) -> dict:
        if world_size not in done:
            jobs = {}
            for name, (trainer, args, changes, bits, model, turbo) in RUNS[world_size].items():
                # Factors that are not zero: one Adam step would make signs of others, which is ill-conditioned.
                kwargs = {"peft_config": lora(**{"init_lora_weights": False, **changes})}
                if bits is RELEASED:
                    path, beside = release(model)
                else:
                    path = tiny(**{name: size for name, size in {**SIZES, **model}.items() if size is not None})
                    kept = ("k_proj",) if changes is EVERYWHERE else ()
                    beside = dequantised(path, bits.get("bnb_4bit_quant_type", "nf4"), bits is NESTED, kept)
                    kwargs["quantization_config"] = four_bits(**bits)
                data = {"text": texts(64)} if trainer == "sft" else pairs(64)
                jobs[name] = Run(path, data, args, turbo, trainer, trainer_kwargs=kwargs, after_train=held), beside
            done[world_size] = against_dequantised(jobs, world_size)
        return done[world_size]

    return get


@pytest.mark.parametrize(("world_size", "run"), CASES)
def test_equals_one_process_on_dequantised_weights(outcome, world_size, run):
    record, reference = outcome(world_size)[run]
    comparison = compare(record, reference)
    print(world_size, run, comparison.report)
    assert comparison, comparison.report
    assert len(record.gradients) == 3
    assert record.trainable == reference.trainable


def test_between_steps_a_rank_holds_packed_bytes(outcome):
    """Of each quantised element 4 bits and a share of its block's scale, on one rank; what is in full is small."""
    experts, dense = 2 * 8 * 3 * 64 * 64, 2 * (2 * 64 * 64 + 2 * 32 * 64)
    for rank in outcome(2)["ep2_fused"][0].extra["ranks"]:
        found = rank["after"]
        assert found["torch.uint8"] == (experts + dense) // 2 * 9 // 16
        assert set(found) == {"torch.uint8", "torch.float32"}
        head, routers = 2 * 384 * 64, 2 * 8 * 64
        assert found["torch.float32"] < 4 * (head // 2 + routers + 16 * 2**10), found


# Files


STEPS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "router_aux_loss_coef": 0.0}


def saved_run(path: str, folder: str, turbo: dict, batch: int) -> Run:
    args = {"output_dir": folder, "per_device_train_batch_size": batch, **STEPS}
    kwargs = {"peft_config": lora(), "quantization_config": four_bits(**NESTED)}
    return Run(path, {"text": texts(64)}, args, turbo, "sft", trainer_kwargs=kwargs, gradients=False)


def test_files_resume_and_merged_export(tiny, tmp_path):
    """At ep 2, and in one process: saved adapter and merged model load in plain PEFT over the dequantised base; what
    ep 2 saved goes on at ep 2 x efsdp 2; what plain PEFT wrote loads there and is saved bit equal."""
    path = tiny(**SIZES)
    plain, source = save_dequantised(path, str(tmp_path / "plain"), nested=True), str(tmp_path / "source")
    plain_adapter(path, source)
    two, alone = str(tmp_path / "two"), str(tmp_path / "alone")
    found = {
        two: run_ranks(train_and_save, 2, saved_run(path, two, {"ep_size": 2}, 4), two, timeout=100)[0],
        alone: run_plain(train_and_save, saved_run(path, alone, {}, 8), alone, timeout=100),
    }
    for folder, mine in found.items():
        file = adapter_tensors(f"{folder}/adapter")
        assert len(file) == 16
        for name, tensor in file.items():
            assert torch.equal(tensor, mine["adapters"][name.replace(".weight", ".default.weight")]), name
        assert distance(mine["logits"], plain_logits(plain, f"{folder}/adapter")) < TOLERANCE
        assert distance(mine["logits"], plain_logits(f"{folder}/merged", None)) < TOLERANCE
        assert distance(mine["logits"], plain_logits(path, f"{folder}/adapter")) > 1e-3, "the base is not quantised"
    checkpoint = os.path.join(two, "checkpoint-2")
    stored = FileSystemReader(f"{checkpoint}/dcp").read_metadata().state_dict_metadata
    assert len(stored) == 4 * 16  # a step and two moments beside each
    assert all("lora_" in name for name in stored), "a checkpoint holds base weights"
    again = saved_run(path, str(tmp_path / "again"), {"ep_size": 2}, 2)
    saved = str(tmp_path / "saved")
    four = run_ranks(resume_and_take, 4, again, checkpoint, source, saved, timeout=100)[0]
    worst = max(distance(four["adapters"][name], tensor) for name, tensor in found[two]["adapters"].items())
    print(f"ep2 -> ep2 x efsdp2: {worst:.1e}")
    assert worst < 1e-4
    before, after = adapter_tensors(source), adapter_tensors(saved)
    assert set(after) == set(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert distance(four["logits"], plain_logits(plain, source)) < TOLERANCE
