"""Who holds which rows: the index answers as a look at every box does; 1,024 ranks cost what their layouts cost."""

from __future__ import annotations

import pickle

import pytest
import torch

from hf_fsdpturbo.checkpoint import hub, hub_plan, layouts
from hf_fsdpturbo.checkpoint.hub_plan import Job, Output
from hf_fsdpturbo.checkpoint.layouts import Layout
from hf_fsdpturbo.shards import Box


def cut(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    """Boxes of ranks that cut dim after dim into ceil-sized parts, the last dim fastest; tails may be empty."""
    boxes = [Box((), ())]
    for size, number in zip(shape, parts, strict=True):
        step = -(-size // number)
        cuts = [(min(i * step, size), max(min(step, size - i * step), 0)) for i in range(number)]
        boxes = [Box((*b.offset, start), (*b.shape, length)) for b in boxes for start, length in cuts]
    return boxes


CASES = {
    "dim 0": ((10, 3), (4, 1)),
    "dim 0, more ranks than rows": ((3, 2), (8, 1)),
    "both dims": ((8, 6, 4), (4, 1, 2)),
    "input dim only": ((4, 6), (1, 3)),
    "one dim": ((7,), (3,)),
    "whole": ((5, 2), (1, 1)),
}


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_rows_are_found_as_by_a_look_at_every_box(case, replicas):
    shape, parts = CASES[case]
    boxes = cut(shape, parts) * replicas
    layout = Layout(shape, boxes)
    for start in range(shape[0]):
        for stop in range(start + 1, shape[0] + 1):
            held = {r: b.rows(start, stop) for r, b in enumerate(boxes) if 0 not in b.shape}
            some = {r for r, (first, last) in held.items() if first < last}
            full = {r for r in some if held[r] == (start, stop) and boxes[r].shape[1:] == shape[1:]}
            assert set(layout.owners(start, stop)) == full
            assert set(layout.sharers(start, stop)) == some
            found = dict(layout.overlapping(start, stop))
            assert {r for owners in found.values() for r in owners} == some
            assert all(len(owners) == replicas for owners in found.values())


def test_boxes_that_do_not_make_up_the_tensor():
    with pytest.raises(ValueError, match="hold 9 elements of 12"):
        Layout((4, 3), cut((4, 3), (4, 1))[:3])


def test_ranks_of_other_names_or_kinds_are_named(monkeypatch):
    tensors = {"a": torch.zeros(4, 3), "b": torch.zeros(2)}
    monkeypatch.setattr(layouts, "everyone", lambda mine: [mine, ("another", mine[1])])
    with pytest.raises(ValueError, match="the ranks hold other tensors"):
        layouts.find_layouts(tensors)


def test_a_thousand_ranks(monkeypatch):
    """94 layers of 128 experts, ep 64 and efsdp 16 (which cuts the input dim), dense weights over all ranks."""
    world, experts, num_layers = 1024, 128, 94
    shapes = {
        "gate_up": (experts, 3072, 4096),
        "down": (experts, 4096, 1536),
        "router": (experts, 4096),
        "q": (8192, 4096),
    }
    kinds = {
        "gate_up": cut(shapes["gate_up"], (64, 1, 16)),
        "down": cut(shapes["down"], (64, 16, 1)),
        "router": cut(shapes["router"], (world, 1)),
        "q": cut(shapes["q"], (world, 1)),
    }
    names = [(layer, kind) for layer in range(num_layers) for kind in kinds]
    tensors = {f"layers.{layer}.{kind}": torch.empty(shapes[kind], device="meta") for layer, kind in names}
    own = {tuple(shapes[kind]): boxes for kind, boxes in kinds.items()}
    monkeypatch.setattr(layouts, "local_box", lambda tensor: own[tuple(tensor.shape)][0])
    sent = []

    def everyone(mine):
        sent.append(len(pickle.dumps(mine)))
        return [(mine[0], [kinds[kind][rank] for kind in kinds]) for rank in range(world)]

    monkeypatch.setattr(layouts, "everyone", everyone)
    source = hub.RankTensors(tensors)
    assert len({id(layout) for layout in source.layouts.values()}) == len(kinds)
    assert sum(sent) * world < 2 * 2**20

    jobs = [
        Job((f"layers.{i}.gate_up",), (Output(f"{i}.{e}", torch.bfloat16, shapes["gate_up"][1:]),), "", row=e)
        for i in range(num_layers)
        for e in range(experts)
    ]
    owners = hub._owners(jobs, source)
    assert all(len(owners[index]) == 16 for index in owners), "those who share the expert, nobody else"
    hub_plan.assign_writers(jobs, owners, world)
    written = [0] * world
    for job in jobs:
        written[job.writer] += 1
    assert max(written) - min(written) <= 1
    assert len(hub_plan.lay_out(jobs, 5 * 10**9)) == world
