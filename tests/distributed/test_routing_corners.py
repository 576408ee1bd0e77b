"""Corners of routing and of the trainer's use keep parity with one process and do not hang: two ranks, EP 2."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.support.compare import compare
from tests.support.reference_run import Run, sharded_and_reference
from tests.support.tiny_models import texts

ALL = {0, 1, 2, 3, 4, 5, 6, 7}
NEVER = -30.0
EP2 = {"ep_size": 2}
FREE_MODULES = {**EP2, "dist_config": {"fsdp_ignored_modules": ["model.norm", "*.q_norm"]}}


def freeze_experts(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.requires_grad_(False)


def freeze_all_but_experts(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." in name)


def evaluate(trainer) -> dict[str, float]:
    return trainer.evaluate()


def only(*experts: int) -> dict[int, float]:
    """Scores that keep every token off all other experts."""
    return {expert: NEVER for expert in ALL - set(experts)}


# name -> (family, config of the tiny model, experts that get tokens)
ROUTES: dict[str, tuple[str, dict, set[int]]] = {
    "rank_without_tokens": ("qwen3_moe", {"favour": only(4, 5, 6, 7)}, {4, 5, 6, 7}),
    "other_rank_without_tokens": ("deepseek_v3", {"favour": only(0, 1, 2, 3)}, {0, 1, 2, 3}),
    "expert_without_tokens": ("qwen3_moe", {"favour": {5: NEVER}}, ALL - {5}),
    "one_expert": ("qwen3_moe", {"favour": only(6), "top_k": 1}, {6}),
    "two_experts_of_one_rank": ("gpt_oss", {"favour": only(2, 3)}, {2, 3}),
    "one_expert_a_rank": ("qwen3_moe", {"num_experts": 2, "top_k": 1}, {0, 1}),
    "one_expert_a_rank_one_idle": ("qwen3_moe", {"num_experts": 2, "top_k": 1, "favour": {0: NEVER}}, {1}),
    "every_expert": ("qwen3_moe", {"top_k": 8}, ALL),
    "every_expert_two": ("mixtral", {"num_experts": 2, "top_k": 2}, {0, 1}),
    "four_experts_a_rank_bias": ("gpt_oss", {"top_k": 8}, ALL),
}
ROUTE_ARGS = {
    "rank_without_tokens": {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
    "one_expert": {"gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def routed(tiny):
    data = {"text": texts(24)}
    runs = {
        name: Run(tiny(kind, **config), data, ROUTE_ARGS.get(name, {}), EP2)
        for name, (kind, config, _) in ROUTES.items()
    }
    return sharded_and_reference(runs, 2, timeout=150)


@pytest.mark.parametrize("name", ROUTES)
def test_routing_corner(routed, name: str):
    record, reference, _ = routed[name]
    comparison = compare(record, reference)
    assert comparison, comparison.report
    assert experts_used(reference.gradients[0]) == ROUTES[name][2], "the corner is not what it says"
    assert experts_used(record.gradients[0]) == ROUTES[name][2]


def experts_used(gradients: dict[str, torch.Tensor]) -> set[int]:
    """Experts with a gradient in any layer."""
    used: set[int] = set()
    for name, gradient in gradients.items():
        if name.endswith("experts.down_proj"):
            used |= {e for e in range(len(gradient)) if gradient[e].abs().max() > 0}
    return used


@pytest.fixture(scope="module")
def used(tiny):
    """Corners of the trainer's use."""
    path, tied = tiny("qwen3_moe"), tiny("qwen3_moe", tie=True)
    data = {"text": texts(24)}
    one_epoch = {"max_steps": -1, "num_train_epochs": 1}
    uneven = {"text": texts(11)}  # 3 + 3 batches of 2 samples, the last one of 1, repeats filled in
    runs = {
        "tied": Run(tied, data, {"gradient_accumulation_steps": 2}, EP2),
        "uneven_last_batch": Run(path, uneven, one_epoch, EP2),
        "uneven_accumulation": Run(path, uneven, {**one_epoch, "gradient_accumulation_steps": 2}, EP2),
        "object": Run(path, data, {}, EP2, as_object=True),
        "object_tied": Run(tied, data, {}, EP2, as_object=True),
        "plain": Run(path, data, {"gradient_accumulation_steps": 2}, EP2, trainer="plain"),
        "plain_object": Run(path, data, {}, EP2, trainer="plain", as_object=True),
        "frozen_experts": Run(path, data, {}, EP2, as_object=True, prepare=freeze_experts),
        "only_experts": Run(path, data, {}, EP2, as_object=True, prepare=freeze_all_but_experts),
        "evaluated_before": Run(
            path, data, {}, EP2, before_train=evaluate, after_train=evaluate, eval_data={"text": texts(7, seed=3)}
        ),
        "evaluated_between": Run(
            path, data, {"eval_strategy": "steps", "eval_steps": 1}, EP2, eval_data={"text": texts(6, seed=3)}
        ),
        "free_modules": Run(path, data, {}, FREE_MODULES),
        "sgd": Run(path, data, {"optim": "sgd", "learning_rate": 0.5}, EP2),
    }
    return sharded_and_reference(runs, 2, timeout=200)


USES = (
    "tied uneven_last_batch uneven_accumulation object object_tied plain plain_object frozen_experts only_experts "
    "evaluated_before evaluated_between free_modules sgd"
).split()


@pytest.mark.parametrize("name", USES)
def test_use_keeps_parity(used, name: str):
    record, reference, _ = used[name]
    comparison = compare(record, reference)
    assert comparison, comparison.report
    assert record.trainable == reference.trainable


def test_uneven_last_batch_repeats_samples(used):
    """Eleven samples, batches of two over two ranks: the last round is filled with repeats, and is compared too."""
    for name, steps in (("uneven_last_batch", 3), ("uneven_accumulation", 2)):
        record, _, _ = used[name]
        assert len(record.losses) == steps
        assert [len(rank.batches) for rank in record.extra["ranks"]] == [3, 3]


def test_frozen_experts_stay_frozen(used):
    record, reference, _ = used["frozen_experts"]
    experts = [name for name in record.weights if ".experts." in name]
    assert experts
    assert set(experts) <= set(record.without_gradient)
    for name in experts:
        assert torch.equal(record.weights[name], record.start_weights[name])
    assert not set(experts) & set(record.with_optimizer_state)
    assert set(record.with_optimizer_state) == set(record.trainable) == set(record.weights) - set(experts)


def test_tied_weight_is_one(used):
    record, _, _ = used["tied"]
    assert "lm_head.weight" not in record.weights
    name = "model.embed_tokens.weight"
    assert not torch.equal(record.weights[name], record.start_weights[name])


def test_evaluation_equals_one_process(used):
    """Before and after training. The mean over ranks is a mean of per-batch means with repeats, as in DDP, so the two
    agree only roughly; both sides fall alike."""
    record, reference, _ = used["evaluated_before"]
    for when in ("before", "after"):
        assert math.isclose(record.extra[when]["eval_loss"], reference.extra[when]["eval_loss"], rel_tol=0.02)
    assert record.extra["after"]["eval_loss"] < record.extra["before"]["eval_loss"]


def test_free_modules_are_plain_and_equal_on_ranks(used):
    """Trainable parameters under fsdp_ignored_modules: averaged by us, in the norm once (the comparison has both)."""
    record, _, _ = used["free_modules"]
    free = [name for name in record.weights if name == "model.norm.weight" or name.endswith("q_norm.weight")]
    assert len(free) == 3
    assert all(name in record.with_optimizer_state for name in free)
