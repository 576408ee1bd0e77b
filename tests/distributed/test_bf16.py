"""bf16 runs: compute in bf16 with float32 reduction, storage as loaded; within bf16 error of one process."""

from __future__ import annotations

import math
import re

import pytest
import torch

from hf_fsdpturbo.ops import weight_copies
from hf_fsdpturbo.shards import local_tensor
from tests.support.compare import compare, distance
from tests.support.reference_run import Record, Run, merge_batches, run_references, run_turbo_all
from tests.support.spawn import run_plain_jobs, run_ranks
from tests.support.tiny_models import texts

BF16 = {"bf16": True}
HEAD = {"fused_linear_cross_entropy": "on"}  # "auto" leaves TRL's on CPU
LOW_RATE = {"learning_rate": 2e-5}


def watch_dtypes(trainer) -> dict[str, set[str]]:
    """Hooks that note the dtypes at work; the sets fill while training runs."""
    seen: dict[str, set[str]] = {"rows": set(), "expert weights": set(), "attention": set(), "norms": set()}
    trainer.seen = seen

    def watch_rows(view):
        forward_rows = view.forward_rows

        def watched(rows, *args):
            seen["rows"].add(str(rows.dtype))
            seen["expert weights"].update(str(weight.dtype) for weight in view.weights())
            return forward_rows(rows, *args)

        view.forward_rows = watched

    def norms(module, args, output):
        seen["norms"].update((str(module.weight.dtype), str(output.dtype)))

    for name, module in trainer.model.named_modules():
        if name.endswith("mlp.experts"):
            watch_rows(module.forward.experts)
        elif name.endswith("layernorm"):
            module.register_forward_hook(norms)
        elif name.endswith("q_proj"):
            module.register_forward_pre_hook(lambda m, args: seen["attention"].add(str(m.weight.dtype)))
    return {}


def copies_written(trainer) -> dict:
    """How many copies of experts the last step left, and whether each is its weight, cast."""
    found = weight_copies.current_copies()
    pairs = [(local_tensor(p.detach()), found[p]) for p in trainer.model.parameters() if p in found]
    return {"written": len(pairs), "equal": all(torch.equal(w.to(copy.dtype), copy) for w, copy in pairs)}


def dtypes_seen(trainer) -> dict:
    stored = {str(parameter.dtype) for parameter in trainer.model.parameters()}
    gradients = {str(gradient.dtype) for step in trainer.record.gradients for gradient in step.values()}
    state = {str(v.dtype) for s in trainer.optimizer.state.values() for k, v in s.items() if k != "step"}
    return {**trainer.seen, "stored": stored, "gradients": gradients, "moments": state}


@pytest.fixture(scope="module")
def runs(tiny) -> dict[str, Record]:
    path, data = tiny("qwen3_moe"), {"text": texts(24)}
    in_bf16 = tiny("qwen3_moe", dtype="bfloat16")
    watch = {"before_train": watch_dtypes, "after_train": dtypes_seen}
    ep2 = {"ep_size": 2}
    sharded = {
        "fp32": Run(path, data, {}, ep2, **watch),
        "bf16": Run(path, data, BF16, {**ep2, **HEAD}, **watch),
        "bf16_ep1": Run(path, data, BF16, {"ep_size": 1}, **watch),
        "stored": Run(path, data, BF16, {**ep2, **HEAD, "dist_config": {"param_storage_dtype": "bfloat16"}}, **watch),
        "stored_low": Run(
            path, data, {**BF16, **LOW_RATE}, {**ep2, "dist_config": {"param_storage_dtype": "bfloat16"}}, **watch
        ),
        "loaded_bf16": Run(in_bf16, data, BF16, ep2, model_kwargs={"dtype": "auto"}, **watch),
        "upcast": Run(in_bf16, data, BF16, {**ep2, "dist_config": {"param_storage_dtype": "float32"}}, **watch),
    }
    ours = {**ep2, **HEAD, "optim_implementation": "fsdpturbo"}
    sharded["one pass"] = Run(path, data, BF16, ours, gradients=False, after_train=copies_written)
    sharded["gpt_oss"] = Run(tiny("gpt_oss", layers=4), data, BF16, {**ep2, **HEAD})
    tied = tiny("qwen3_moe", tie=True)
    sharded["tied"], sharded["tied_object"] = (
        Run(tied, data, BF16, {**ep2, **HEAD}, as_object=o) for o in (False, True)
    )
    ep1 = {"bf16_ep1"}
    several = {name: run for name, run in sharded.items() if name not in ep1}
    by_rank = run_ranks(run_turbo_all, 2, list(several.values()), timeout=120)
    other = run_ranks(run_turbo_all, 2, [sharded[name] for name in ep1], timeout=60)
    records = {name: by_rank[0][i] for i, name in enumerate(several)}
    records.update({name: other[0][i] for i, name in enumerate(ep1)})
    batches = merge_batches([ranks[0] for ranks in by_rank])
    models = (path, sharded["gpt_oss"].model)
    jobs = [(Run(model, data, args), 2, batches) for model in models for args in ({}, BF16)]
    names = ("one fp32", "one bf16", "gpt_oss fp32", "gpt_oss one bf16")
    records.update(zip(names, run_plain_jobs(run_references, jobs), strict=True))
    return records


def off(record: Record, reference: Record) -> dict[str, float]:
    """Distance of every first gradient."""
    return {name: distance(g, reference.gradients[0][name]) for name, g in record.gradients[0].items()}


