"""SFT through the trainer equals one plain process: loss, norm, every gradient, weights after three AdamW steps, fp32.

Every layout is one spawn that does several runs; references replay the micro-batches the ranks saw.
"""

from __future__ import annotations

import math

import pytest

from hf_fsdpturbo.checkpoint.dcp import unwrap_optimizer
from hf_fsdpturbo.sharding import gradient_copy
from tests.support.compare import compare
from tests.support.hand_counts import assert_load
from tests.support.reference_run import Run, sharded_and_reference
from tests.support.spawn import RankError
from tests.support.tiny_models import VOCAB_SIZE, texts

ACCUMULATE = {"gradient_accumulation_steps": 2}
RECOMPUTE = {"gradient_checkpointing": True}
PACK = {"packing": True, "max_length": 32}
HEAD = {"fused_linear_cross_entropy": "on"}  # "auto" leaves TRL's on CPU, as these run it
TRLS_HEAD = {"full_logits", "unclipped", "padding_free", "mixtral", "gpt_oss"}
PADDING_FREE = {"padding_free": True, "max_length": None, "per_device_train_batch_size": 3}

# layout -> (ranks, hf_fsdpturbo fields)
LAYOUTS = {
    "ep2": (2, {"ep_size": 2}),
    "ep1": (2, {"ep_size": 1}),
    "ep4": (4, {"ep_size": 4, "ranks_per_node": 2}),
    "ep2_efsdp2": (4, {"ep_size": 2}),
    "ep2_edp2": (4, {"ep_size": 2, "dist_config": {"efsdp_size": 1}}),
    "hsdp2_ep2": (4, {"ep_size": 2, "mp_replicate_size": 2}),
    "edp4": (4, {"ep_size": 1, "dist_config": {"efsdp_size": 1}}),
}

# layout -> run -> (family, training arguments, config of the tiny model)
QWEN3_5 = ("qwen3_5_moe", {**ACCUMULATE, **RECOMPUTE}, {"layers": 4})
RUNS: dict[str, dict[str, tuple[str, dict, dict]]] = {
    "ep2": {
        "padding": ("qwen3_moe", {}, {}),
        "accumulation": ("qwen3_moe", ACCUMULATE, {}),
        "packing": ("qwen3_moe", {**PACK, **ACCUMULATE}, {}),
        "padding_free": ("qwen3_moe", PADDING_FREE, {}),
        "recompute": ("qwen3_moe", {**RECOMPUTE, **ACCUMULATE}, {}),
        "packing_recompute": ("qwen3_moe", {**PACK, **RECOMPUTE}, {}),
        "unclipped": ("qwen3_moe", {"max_grad_norm": 0.0}, {}),
        "kept_whole": ("qwen3_moe", ACCUMULATE, {}),
        "one_pass": ("qwen3_moe", {**ACCUMULATE, "weight_decay": 0.1}, {}),
        "tied_capped": ("qwen3_moe", ACCUMULATE, {"tie": True, "final_logit_softcapping": 0.5, "logit_scale": 1.7}),
        "qwen3_5": ("qwen3_5_moe", {}, {"layers": 4}),
        "qwen3_5_accumulation_recompute": QWEN3_5,
        "full_logits": ("qwen3_moe", {"label_smoothing_factor": 0.1}, {}),
    },
    "ep1": {
        "padding": ("qwen3_moe", {}, {}),
        "accumulation_recompute": ("qwen3_moe", {**ACCUMULATE, **RECOMPUTE}, {}),
        "qwen3_5": ("qwen3_5_moe", {}, {"layers": 4}),
    },
    "ep4": {
        "accumulation": ("qwen3_moe", ACCUMULATE, {}),
        "packing": ("qwen3_moe", PACK, {}),
        "qwen3_5": QWEN3_5,
        "two_stages": ("qwen3_moe", {**ACCUMULATE, **RECOMPUTE}, {}),
    },
    "ep2_efsdp2": {
        "accumulation_recompute": ("qwen3_moe", {**ACCUMULATE, **RECOMPUTE}, {}),
        "qwen3_5": ("qwen3_5_moe", {}, {"layers": 4}),
        "gpt_oss": ("gpt_oss", ACCUMULATE, {}),
        # one expert a rank, cut over two: input dims are sharded, and a bias shard is empty
        "gpt_oss_one_expert": ("gpt_oss", RECOMPUTE, {"num_experts": 2}),
        "one_expert": ("qwen3_moe", ACCUMULATE, {"num_experts": 2, "top_k": 1}),
        "copied_by_chunk": ("qwen3_moe", ACCUMULATE, {}),
        "one_pass": ("gpt_oss", {"weight_decay": 0.1}, {"num_experts": 2}),  # empty shards
    },
    "ep2_edp2": {
        "accumulation": ("qwen3_moe", ACCUMULATE, {}),
        "qwen3_5": QWEN3_5,
        "mixtral": ("mixtral", {}, {}),
    },
    "hsdp2_ep2": {
        "accumulation_recompute": ("qwen3_moe", {**ACCUMULATE, **RECOMPUTE}, {}),
        "qwen3_5": ("qwen3_5_moe", {}, {"layers": 4}),
        "deepseek_v3": ("deepseek_v3", ACCUMULATE, {}),
    },
    "edp4": {
        "padding": ("qwen3_moe", {}, {}),
    },
}
MORE_TURBO = {
    "kept_whole": {"dist_config": {"reshard_after_forward": False}},
    "two_stages": {"ep_dispatcher": "fused"},
    "one_pass": {"optim_implementation": "fsdpturbo"},
}


