"""QLoRA, experts included, equals one process of stock PEFT and TRL on the same dequantised weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from tests.support.adapter_runs import lora
from tests.support.compare import compare
from tests.support.packed_runs import SIZES, against_dequantised, four_bits, held, save_dequantised
from tests.support.preference_runs import pairs
from tests.support.reference_run import Run
from tests.support.tiny_models import texts

ACCUMULATE = {"gradient_accumulation_steps": 2}
RECOMPUTE = {"gradient_checkpointing": True}
FUSED = {"ep_dispatcher": "fused"}
NESTED = {"bnb_4bit_use_double_quant": True}
ONE_EXPERT = {"num_experts": 2, "top_k": 1, "hidden_size": 128, "moe_intermediate_size": 128}
EVERYWHERE = {"target_modules": "all-linear", "modules_to_save": ["k_proj"]}
# layout -> (ranks, hf_fsdpturbo fields, run -> (trainer, training arguments, LoRA changes, bnb changes, model, fields))
RUNS: dict[str, tuple[int, dict, dict[str, tuple[str, dict, dict, dict, dict, dict]]]] = {
    "alone": (
        1,
        {},
        {
            "fused": ("sft", {}, {}, {}, {}, FUSED),
            "recompute": ("sft", {**ACCUMULATE, **RECOMPUTE}, EVERYWHERE, NESTED, {}, {"ep_dispatcher": "eager"}),
        },
    ),
    "ep2": (
        2,
        {"ep_size": 2},
        {
            "eager": ("sft", {**ACCUMULATE, **RECOMPUTE}, EVERYWHERE, NESTED, {}, {"ep_dispatcher": "eager"}),
            "fused": ("sft", {}, {}, {}, {}, FUSED),
            "domino": ("sft", {}, {"target_parameters": None}, {"bnb_4bit_quant_type": "fp4"}, {}, {"ep_dispatcher": "domino"}),
            "dpo": ("dpo", RECOMPUTE, {}, {}, {}, FUSED),
        },
    ),
    "ep1": (2, {"ep_size": 1}, {"sft": ("sft", {}, {}, NESTED, {}, FUSED)}),
    "ep4": (4, {"ep_size": 4}, {"sft": ("sft", RECOMPUTE, {}, {}, {}, FUSED)}),
    # one expert a rank: its matrices are cut into blocks of their input
    "ep2_efsdp2": (
        4,
        {"ep_size": 2},
        {
            "sft": ("sft", ACCUMULATE, {}, NESTED, {}, FUSED),
            "one_expert": ("sft", RECOMPUTE, {}, NESTED, ONE_EXPERT, {}),
        },
    ),
    "hsdp2_ep2": (4, {"ep_size": 2, "mp_replicate_size": 2}, {"sft": ("sft", {}, {}, {}, {}, FUSED)}),
}  # fmt: skip
CASES = [(layout, name) for layout, (_, _, runs) in RUNS.items() for name in runs]


@pytest.fixture(scope="module")
def outcome(tiny: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict]:
    done: dict[str, dict] = {}

    def get(layout: str) -> dict:
        if layout not in done:
            world_size, turbo, runs = RUNS[layout]
            jobs = {}
            for name, (trainer, args, changes, bits, model, more) in runs.items():
                path = tiny(**{**SIZES, **model})
                quant_type, nested = bits.get("bnb_4bit_quant_type", "nf4"), bool(bits.get("bnb_4bit_use_double_quant"))
                kept = ("k_proj",) if "modules_to_save" in changes else ()
                folder = str(tmp_path_factory.mktemp("plain"))
                plain = save_dequantised(path, folder, quant_type, nested, kept)
                kwargs = {"peft_config": lora(**changes), "quantization_config": four_bits(**bits)}
                data = {"text": texts(64)} if trainer == "sft" else pairs(64)
                run = Run(path, data, args, {**turbo, **more}, trainer, trainer_kwargs=kwargs, after_train=held)
                jobs[name] = run, plain
            done[layout] = against_dequantised(jobs, world_size)
        return done[layout]

    return get


@pytest.mark.parametrize(("layout", "run"), CASES)
def test_equals_one_process_on_dequantised_weights(outcome, layout, run):
    record, reference, yardstick = outcome(layout)[run]
    comparison = compare(record, reference, yardstick=yardstick)
    print(layout, run, comparison.report)
    assert comparison, comparison.report
    assert len(record.gradients) == 3
    assert record.trainable == reference.trainable