@pytest.mark.parametrize("name", ["bf16", "bf16_ep1", "stored", "loaded_bf16", "upcast"])
def test_within_bf16_error_of_one_process(runs, name: str):
    """Stock training under autocast is as far from fp32 as this; twice that is allowed, and exactly fp32 is not."""
    record, truth, autocast = runs[name], runs["one fp32"], runs["one bf16"]
    assert record.losses[0] == pytest.approx(truth.losses[0], rel=2e-3)
    assert record.losses[2] == pytest.approx(truth.losses[2], rel=4e-3)
    assert record.grad_norms[0] == pytest.approx(truth.grad_norms[0], rel=2e-2)
    mine, theirs = off(record, truth), off(autocast, truth)
    assert max(theirs.values()) > 1e-4, "the yardstick did not run in bf16"
    for layer in mine:
        assert mine[layer] < max(2 * theirs[layer], 0.05), (layer, mine[layer], theirs[layer])
    assert min(mine.values()) > 1e-4, "the run was not in bf16"


@pytest.mark.parametrize(
    ("name", "truth", "autocast"),
    [("bf16", "one fp32", "one bf16"), ("gpt_oss", "gpt_oss fp32", "gpt_oss one bf16")],
)
def test_no_kind_of_tensor_is_further_from_float32_than_plain(runs, name: str, truth: str, autocast: str):
    """What autocast keeps in float32 (norms, sinks, biases) is float32 here: each kind within 1.5 times its distance.

    Over the layers the mean is taken, in logarithms: a token that is routed otherwise moves single tensors by more.
    """
    mine, theirs = off(runs[name], runs[truth]), off(runs[autocast], runs[truth])
    kinds: dict[str, list[float]] = {}
    for layer, distance_ in mine.items():
        kinds.setdefault(re.sub(r"\d+", "*", layer), []).append(math.log(distance_ / theirs[layer]))
    ratios = {kind: math.exp(sum(logs) / len(logs)) for kind, logs in kinds.items()}
    assert max(ratios.values()) < 1.5, sorted(ratios.items(), key=lambda item: -item[1])[:5]


def test_compute_is_bf16_storage_and_reduction_are_float32(runs):
    seen = runs["bf16"].extra["after"]
    for what in ("rows", "expert weights", "attention"):
        assert seen[what] == {"torch.bfloat16"}, what
    for what in ("stored", "gradients", "moments", "norms"):
        assert seen[what] == {"torch.float32"}, what


def test_our_adamw_writes_the_experts_copies(runs):
    """Where FSDP has nothing to gather, experts compute on copies; the steps are those of torch's AdamW."""
    assert runs["one pass"].extra["after"] == {"written": 4, "equal": True}
    assert compare(runs["one pass"], runs["bf16"], what=("losses", "grad_norms", "weights"))


def test_fp32_run_is_fp32_everywhere(runs):
    for what, dtypes in runs["fp32"].extra["after"].items():
        assert dtypes <= {"torch.float32"}, what


def test_storage_dtype(runs):
    """``auto`` keeps what was loaded, ``bfloat16`` and ``float32`` convert on the way."""
    for name in ("stored", "stored_low", "loaded_bf16"):
        assert runs[name].extra["after"]["stored"] == {"torch.bfloat16"}, name
    assert runs["upcast"].extra["after"]["stored"] == {"torch.float32"}
    start = runs["stored"].start_weights
    for name, weight in runs["fp32"].start_weights.items():
        assert torch.equal(start[name], weight.bfloat16()), name


def test_bf16_storage_loses_small_updates(runs):
    """Why the warning is there: at a low rate many weights stay where they were; in float32 none does."""

    def moved(record: Record) -> float:
        pairs = [(record.weights[n], w) for n, w in record.start_weights.items() if n.endswith("q_proj.weight")]
        return sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)

    assert moved(runs["stored_low"]) < 0.6
    assert moved(runs["bf16"]) > 0.95


def test_tied_head_by_path_is_the_object(runs):
    """Tied on meta only after sharding: head and embedding must land in one unit although only one is an embedding."""
    record, same = runs["tied"], runs["tied_object"]
    assert record.losses == pytest.approx(same.losses, rel=1e-6)
    for name, gradient in same.gradients[0].items():
        assert distance(record.gradients[0][name], gradient) < 1e-5, name


ADAPTERS = {
    "adapted": {"target_modules": ["q_proj"]},
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}
"""By what it does to a tied pair of embedding and head: PEFT's wrappers give them other names."""


@pytest.fixture(scope="module")
def adapted(tiny) -> dict[tuple[str, bool], Record]:
    """Records by adapter and whether the model was an object."""
    from peft import LoraConfig

    keys = [(name, as_object) for name in ADAPTERS for as_object in (False, True)]
    runs = [
        Run(
            tiny("qwen3_moe", tie=True),
            {"text": texts(8)},
            {**BF16, "max_steps": 2},
            {"ep_size": 2},
            trainer_kwargs={"peft_config": LoraConfig(r=4, **ADAPTERS[name])},
            as_object=as_object,
        )
        for name, as_object in keys
    ]
    return dict(zip(keys, run_ranks(run_turbo_all, 2, runs, timeout=100)[0], strict=True))


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_trains_nothing_of_the_base(adapted, name: str):
    """By path the loader makes whole parameters (norms, the embedding) anew, trainable ones."""
    names = adapted[name, False].trainable
    assert names
    assert all("lora_" in each or "modules_to_save" in each for each in names), names


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_beside_a_tied_head_by_path_is_the_object(adapted, name: str):
    record, same = adapted[name, False], adapted[name, True]
    assert record.losses == pytest.approx(same.losses, rel=1e-6)
    assert record.gradients[0].keys() == same.gradients[0].keys() != set()
    for each, gradient in same.gradients[0].items():
        assert distance(record.gradients[0][each], gradient) < 1e-5, each