def count_chunk_copies(trainer) -> None:
    """Let every unit take the copies that only large ones take, and count them."""
    trainer.chunk_copies = 0
    original, trainer.large_copy = gradient_copy.copy_in_by_chunk, gradient_copy.LARGE_COPY

    def counted(*args) -> None:
        trainer.chunk_copies += 1
        original(*args)

    gradient_copy.copy_in_by_chunk, gradient_copy.LARGE_COPY = counted, 0
    trainer.uncounted = original


def chunk_copies(trainer) -> int:
    gradient_copy.copy_in_by_chunk, gradient_copy.LARGE_COPY = trainer.uncounted, trainer.large_copy
    return trainer.chunk_copies


def nodes_of_exchange(trainer) -> int:
    """0 in the reference."""
    forward = trainer.model.model.layers[0].mlp.experts.forward
    dispatcher = getattr(forward, "dispatcher", None)
    return 0 if dispatcher is None or dispatcher.nodes is None else dispatcher.nodes.num_nodes


def optimizer_of(trainer) -> tuple[str, bool]:
    """Where the optimizer's class comes from, and whether a clip factor is left over."""
    optimizer = unwrap_optimizer(trainer.optimizer)
    return type(optimizer).__module__, getattr(optimizer, "gradient_factor", None) is not None


def head_is_a_unit(trainer) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(trainer.model.lm_head, FSDPModule)


MORE_RUN = {
    "copied_by_chunk": {"before_train": count_chunk_copies, "after_train": chunk_copies},
    "two_stages": {"after_train": nodes_of_exchange},
    # without the recorder of gradients, which would have them scaled in memory
    "one_pass": {"gradients": False, "after_train": optimizer_of},
}
CASES = [(layout, name) for layout, runs in RUNS.items() for name in runs]


@pytest.fixture(scope="module")
def outcome(tiny):
    """``outcome(layout) -> {run: (record, reference, second reference or None)}``, each layout once.

    Linear attention amplifies rounding, so its runs get a second reference that says how much one process does so too.
    """
    done: dict[str, dict | Exception] = {}

    def get(layout: str) -> dict:
        if layout not in done:
            done[layout] = run_layout(layout)
        if isinstance(done[layout], Exception):
            raise done[layout]
        return done[layout]

    def run_layout(layout: str) -> dict | Exception:
        world_size, turbo = LAYOUTS[layout]
        data = {"text": texts(48)}
        runs = {
            name: Run(
                tiny(kind, **config),
                data,
                args,
                {**turbo, **({} if name in TRLS_HEAD else HEAD), **MORE_TURBO.get(name, {})},
                **MORE_RUN.get(name, {"after_train": head_is_a_unit}),
            )
            for name, (kind, args, config) in RUNS[layout].items()
        }
        linear = {name for name, (kind, _, _) in RUNS[layout].items() if kind == "qwen3_5_moe"}
        try:
            return sharded_and_reference(runs, world_size, timeout=200, yardstick=linear)
        except RankError as error:  # every test of the layout shows it, none spawns again
            return error

    return get


