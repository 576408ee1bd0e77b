"""Norm and clipping against torch on one process and against numbers on paper, for every kind of mesh; B4 put back."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.spawn import run_ranks
from tests.support.topologies import fresh_state, plain_arguments

NORM_TYPES = (1.0, 2.0, math.inf)
# name -> (sizes of the topology, experts)
LAYOUTS = {
    "ep4": ({"ep_size": 4}, 8),
    "ep2_efsdp2": ({"ep_size": 2}, 8),
    "ep2_edp2": ({"ep_size": 2, "efsdp_size": 1}, 8),
    "hsdp2_ep2": ({"ep_size": 2, "mp_replicate_size": 2}, 8),
    "hsdp2_edp2": ({"ep_size": 2, "efsdp_size": 1, "mp_replicate_size": 2}, 8),
    "cp2_ep2": ({"ep_size": 2, "cp_size": 2}, 8),
    "cut_experts": ({"ep_size": 2}, 2),  # one expert on two ranks: input dims are cut, a bias shard is empty
}
FREE = "model.norm"  # under fsdp_ignored_modules: a plain, replicated parameter


def gradient_of(name: str, shape: torch.Size, constant: float | None) -> torch.Tensor:
    """The whole gradient of a parameter: a constant, or numbers drawn from a seed made of the name."""
    if constant is not None:
        return torch.full(shape, constant)
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator)


def sharded_model(sizes: dict, num_experts: int):
    """gpt_oss (biases, transposed) sharded over all meshes, its final norm left out."""
    from hf_fsdpturbo.parallelize.order import parallelize_model
    from tests.support.tiny_models import tiny_model

    state = fresh_state(4, **sizes)
    # The sizes reach parallelize_model through the state; ep_size here only has to agree with nothing else.
    arguments = plain_arguments(dist_config={"fsdp_ignored_modules": [FREE]})
    model, _ = parallelize_model(tiny_model("gpt_oss", num_experts=num_experts), arguments, state)
    return model


def set_gradients(model, constants: dict[str, float] | None) -> dict[str, torch.Tensor]:
    from torch.distributed.tensor import DTensor

    from hf_fsdpturbo.shards import copy_full_tensor_

    whole = {}
    for name, parameter in model.named_parameters():
        kind = "expert" if ".experts." in name else "free" if name.startswith(FREE) else "dense"
        whole[name] = gradient_of(name, parameter.shape, None if constants is None else constants[kind])
        parameter.grad = torch.zeros_like(parameter)
        copy_full_tensor_(parameter.grad, whole[name])
        assert isinstance(parameter.grad, DTensor) or kind == "free"
    return whole


def measure(put_back: str | None = None) -> dict:
    """Rank function: for each layout the norms and clipped gradients of random and of constant gradients."""
    from hf_fsdpturbo import grad_norm
    from tests.support.reference_run import whole
    from tests.support.spawn import init_gloo

    init_gloo()
    if put_back is not None:
        FAULTS[put_back](grad_norm)
    result: dict = {}
    for layout, (sizes, experts) in LAYOUTS.items():
        model = sharded_model(sizes, experts)
        grad_norm.warm_up(model)
        for norm_type in NORM_TYPES:
            set_gradients(model, None)
            norm = grad_norm.clip_grad_norm_(model, 0.75, norm_type)
            clipped = {n: whole(p.grad) for n, p in model.named_parameters()} if put_back is None else {}
            set_gradients(model, {"expert": -3.0, "dense": 2.0, "free": 5.0})
            groups = grad_norm.parameter_groups(model)
            paper = {k: float(v) for k, v in grad_norm.clip_groups_(groups, math.inf, norm_type).items()}
            paper["total"] = float(grad_norm.clip_grad_norm_(model, math.inf, norm_type))
            unclipped = {n: float(whole(p.grad).abs().max()) for n, p in model.named_parameters()}
            result[layout, norm_type] = (float(norm), clipped, paper, unclipped)
    return result


def _count_replicas(grad_norm) -> None:
    """B4: every axis of the mesh counts as a shard axis."""
    import torch.distributed as dist

    def reduce(value, group, norm_type):
        operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
        for axis in range(group.mesh.ndim) if group.mesh is not None else ():
            dist.all_reduce(value, op=operation, group=group.mesh.get_group(axis))
        return value

    grad_norm._reduce = reduce


def _inf_as_power(grad_norm) -> None:
    """B4: the inf norm taken as a p-sum to the power 1/p, which is 1."""
    grad_norm._root = lambda powers, norm_type: torch.stack(powers).sum() ** (1.0 / norm_type)


FAULTS = {"replicas": _count_replicas, "inf": _inf_as_power}


@pytest.fixture(scope="module")
def measured() -> list[dict]:
    return run_ranks(measure, 4, timeout=150)


def plain_model(layout: str):
    from tests.support.tiny_models import tiny_model

    return tiny_model("gpt_oss", num_experts=LAYOUTS[layout][1])


def elements(layout: str) -> dict[str, int]:
    count = {"expert": 0, "dense": 0, "free": 0}
    for name, parameter in plain_model(layout).named_parameters():
        count["expert" if ".experts." in name else "free" if name.startswith(FREE) else "dense"] += parameter.numel()
    return count


def on_paper(layout: str, norm_type: float) -> dict[str, float]:
    count = elements(layout)
    values = {"expert": 3.0, "dense": 2.0, "free": 5.0}
    if math.isinf(norm_type):
        return {**values, "total": 5.0}
    sums = {kind: count[kind] * values[kind] ** norm_type for kind in count}
    return {**{k: s ** (1 / norm_type) for k, s in sums.items()}, "total": sum(sums.values()) ** (1 / norm_type)}


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_on_paper(measured, layout: str, norm_type: float):
    """Constant gradients: 3 in experts, 2 in dense weights, 5 in the replicated norm weight."""
    expected = on_paper(layout, norm_type)
    for rank in measured:
        _, _, found, _ = rank[layout, norm_type]
        found = {"free" if key == "replicated" else key: value for key, value in found.items()}
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_clip_equals_torch(measured, layout: str, norm_type: float):
    """Random gradients: same norm and same clipped gradients as torch on a plain model."""
    model = plain_model(layout)
    for name, parameter in model.named_parameters():
        parameter.grad = gradient_of(name, parameter.shape, None)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.75, norm_type)
    norms = [rank[layout, norm_type][0] for rank in measured]
    assert norms == pytest.approx([float(expected)] * 4, rel=1e-5)
    assert len(set(norms)) == 1, "ranks disagree"
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(measured[0][layout, norm_type][1][name], parameter.grad, rtol=1e-5, atol=0)


def test_infinite_max_norm_only_measures(measured):
    for rank in measured:
        for _, _, _, unclipped in rank.values():
            assert set(unclipped.values()) == {2.0, 3.0, 5.0}


def test_replicated_axes_counted_as_shards_is_seen():
    """B4 put back: wrong with edp and with HSDP, right without a replicated axis."""
    found = run_ranks(measure, 4, "replicas", timeout=150)[0]
    for layout in LAYOUTS:
        for norm_type in (1.0, 2.0):
            paper = on_paper(layout, norm_type)["total"]
            right = found[layout, norm_type][2]["total"] == pytest.approx(paper, rel=1e-5)
            assert right is ("edp2" not in layout and "hsdp2" not in layout), (layout, norm_type)


def test_inf_norm_as_power_is_seen():
    """B4 put back: the inf norm comes out as the number of ... 1, whatever the gradients are."""
    found = run_ranks(measure, 4, "inf", timeout=150)[0]
    for layout in LAYOUTS:
        assert found[layout, math.inf][2]["total"] == 1.0
        assert found[layout, 2.0][2]["total"] == pytest.approx(on_paper(layout, 2.0)["total"], rel=1e-5)


def test_one_process_and_none_gradients():
    """A plain model: torch's own numbers, a gradient that is None counts as zero, another norm type is refused."""
    from hf_fsdpturbo import clip_grad_norm_

    layer = torch.nn.Linear(3, 4)
    layer.weight.grad = torch.full((4, 3), 2.0)
    assert float(clip_grad_norm_(layer, 1.0, 2)) == pytest.approx(math.sqrt(48))
    assert float(layer.weight.grad.norm()) == pytest.approx(1.0, rel=1e-5)
    with pytest.raises(ValueError, match="norm_type must be 1, 2 or inf, but it is 3"):
        clip_grad_norm_(layer, 1.0, 3)
