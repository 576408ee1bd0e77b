"""The allow-list of conversions: what it allows on slices equals whole-then-slice, what it forbids does not."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    ErnieFuseAndSplitTextVisionExperts,
    Inkling2UnpadVocab,
    Interleave,
    MergeModulelist,
    PermuteForRope,
    Split,
    Transpose,
    WeightConverter,
)
from transformers.distributed.sharding_utils import DtensorShardOperation

from hf_fsdpturbo.loading import conversions
from hf_fsdpturbo.loading.conversions import Conversion, free_dims, runs_on_slices, source_regions
from hf_fsdpturbo.loading.loading_check import leaves_alone
from hf_fsdpturbo.loading.whole_sources import Target, convert, reader

E, F, D = 4, 6, 8


@dataclass
class Case:
    """A chain, its sources (pattern -> shapes), the shapes of its targets, and the dims it leaves alone.

    ``lucky``: dims that are not allowed though the slices of this case come out right.
    """

    operations: list[Any]
    sources: dict[str, list[tuple[int, ...]]]
    targets: dict[str, tuple[int, ...]]
    free: set[int]
    lucky: frozenset[int] = frozenset()


LUCKY = frozenset({0, 1, 2})
CASES = {
    "stack": Case([MergeModulelist(0)], {"e.*.d": [(D, F)] * E}, {"d": (E, D, F)}, {0, 1, 2}),
    "stack and join": Case(
        [MergeModulelist(0), Concatenate(1)],
        {"e.*.g": [(F, D)] * E, "e.*.u": [(F, D)] * E},
        {"gu": (E, 2 * F, D)},
        {0, 1, 2},
    ),
    "join stacks": Case([Concatenate(1)], {"g": [(E, F, D)], "u": [(E, F, D)]}, {"gu": (E, 2 * F, D)}, {0, 1, 2}),
    "join uneven rows": Case(
        [Concatenate(0)], {"q": [(4, 2)], "k": [(6, 2)], "v": [(8, 2)]}, {"qkv": (18, 2)}, {0, 1}
    ),
    "join many of one pattern": Case([Concatenate(0)], {"s.*": [(2, 4), (3, 4), (3, 4)]}, {"t": (8, 4)}, {0, 1}),
    "join last dim": Case([Concatenate(-1)], {"a": [(4, 2)], "b": [(4, 6)]}, {"ab": (4, 8)}, {0, 1}),
    "transpose": Case([Transpose(0, 1)], {"r": [(D, D)]}, {"t": (D, D)}, set()),
    "transpose stacks": Case([Transpose(1, 2)], {"r": [(E, F, D)]}, {"t": (E, D, F)}, {0}),
    "transpose if needed": Case([Transpose(1, 2, check_dims=True)], {"r": [(E, F, D)]}, {"t": (E, D, F)}, {0}),
    "transpose not needed": Case([Transpose(1, 2, check_dims=True)], {"r": [(E, F, D)]}, {"t": (E, F, D)}, {0}, LUCKY),
    "chunk": Case([Chunk(0)], {"qkv": [(12, 4)]}, {"q": (4, 4), "k": (4, 4), "v": (4, 4)}, {1}),
    "split": Case([Split(0)], {"qkv": [(12, 4)]}, {"q": (8, 4), "k": (3, 4), "v": (1, 4)}, {1}),
    "interleave": Case([Interleave(1)], {"i": [(E, 2 * F, D)]}, {"t": (E, 2 * F, D)}, {0, 2}),
    "interleave and chunk": Case([Interleave(0), Chunk(0)], {"i": [(12, 4)]}, {"g": (6, 4), "u": (6, 4)}, {1}, LUCKY),
    "rope": Case([PermuteForRope()], {"w": [(16, 4)]}, {"t": (16, 4)}, {1}),
    "rope of a bias": Case([PermuteForRope()], {"w": [(16,)]}, {"t": (16,)}, set()),
    "chunk and rope": Case(
        [Chunk(0), PermuteForRope(permute_layer_names=["q"])], {"qv": [(32, 4)]}, {"q": (16, 4), "v": (16, 4)}, {1}
    ),
    "unpad": Case([Inkling2UnpadVocab()], {"v": [(10, 4)]}, {"t": (7, 4)}, {1}),
    "two stacks of one list": Case(
        [ErnieFuseAndSplitTextVisionExperts()],
        {"e.*.g": [(F, D)] * E + [(2, D)] * E, "e.*.u": [(F, D)] * E + [(2, D)] * E},
        {"text": (E, 2 * F, D), "image": (E, 4, D)},
        {0, 2},
    ),
}
MODEL: Any = SimpleNamespace(
    config=SimpleNamespace(
        num_attention_heads=2, get_text_config=lambda: SimpleNamespace(unpadded_vocab_size=7, vocab_size=10)
    )
)


class Setup:
    """One case with numbered sources and what converting them whole gives."""

    def __init__(self, case: Case) -> None:
        converter = WeightConverter(list(case.sources), list(case.targets), operations=case.operations)
        keys = {p: [p.replace("*", str(i)) for i in range(len(s))] for p, s in case.sources.items()}
        self.conversion = Conversion(next(iter(case.targets)), tuple(case.targets), converter, keys)
        self.shapes = {k: shape for p, s in case.sources.items() for k, shape in zip(keys[p], s, strict=True)}
        self.tensors, start = {}, 0
        for key, shape in self.shapes.items():
            size = int(torch.Size(shape).numel())
            self.tensors[key] = torch.arange(start, start + size, dtype=torch.int64).reshape(shape)
            start += size
        self.targets = {name: Target(shape, torch.int64) for name, shape in case.targets.items()}
        self.lucky = case.lucky
        self.free = free_dims(self.conversion, self.shapes, case.targets)
        self.whole = self.convert({})

    def convert(self, region: conversions.Region, read: Any = None) -> dict[str, torch.Tensor]:
        read = read or reader(self.tensors, torch.int64)
        return convert(MODEL, self.conversion, self.shapes, self.targets, read, region)


@pytest.fixture
def setup(request) -> Setup:
    return Setup(CASES[request.param])


every_case = pytest.mark.parametrize("setup", CASES, indirect=True)


def test_every_listed_operation_has_a_case():
    chains = {Setup(case).conversion.chain for case in CASES.values()}
    assert {name for chain in chains for name in chain} == set(conversions.TOUCHED)
    assert set(conversions.STACKS) <= set(conversions.TOUCHED)
    assert set(conversions.BY_TRANSFORMERS) - {()} <= chains
    assert set(conversions.JOINS) <= chains


@pytest.mark.parametrize("name", CASES)
def test_dims_that_are_left_alone(name: str):
    """The whole has the expected shapes, and exactly the dims that the case names are free."""
    setup = Setup(CASES[name])
    assert {n: tuple(t.shape) for n, t in setup.whole.items()} == CASES[name].targets
    assert setup.free == CASES[name].free


@every_case
def test_a_region_along_free_dims_is_that_part_of_the_whole(setup: Setup):
    """Every cut of every free dim (two ranks to five, uneven and empty tails included), and of two dims at once."""
    first = next(iter(setup.targets.values())).shape
    cuts: list[conversions.Region] = []
    for dim in setup.free:
        for ranks in (2, 3, 5):
            rows = -(-first[dim] // ranks)
            cuts += [{dim: (min(r * rows, first[dim]), min((r + 1) * rows, first[dim]))} for r in range(ranks)]
    cuts += [{a: (1, 2), b: (1, 3)} for a in setup.free for b in setup.free if a < b and min(first[a], first[b]) > 2]
    for region in cuts:
        index = tuple(slice(*region.get(dim, (None, None))) for dim in range(len(first)))
        for name, part in setup.convert(region).items():
            assert torch.equal(part, setup.whole[name][index]), (name, region)


@pytest.mark.parametrize("name", CASES)
def test_slices_along_other_dims_are_wrong(name: str):
    """Halves of the sources along a dim that is not free do not give halves of the targets: they fail, or differ."""
    setup = Setup(CASES[name])
    first = next(iter(setup.targets.values())).shape
    for dim in set(range(len(first))) - setup.free - CASES[name].lucky:
        assert not all(_half_gives_half(setup, dim, half) for half in (0, 1)), f"dim {dim} could be allowed"


def _half_gives_half(setup: Setup, dim: int, half: int) -> bool:
    def cut(tensor: torch.Tensor) -> torch.Tensor:
        parts = tensor.chunk(2, dim=dim) if dim < tensor.ndim else (tensor,)
        return parts[min(half, len(parts) - 1)]

    parts = {key: cut(tensor) for key, tensor in setup.tensors.items()}
    wanted = {name: cut(whole) for name, whole in setup.whole.items()}
    targets = {name: Target(tuple(part.shape), part.dtype) for name, part in wanted.items()}
    shapes = {key: tuple(part.shape) for key, part in parts.items()}
    try:
        made = convert(MODEL, setup.conversion, shapes, targets, reader(parts, torch.int64), {})
    except ValueError:
        return False
    return all(torch.equal(made[name], part) for name, part in wanted.items())


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "ep": ((4,), (Shard(0),)),
    "ep and efsdp on experts": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "ep and efsdp on the last dim": ((2, 2), (Shard(2), Shard(0))),
    "efsdp on dim 1": ((2,), (Shard(1),)),
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "rows": ((2,), (Shard(0),)),
}


def sharded_dims(layout: str) -> frozenset[int]:
    return frozenset(placement.dim for placement in LAYOUTS[layout][1] if not placement.is_replicate())


FITTING = [
    (name, layout)
    for name, case in CASES.items()
    for layout in LAYOUTS
    if max(sharded_dims(layout)) < len(next(iter(case.targets.values())))
]


@pytest.mark.parametrize(("setup", "layout"), FITTING, indirect=["setup"])
def test_what_transformers_loader_may_do_on_slices(setup: Setup, layout: str, on_rank):
    """Its own slicing of sources, then its conversion: this rank's part wherever the list lets it, on every rank."""
    (mesh_shape, placements), sharded = LAYOUTS[layout], sharded_dims(layout)
    shape = setup.targets[setup.conversion.name].shape
    allowed = runs_on_slices(setup.conversion, setup.free, sharded, len(shape))
    right = [
        _by_transformers(setup, on_rank(rank, mesh_shape), placements)
        for rank in range(int(torch.tensor(mesh_shape).prod()))
    ]
    if allowed:
        assert all(right)
    elif not sharded <= setup.free - {conversions.joined_dim(setup.conversion, len(shape))}:
        assert not all(right) or setup.lucky, "could be allowed"


