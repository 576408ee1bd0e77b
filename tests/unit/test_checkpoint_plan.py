"""Names, writers and files of a Hub export, without ranks; and the fault of numbering a rank's own experts from 0."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers.core_model_loading import revert_weight_conversion

from hf_fsdpturbo.checkpoint import hub, hub_plan
from hf_fsdpturbo.checkpoint.hub_plan import Job, Output
from tests.support.tiny_models import FAMILIES, tiny_model


def plan(model):
    tensors = hub.saved_tensors(model)
    return tensors, hub_plan.make_jobs(model, tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_shapes_and_dtypes_are_those_of_transformers(family):
    model = tiny_model(family, layers=4 if family == "qwen3_5_moe" else 2)
    tensors, jobs = plan(model)
    want = revert_weight_conversion(model, tensors)
    got = {output.name: output for job in jobs for output in job.outputs}
    assert sorted(got) == sorted(want)
    assert all(got[n].shape == tuple(want[n].shape) and got[n].dtype == want[n].dtype for n in want)


@pytest.mark.parametrize(("family", "per_expert"), [("qwen3_moe", True), ("mixtral", True), ("gpt_oss", False)])
def test_experts_are_converted_one_by_one_or_written_as_they_are(family, per_expert):
    _, jobs = plan(tiny_model(family))
    experts = [job for job in jobs if "experts" in job.sources[0]]
    assert {job.row for job in experts} == (set(range(8)) if per_expert else {None})
    assert all(job.verbatim != per_expert for job in experts)


def test_a_rank_s_own_stack_would_get_wrong_names():
    """The fault put back: converting experts 4..7 as a stack of four names them 0..3; by id they are 4..7."""
    model = tiny_model("qwen3_moe")
    tensors, jobs = plan(model)
    names = [n for n in tensors if n.startswith("model.layers.0.mlp.experts.")]
    naive = revert_weight_conversion(model, {n: tensors[n][4:] for n in names})
    mine = [job for job in jobs if job.row is not None and job.row >= 4 and job.sources[0] in names]
    ours = [output.name for job in mine for output in job.outputs]
    assert sorted(naive) != sorted(ours)
    assert {name.split(".experts.")[1][0] for name in naive} == set("0123")
    assert {name.split(".experts.")[1][0] for name in ours} == set("4567")


def test_tied_weights_are_written_once():
    tensors, jobs = plan(tiny_model("qwen3_moe", tie=True))
    assert "lm_head.weight" not in tensors
    untied, _ = plan(tiny_model("qwen3_moe", tie=False))
    assert "lm_head.weight" in untied


def test_files_stay_below_the_size_and_offsets_are_aligned():
    outputs = [Output(f"t{i}", dtype, (7, 3)) for i, dtype in enumerate([torch.bfloat16, torch.float32] * 4)]
    jobs = [Job((o.name,), (o,), "", verbatim=True, writer=i % 2) for i, o in enumerate(outputs)]
    files = hub_plan.lay_out(jobs, 200)
    assert all(file.nbytes <= 200 for file in files)
    assert sorted(o.name for file in files for o in file.outputs) == sorted(o.name for o in outputs)
    for file in files:
        offset = 0
        for output in file.outputs:
            assert offset % output.dtype.itemsize == 0
            offset += output.nbytes


def test_a_conversion_across_layers_is_done_whole_and_said(monkeypatch, caplog):
    """Names that no layer can make alone: nothing is lost, and it is no secret."""
    model = tiny_model("qwen3_moe")
    tensors = hub.saved_tensors(model)
    own = revert_weight_conversion

    def across(model, state):
        made = own(model, state)
        if len(state) == len(tensors):
            made["both_norms"] = torch.cat([made.pop(f"model.layers.{i}.input_layernorm.weight") for i in (0, 1)])
        return made

    monkeypatch.setattr(hub_plan, "revert_weight_conversion", across)
    (job,) = [job for job in hub_plan.make_jobs(model, tensors) if not job.verbatim]
    assert "both_norms" in {output.name for output in job.outputs}
    assert "gathered on one rank" in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_export_of_a_whole_model_in_one_process(tmp_path, family):
    model = tiny_model(family, layers=4 if family == "qwen3_5_moe" else 2, dtype="bfloat16")
    assert hub.export_model(model, str(tmp_path), 10**9) == ["model.safetensors"]
    got, want = load_file(tmp_path / "model.safetensors"), revert_weight_conversion(model, hub.saved_tensors(model))
    assert sorted(got) == sorted(want)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_big_tensors_are_written_in_chunks(tmp_path, monkeypatch):
    model = tiny_model("qwen3_moe")
    monkeypatch.setattr(hub, "CHUNK_BYTES", 300)
    hub.export_model(model, str(tmp_path), 30_000)
    got = {name: t for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()}
    want = revert_weight_conversion(model, hub.saved_tensors(model))
    assert sorted(got) == sorted(want)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_new_export_replaces_the_old_files(tmp_path):
    model = tiny_model("qwen3_moe")
    many = hub.export_model(model, str(tmp_path), 30_000)
    assert len(many) > 3
    (tmp_path / "other.safetensors").write_bytes(b"kept")
    hub.export_model(model, str(tmp_path), 10**9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "other.safetensors"]
