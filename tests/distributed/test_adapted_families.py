"""Llama 4 and LongCat-Flash at layouts, dispatchers and with checkpointing that the sweep does not try: all exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_fsdpturbo.verify.random_weights import move_by_half_an_ulp
from tests.families.checks import ILL_CONDITIONED, TOLERANCE
from tests.families.door import settle
from tests.families.listing import families
from tests.families.tiny import tiny_config
from tests.families.training import Trained, batches, distances, train
from tests.support.compare import distance
from tests.support.spawn import init_gloo, run_plain, run_ranks

CASES: dict[str, tuple[str, dict[str, int], str, bool]] = {
    f"{name} {layout} {dispatcher}{' recompute' * recompute}": (name, sizes, dispatcher, recompute)
    for name in ("llama4", "longcat_flash")
    for layout, sizes, dispatcher, recompute in (
        ("ep1", {"ep_size": 1}, "eager", False),
        ("ep4", {"ep_size": 4}, "eager", True),
        ("ep4", {"ep_size": 4}, "fused", False),
        ("ep4", {"ep_size": 4}, "domino", True),
        ("ep2 edp2", {"ep_size": 2, "efsdp_size": 1}, "fused", True),
    )
}
for _chosen in ("one", "none"):  # experts that all tokens go to: one on the first rank, or those that compute nothing
    for _dispatcher in ("eager", "fused"):
        _case = f"longcat_flash {_chosen} routed ep4 {_dispatcher}"
        CASES[_case] = (f"longcat_flash {_chosen}", {"ep_size": 4}, _dispatcher, _dispatcher == "eager")


def _model(name: str) -> Any:
    """Two experts a token (Llama 4 has one in the sweep); four without computation, so that ep 4 cuts rows."""
    import transformers

    name, _, chosen = name.partition(" ")
    family = families()[name]
    config = tiny_config(transformers.CONFIG_MAPPING[family.model_type], name)
    setattr(config, *{"llama4": ("num_experts_per_tok", 2), "longcat_flash": ("zero_expert_num", 4)}[name])
    torch.manual_seed(0)
    model = getattr(transformers, family.architecture)(config).float()
    for layer in model.model.layers if chosen else ():
        # "one": expert 1 and those without computation; "none": the latter alone
        layer.mlp.router.e_score_correction_bias[{"one": slice(2, 8), "none": slice(0, 8)}[chosen]] = -10.0
        if chosen == "one":
            layer.mlp.router.e_score_correction_bias[1] = 10.0
    return model


def _train(model: Any, recompute: bool, **kwargs: Any) -> Trained:
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return train(model, **kwargs)


def train_all(names: list[str]) -> dict[str, tuple[str, float]]:
    """Rank function: case -> the worst of all distances from one process, over what the sweep allows; the figures."""
    from hf_fsdpturbo.parallelize.build import shard_given_model
    from tests.support.topologies import fresh_state, plain_arguments

    init_gloo(timeout=60)
    found, truth, condition = {}, {}, {}
    for case in names:
        name, sizes, dispatcher, recompute = CASES[case]
        plain = _model(name)
        model = copy.deepcopy(plain)
        if name not in truth:
            truth[name] = train(plain)
            moved = _model(name)
            move_by_half_an_ulp(moved)
            condition[name] = distances(train(moved), truth[name])
        state = fresh_state(4, **sizes)
        arguments = plain_arguments(ep_dispatcher=dispatcher, ep_size=sizes["ep_size"])
        model = shard_given_model(model, arguments, state)[0]
        mine = _train(model, recompute, place=(dist.get_rank(), 4), settle=settle)
        off = distances(mine, truth[name])
        if name.endswith("none"):  # plain experts have no gradient, so AdamW leaves them; zeros let it decay weights
            off = {key: far for key, far in off.items() if not (key.startswith("weight") and ".experts." in key)}
        allowed = {key: max(TOLERANCE, ILL_CONDITIONED * condition[name].get(key, 0.0)) for key in off}
        worst = max(off, key=lambda key: off[key] / allowed[key])
        found[case] = f"{worst} {off[worst]:.1e} off, allowed {allowed[worst]:.1e}", off[worst] / allowed[worst]
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[str, float]]:
    return run_ranks(train_all, 4, list(CASES), timeout=200)[0]


@pytest.mark.parametrize("case", CASES)
def test_exact(found, case: str):
    """Where no expert computes, a router's gradient is a small difference of large numbers: half an ulp shows."""
    worst, off = found[case]
    assert off < 1.0, worst