def _by_transformers(setup: Setup, mesh: Any, placements: tuple[Any, ...]) -> bool:
    """Whether slices as Transformers' loader takes them are converted into this rank's part of every target."""
    from hf_fsdpturbo.shards import local_box

    parameters = {}
    for name, target in setup.targets.items():
        whole = torch.empty(target.shape, dtype=target.dtype, device="meta")
        local = torch.empty(_local_shape(target.shape, mesh, placements), dtype=target.dtype, device="meta")
        parameters[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    shard = DtensorShardOperation(parameters[setup.conversion.name])
    converter = WeightConverter(
        list(setup.conversion.converter.source_patterns),
        list(setup.conversion.converter.target_patterns),
        operations=setup.conversion.converter.operations,
    )
    model = SimpleNamespace(config=MODEL.config, get_parameter=parameters.__getitem__)
    try:
        for pattern, keys in setup.conversion.sources.items():
            for number, key in enumerate(keys):
                part = shard.shard_tensor(setup.tensors[key], tensor_idx=number, dtype=torch.int64)
                if part is not None:
                    converter.add_tensor(setup.conversion.name, key, pattern, part)
        made = converter.convert(setup.conversion.name, model=model, config=MODEL.config)
    except (RuntimeError, ValueError, IndexError, KeyError):
        return False
    made = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
    return all(torch.equal(made[n], setup.whole[n][local_box(p).slices]) for n, p in parameters.items())


def _local_shape(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> tuple[int, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[0])


def test_only_what_lies_in_a_region_is_read():
    """One expert of four, one part of a join: the other sources are not touched."""
    stack, join = Setup(CASES["stack and join"]), Setup(CASES["join uneven rows"])
    assert source_regions(stack.conversion, stack.shapes, 3, {0: (2, 3), 2: (1, 4)}) == {
        "e.2.g": {1: (1, 4)},
        "e.2.u": {1: (1, 4)},
    }
    assert source_regions(join.conversion, join.shapes, 2, {0: (3, 9)}) == {
        "q": {0: (3, 4)},
        "k": {0: (0, 5)},
        "v": {0: (0, 0)},
    }


class Reverse(ConversionOps):
    """An operation that no list knows."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        return {target_patterns[0]: next(iter(input_dict.values()))[0].flip(0)}


def test_an_unknown_operation_gets_whole_sources():
    setup = Setup(Case([Reverse()], {"r": [(4, 2)]}, {"t": (4, 2)}, set()))
    assert setup.conversion.chain == ("Reverse?",)
    assert setup.free == frozenset()
    assert not runs_on_slices(setup.conversion, setup.free, frozenset({0}), 2)


def test_an_operation_that_only_bears_a_known_name_is_unknown():
    """A subclass or another package's class: the list was proven for Transformers' own."""
    other = type("Concatenate", (Concatenate,), {})
    setup = Setup(Case([other(0)], {"a": [(4, 2)], "b": [(4, 2)]}, {"ab": (8, 2)}, set()))
    assert setup.free == frozenset()


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        ({"e.*.d": [(D, F)] * 3}, {"d": (E, D, F)}),  # an expert is missing: dim 0 cannot be told apart
        ({"e.*.d": [(E, D, F)]}, {"d": (1, E, D, F)}),  # a list of one stack
    ],
)
def test_pieces_that_are_not_one_a_row_are_no_pieces(sources: dict, targets: dict):
    case = Case([MergeModulelist(0)], sources, targets, set())
    converter = WeightConverter(list(sources), list(targets), operations=case.operations)
    keys = {p: [p.replace("*", str(i)) for i in range(len(s))] for p, s in sources.items()}
    shapes = {k: shape for p, s in sources.items() for k, shape in zip(keys[p], s, strict=True)}
    assert 0 not in free_dims(Conversion("d", ("d",), converter, keys), shapes, targets) or targets["d"][0] == 1


@every_case
def test_the_run_time_proof_agrees_with_the_list(setup: Setup):
    proven: set = set()
    assert leaves_alone(MODEL, setup.conversion, setup.shapes, setup.targets, setup.free, proven)
    assert bool(proven) == bool(setup.free)


@pytest.mark.parametrize(
    ("name", "operation", "dim"),
    [("interleave", "Interleave", 1), ("rope", "PermuteForRope", 0), ("transpose", "Transpose", 0)],
)
def test_the_run_time_proof_sees_a_list_opened_too_far(monkeypatch, name: str, operation: str, dim: int):
    """The fault put back: an operation is said to touch nothing, and the sizes agree."""
    monkeypatch.setitem(conversions.TOUCHED, operation, ())
    setup = Setup(CASES[name])
    assert dim in setup.free
    assert not leaves_alone(MODEL, setup.conversion, setup.shapes, setup.targets, setup.free, set())


def test_a_conversion_that_fails_names_tensor_conversion_and_what_is_absent():
    case = CASES["two stacks of one list"]
    setup = Setup(case)
    del setup.conversion.sources["e.*.u"]
    with pytest.raises(ValueError, match="Copy the whole checkpoint") as caught:
        setup.convert({})
    for part in ("text", "ErnieFuseAndSplitTextVisionExperts", "e.0.g", "no source for ['e.*.u']"):
        assert part in str(caught.value)
