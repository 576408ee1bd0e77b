"""An export of every diverse family in one process: names, bits, dtypes and metadata of plain `save_pretrained`."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from hf_fsdpturbo.checkpoint import hub, hub_plan
from hf_fsdpturbo.model_spec import find_experts
from tests.families.listing import families
from tests.families.small import SMALL
from tests.families.tiny import tiny_model

STACKED = {"inkling2"}
"""Families whose release has stacked experts that a conversion changes: converted a few rows at a time."""


def contents(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.mark.parametrize("door", ["made", "loaded"])
@pytest.mark.parametrize("family", SMALL)
def test_an_export_is_what_plain_saving_writes(family, door, tmp_path, caplog):
    model = tiny_model(families()[family])
    if door == "loaded":
        model.save_pretrained(tmp_path / "source")
        model = getattr(transformers, families()[family].architecture).from_pretrained(tmp_path / "source")
    model.save_pretrained(tmp_path)
    want, metadata = contents(tmp_path)
    (tmp_path / "ours").mkdir()
    with caplog.at_level(logging.WARNING, "hf_fsdpturbo"):
        hub.export_model(model, str(tmp_path / "ours"), 10**9)
    assert "gathered on one rank" not in caplog.text
    got, got_metadata = contents(tmp_path / "ours")
    assert sorted(got) == sorted(want)
    assert not [n for n in want if got[n].dtype != want[n].dtype or not torch.equal(got[n], want[n])]
    assert got_metadata == metadata


@pytest.mark.parametrize("family", SMALL)
def test_no_stack_of_experts_is_converted_whole(family):
    model = tiny_model(families()[family])
    jobs = hub_plan.make_jobs(model, hub.saved_tensors(model))
    stacks = {f"{module}." for module in find_experts(model, 1)}
    experts = [job for job in jobs if any(name.startswith(tuple(stacks)) for name in job.sources)]
    assert experts
    for job in experts:
        assert job.row is not None or job.verbatim or job.stacked or all(o.numel < 10_000 for o in job.outputs), job
    assert any(job.stacked for job in jobs) == (family in STACKED)