def lora_losses(name: str, ranks: int) -> list[float]:
    """Rank function, and one process's: losses of four steps of plain SGD on factors of experts and attention."""
    from peft import LoraConfig, get_peft_model
    from transformers import set_seed

    block, projection = {"llama4": ("feed_forward", "q_proj"), "longcat_flash": ("mlp", "o_proj")}[name]
    stacks = [f"{block}.experts.{stack}" for stack in ("gate_up_proj", "down_proj")]
    config = LoraConfig(r=2, lora_alpha=4, target_modules=[projection], target_parameters=stacks, lora_dropout=0.0)
    if ranks == 1:
        model = _model(name)
        set_seed(42)
        model = get_peft_model(model, config)
    else:
        model = _sharded_lora(name, config, ranks)
    own = batches()[dist.get_rank() :: ranks] if ranks > 1 else batches()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=5.0)
    losses = []
    for _ in range(4):
        total = torch.zeros(())
        for ids in own:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / len(own)
            loss.backward()
            total += loss.detach()
        if ranks > 1:
            dist.all_reduce(total)
            settle(model)
        losses.append(float(total) / ranks)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _sharded_lora(name: str, config: Any, ranks: int) -> Any:
    from hf_fsdpturbo.parallelize.build import shard_given_model
    from tests.support.topologies import fresh_state, plain_arguments

    init_gloo(timeout=60)
    state = fresh_state(ranks, ep_size=2)
    arguments = plain_arguments(ep_size=2, ep_dispatcher="eager")
    return shard_given_model(_model(name), arguments, state, peft_config=config)[0]


@pytest.mark.parametrize("name", ["llama4", "longcat_flash"])
def test_lora_on_experts(name: str):
    """Factors are laid out as stock PEFT lays them out for the family, whatever the adapter says of its stacks."""
    plain = run_plain(lora_losses, name, 1, timeout=60)
    found = run_ranks(lora_losses, 2, name, 2, timeout=60)[0]
    assert plain[-1] < plain[0] - 1e-3
    assert found == pytest.approx(plain, rel=1e-5)


def align_all(rows: int) -> list[tuple[bool, float]]:
    """Rank function: whether the aligned rows are this rank's experts, and how far the gradients are."""
    from hf_fsdpturbo.parallelize.aligned_stacks import aligner

    init_gloo(timeout=30)
    rank, held, experts = dist.get_rank(), rows // 4, 8
    whole = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)
    mine = whole[rank * held : (rank + 1) * held].clone().requires_grad_()
    other = torch.zeros(experts // 4, 2)
    aligned: dict[str, Tensor] = aligner(experts, dist.group.WORLD)({"long": mine, "other": other})
    wanted = slice(rank * 2, rank * 2 + 2)
    right = torch.equal(aligned["long"], whole[wanted]) and aligned["other"] is other
    (aligned["long"] * whole[wanted]).sum().backward()
    expected = whole.clone()
    expected[experts:] = 0.0
    results: list[Any] = [None] * 4
    dist.all_gather_object(results, (right, distance(mine.grad, expected[rank * held : (rank + 1) * held] + 0.0)))
    return results


@pytest.mark.parametrize("rows", [12, 16, 40])
def test_rows_travel_to_the_experts_and_their_gradients_back(rows: int):
    for right, off in run_ranks(align_all, 4, rows, timeout=40)[0]:
        assert right
        assert off == 0.0