@pytest.mark.parametrize(("layout", "run"), CASES)
def test_equals_one_process(outcome, layout: str, run: str):
    record, reference, second = outcome(layout)[run]
    comparison = compare(record, reference, yardstick=second)
    print(comparison.report)
    assert comparison, comparison.report
    if run == "one_pass":
        assert record.extra["after"] == ("hf_fsdpturbo.optim.one_pass", False)
    else:
        assert len(record.gradients) == 3
        assert set(record.gradients[0]) == set(record.weights), "a parameter has no gradient"
    for rank in record.extra["ranks"]:
        assert rank.digest == record.digest, "replicas have drifted apart"


@pytest.mark.parametrize(("layout", "run"), CASES)
def test_trains_on_something(outcome, layout: str, run: str):
    """Uniform prediction at first; real, uneven token counts on every rank; weights that move."""
    record, _, _ = outcome(layout)[run]
    assert math.isclose(record.losses[0], math.log(VOCAB_SIZE), abs_tol=0.3)
    counts = [[int((b["labels"] != -100).sum()) for b in rank.batches] for rank in record.extra["ranks"]]
    assert min(map(min, counts)) > 5
    assert "packing" in run or len({sum(c) for c in counts}) > 1, f"token counts are even: {counts}"
    still = [n for n, w in record.weights.items() if (w == record.start_weights[n]).all()]
    assert not still, f"did not move: {still}"


@pytest.mark.parametrize(("layout", "run"), CASES)
def test_logged_metrics_equal_one_process(outcome, layout: str, run: str):
    """What TRL logs beside the loss, where it is a plain count or mean."""
    record, reference, _ = outcome(layout)[run]
    for key in ("num_tokens", "aux_loss"):
        mine = [log[key] for log in record.log_history if key in log]
        assert mine == pytest.approx([log[key] for log in reference.log_history if key in log], rel=1e-5), key


@pytest.mark.parametrize(("layout", "run"), CASES)
def test_expert_load_equals_counts_by_hand(outcome, layout: str, run: str):
    """Of each step, layer and expert: what one process's routers chose for real tokens; how undecided they were."""
    record, reference, _ = outcome(layout)[run]
    assert_load(record, reference)
    names = {"tokens_per_second", "memory_peak_gib", "data_wait_seconds", "grad_norm_dense", "grad_norm_expert"}
    assert names <= record.log_history[0].keys()
    assert ("experts/exchanged_gib" in record.log_history[0]) == (LAYOUTS[layout][1]["ep_size"] > 1)
    assert not names & reference.log_history[0].keys()


def test_the_exchange_had_two_stages(outcome):
    record, _, _ = outcome("ep4")["two_stages"]
    assert record.extra["after"] == 2


@pytest.mark.parametrize(("layout", "run"), [case for case in CASES if case[1] not in MORE_RUN])
def test_the_head_is_a_unit_where_it_is_ours_and_not_tied(outcome, layout: str, run: str):
    record, _, _ = outcome(layout)[run]
    assert record.extra["after"] == (run not in TRLS_HEAD and "tied" not in run)


def test_every_unit_was_copied_by_chunk(outcome):
    """Not vacuous: each micro-batch reduces two layers, their experts, head and root, all of them by copies."""
    record, _, _ = outcome("ep2_efsdp2")["copied_by_chunk"]
    assert record.extra["after"] >= 3 * 2 * 6
