"""Every family that docs/routers.md lists, built small: one update of its biases, and that its router goes by them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from hf_fsdpturbo.routers.bias_update import BiasUpdate
from hf_fsdpturbo.telemetry.expert_counts import ExpertCounts
from hf_fsdpturbo.telemetry.real_tokens import RealTokens
from tests.families.listing import families, not_swept
from tests.families.tiny import EXPERTS, TOP_K, VOCAB, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "routers.md"
ROWS, LENGTH, RATE = 2, 12, 0.25
LAST_IDS = 40


def listed() -> list[str]:
    """Families of the page's table."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| family")) + 2
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    names = [re.sub(r"\(.*?\)", "", row.split("|")[1]) for row in rows]
    return sorted(name.strip() for row in names for name in row.split(","))


@pytest.mark.parametrize("name", listed())
def test_an_update_reaches_the_bias_that_the_router_adds(name):
    family = families()[name]
    if (elsewhere := not_swept(family)) is not None:
        assert set(family.part_of) & set(listed()), elsewhere
        return
    model = tiny_model(family).train()
    if name == "step3p7":
        with pytest.raises(ValueError, match="nobody counts what the experts of step3p7 get"):
            BiasUpdate(model, {}, RATE)
        return
    device = torch.device("cpu")
    tokens = RealTokens(device)
    counts = ExpertCounts(model, tokens, device)
    tokens.attach(model)
    counts.attach()
    update = BiasUpdate(model, counts.layers, RATE)
    update.begin()
    reader = counts.reader()
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB - LAST_IDS, (ROWS, LENGTH), generator=draw)

    def loads() -> dict[str, list[int]]:
        model(input_ids=ids)  # with gradients: passes without are no training, and do not count
        return {layer: load.tolist() for layer, load in counts.by_layer(reader.local()).items()}

    first = loads()
    before = {layer: bias.detach().flatten().tolist() for layer, bias in update.biases.items()}
    update.apply({layer: torch.tensor(load) for layer, load in first.items()})
    least = {}
    for layer, bias in update.biases.items():
        load, mean = first[layer], sum(first[layer]) / EXPERTS
        assert sum(load) % (ROWS * LENGTH) == 0
        by_hand = [b + RATE * ((n < mean) - (n > mean)) for b, n in zip(before[layer], load, strict=True)]
        assert bias.detach().flatten().tolist() == pytest.approx(by_hand, rel=1e-6, abs=1e-6)
        least[layer] = load.index(min(load))
        bias.data.view(-1)[least[layer]] += 100.0
    after, drawn = loads(), 0
    for layer, expert in least.items():
        if sum(first[layer]):  # not an expert of pictures
            assert after[layer][expert] == sum(after[layer]) // TOP_K, "a large bias does not draw every token"
            drawn += after[layer][expert] > first[layer][expert]
    assert drawn
