"""Weights without a training run: every rank's slices on paper, headers against models, the loader's report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hf_fsdpturbo.loading import seam
from hf_fsdpturbo.loading.files import (
    cached_headers,
    check_checkpoint_files,
    local_headers,
    refuse_impossible,
    safetensors_header,
)
from hf_fsdpturbo.loading.headers import check_headers
from hf_fsdpturbo.shards import copy_full_tensor_
from tests.support.tiny_models import FAMILIES, tiny_config


def loaded_rows(mesh, placements, full: torch.Tensor, local_shape, dtype=torch.float32) -> torch.Tensor:
    """What ``copy_full_tensor_`` leaves in this rank's shard."""
    local = torch.full(local_shape, float("nan"), dtype=dtype)
    target = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
    copy_full_tensor_(target, full)
    return target.to_local()


def test_two_axes_that_share_a_dim(on_rank):
    """Eight experts, ep 2 then efsdp 2 inside: rank (efsdp e, ep p) holds rows 4p + 2e and the next.

    Cutting axis by axis, efsdp first, would give rows 4e + 2p: the wrong experts on two of four ranks.
    """
    full = torch.arange(8.0)[:, None].expand(8, 3).contiguous()
    for rank in range(4):
        mesh = on_rank(rank, (2, 2))  # axes (efsdp, ep)
        efsdp, ep = divmod(rank, 2)
        rows = loaded_rows(mesh, [_StridedShard(0, split_factor=2), Shard(0)], full, (2, 3))
        assert rows[:, 0].tolist() == [4 * ep + 2 * efsdp, 4 * ep + 2 * efsdp + 1]


def test_two_axes_on_two_dims_and_a_replicated_one(on_rank):
    full = torch.arange(48.0).view(4, 2, 6)
    for rank in range(8):
        mesh = on_rank(rank, (2, 2, 2))
        _, b, c = rank // 4, rank // 2 % 2, rank % 2
        local = loaded_rows(mesh, [Replicate(), Shard(2), Shard(0)], full, (2, 2, 3))
        assert torch.equal(local, full[2 * c : 2 * c + 2, :, 3 * b : 3 * b + 3])


def test_uneven_and_empty_tails(on_rank):
    """Five rows over four ranks: 2, 2, 1, 0."""
    full = torch.arange(10.0).view(5, 2)
    for rank, rows in enumerate([(0, 2), (2, 4), (4, 5), (5, 5)]):
        local = loaded_rows(on_rank(rank, (4,)), [Shard(0)], full, (rows[1] - rows[0], 2))
        assert torch.equal(local, full[rows[0] : rows[1]])


def test_dtype_is_converted_and_shapes_must_agree(on_rank):
    full = torch.linspace(0, 1, 8).view(4, 2)
    local = loaded_rows(on_rank(1, (2,)), [Shard(0)], full, (2, 2), dtype=torch.bfloat16)
    assert torch.equal(local, full[2:].bfloat16())
    plain = nn.Parameter(torch.zeros(4, 2, dtype=torch.bfloat16))
    copy_full_tensor_(plain, full)
    assert torch.equal(plain, full.bfloat16())
    with pytest.raises(ValueError, match=r"\(3, 2\) does not fit a parameter of \(4, 2\)"):
        copy_full_tensor_(plain, torch.zeros(3, 2))


def test_loader_seam_is_put_back_even_after_an_error():
    from transformers import PreTrainedModel

    before = PreTrainedModel.maybe_distribute_model.__func__
    own = "maybe_distribute_model" in vars(PreTrainedModel)

    def fail_while_open() -> None:
        with seam.sharding_during_load(lambda model: model):
            assert PreTrainedModel.maybe_distribute_model.__func__ is not before
            raise KeyError

    with pytest.raises(KeyError):
        fail_while_open()
    assert PreTrainedModel.maybe_distribute_model.__func__ is before
    assert ("maybe_distribute_model" in vars(PreTrainedModel)) is own


REPORT = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}


@pytest.mark.parametrize(
    ("info", "parts"),
    [
        ({"missing_keys": {"model.norm.weight"}}, ("missing", "model.norm.weight")),
        ({"mismatched_keys": {("a.weight", (1,), (2,))}}, ("of another shape", "a.weight")),
        ({"error_msgs": ["broken"]}, ("unreadable", "broken")),
        ({"missing_keys": {f"k{i}" for i in range(9)}}, ("k0", "and more")),
    ],
)
def test_what_transformers_logs_is_an_error(info: dict, parts: tuple[str, ...]):
    with pytest.raises(ValueError, match="does not fit the model") as caught:
        seam.check_loading_info("some/path", {**REPORT, **info})
    for part in ("some/path", *parts):
        assert part in str(caught.value)


def test_a_fresh_task_head_is_fine():
    report = {**REPORT, "missing_keys": {"score.weight"}, "unexpected_keys": {"lm_head.weight"}}
    assert seam.check_loading_info("p", report) == ["score.weight"]
    assert seam.check_loading_info("p", REPORT) == []


def test_keys_that_the_class_does_not_use_are_no_fault():
    assert seam.check_loading_info("p", {**REPORT, "unexpected_keys": {"mtp.fc.weight"}}) == []


# Headers against models


def on_meta(family: str, auto: str = "AutoModelForCausalLM", **config):
    import transformers

    with torch.device("meta"):
        return getattr(transformers, auto).from_config(tiny_config(family, **config))


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_checkpoints_pass(tiny, family: str):
    """One file or several; with and without a head, a task head in its place; tied."""
    for keywords in ({}, {"max_shard_size": "20KB"}):
        path = tiny(family, **keywords)
        headers = check_checkpoint_files(path)
        assert len(headers) == 1 or keywords
        check_headers(on_meta(family), path, headers)
        check_headers(on_meta(family, "AutoModel"), path, headers)
        if family != "qwen3_5_moe":  # has no such class upstream
            check_headers(on_meta(family, "AutoModelForSequenceClassification", num_labels=1), path, headers)
    tied = tiny(family, tie=True)
    check_headers(on_meta(family, tie=True), tied, check_checkpoint_files(tied))


@pytest.mark.parametrize("family", FAMILIES)
def test_another_size_is_refused(tiny, family: str):
    """A config of twice the experts, and one of another hidden size, on the same files."""
    path = tiny(family)
    headers = check_checkpoint_files(path)
    for config in ({"num_experts": 16}, {"hidden_size": 64}):
        with pytest.raises(ValueError, match=r"model\.safetensors: .* (has shape|hold)"):
            check_headers(on_meta(family, **config), path, headers)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "mixtral", "deepseek_v3"])
def test_each_missing_expert_tensor_is_named(tiny, family: str):
    """Every per-expert key of one layer, taken away one at a time."""
    path = tiny(family)
    headers = check_checkpoint_files(path)
    (header,) = headers.values()
    model = on_meta(family)
    keys = [key for key in header if "layers.1." in key and ".experts." in key]
    assert len(keys) == 24
    for key in keys:
        rest = {name: entry for name, entry in header.items() if name != key}
        stacked_alone = key.endswith(("down_proj.weight", "w2.weight"))
        with pytest.raises(ValueError, match="An expert is missing" if stacked_alone else key.replace(".", r"\.")):
            check_headers(model, path, {"model.safetensors": rest})


def copy_of(path: str, tmp_path: Path) -> Path:
    shutil.copytree(path, tmp_path / "copy")
    return tmp_path / "copy"


def test_file_header_faults(tiny, tmp_path):
    """What is wrong with a file is said with its name; Hub ids and other formats are left alone."""
    file = copy_of(tiny("qwen3_moe"), tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    assert "lm_head.weight" in safetensors_header(str(file))
    for damaged in (whole[:-1], whole[:50], b"", b"abc", whole + b"\0", b"\xff" * 64):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            check_checkpoint_files(str(file.parent))
    file.write_bytes(whole[:8] + b"!" + whole[9:])
    with pytest.raises(ValueError, match="no readable safetensors header"):
        check_checkpoint_files(str(file.parent))
    assert cached_headers("somebody/some-model", {}) == ("somebody/some-model", {})
    file.unlink()
    assert check_checkpoint_files(str(file.parent)) == {}


def test_index_faults(tiny, tmp_path):
    folder = copy_of(tiny("qwen3_moe", max_shard_size="20KB"), tmp_path)
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text[:-40])
    with pytest.raises(ValueError, match="not valid JSON"):
        check_checkpoint_files(str(folder))
    content = json.loads(text)
    name = content["weight_map"]["lm_head.weight"]
    tensors = load_file(folder / name)
    tensors["other"] = tensors.pop("lm_head.weight")
    save_file(tensors, folder / name)
    index.write_text(text)
    with pytest.raises(ValueError, match=f"{name} lacks the key 'lm_head.weight'"):
        check_checkpoint_files(str(folder))


def test_one_file_goes_before_an_index_that_was_left_behind(tiny, tmp_path):
    """As in Transformers: the index of an earlier save is not read."""
    folder = copy_of(tiny("qwen3_moe"), tmp_path)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert list(check_checkpoint_files(str(folder))) == ["model.safetensors"]


def hub_cache(path: str, cache: Path) -> Path:
    """A checkpoint as ``somebody/moe`` in a Hub cache; returns its snapshot folder."""
    entry, commit = cache / "models--somebody--moe", "a" * 40
    shutil.copytree(path, entry / "snapshots" / commit)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(commit)
    return entry / "snapshots" / commit


@pytest.mark.parametrize("pieces", [{}, {"max_shard_size": "20KB"}])
def test_a_hub_id_has_the_headers_of_its_cached_snapshot(tiny, tmp_path, pieces: dict):
    snapshot = hub_cache(tiny("qwen3_moe", **pieces), tmp_path)
    where = {"cache_dir": str(tmp_path)}
    folder, headers = cached_headers("somebody/moe", where)
    assert folder == str(snapshot)
    assert headers == check_checkpoint_files(str(snapshot))
    file = sorted(snapshot.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{file.name} has .* truncated"):
        cached_headers("somebody/moe", where)
    assert cached_headers("somebody/moe", {**where, "variant": "fp16"})[1] == {}


def test_a_hub_id_is_checked_like_a_folder(tiny, tmp_path):
    """Loaded whole: a missing expert and a missing tensor are named, an undamaged one loads."""
    from transformers import AutoModelForCausalLM

    snapshot = hub_cache(tiny("qwen3_moe"), tmp_path)
    file, expert = snapshot / "model.safetensors", "model.layers.1.mlp.experts.3.up_proj.weight"
    whole = load_file(file)
    where = {"cache_dir": str(tmp_path)}
    for key in (expert, "model.layers.0.mlp.gate.weight"):
        save_file({name: tensor for name, tensor in whole.items() if name != key}, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=key.replace(".", r"\.")):
            seam.load_whole("somebody/moe", AutoModelForCausalLM.from_pretrained, **where)
    save_file(whole, file, metadata={"format": "pt"})
    model = seam.load_whole("somebody/moe", AutoModelForCausalLM.from_pretrained, **where)
    assert torch.equal(model.lm_head.weight, whole["lm_head.weight"])
    assert getattr(model.config, "distributed_config", None) is None


@pytest.mark.parametrize(("layers", "lacks"), [(10**9, ()), (10**9, ("model.safetensors",)), (1000, ())])
def test_a_hub_id_that_asks_for_too_much_is_refused_before_it_is_built(tiny, tmp_path, layers: int, lacks):
    """As a folder is, by the snapshot that is in the cache; a size no model has, also where weights are not there."""
    snapshot = hub_cache(tiny("qwen3_moe"), tmp_path)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_hidden_layers": layers}))
    for name in lacks:
        (snapshot / name).unlink()
    where = {"cache_dir": str(tmp_path)}
    with pytest.raises(ValueError, match=rf"config.json: num_hidden_layers={layers}, "):
        refuse_impossible("somebody/moe", where)
    with pytest.raises(ValueError, match=rf"config.json: num_hidden_layers={layers}, "):
        seam.load_whole("somebody/moe", lambda *args, **kwargs: pytest.fail("it was built"), **where)


def test_a_hub_id_that_is_not_all_there_is_left_to_the_download(tiny, tmp_path):
    snapshot, where = hub_cache(tiny("qwen3_moe", max_shard_size="20KB"), tmp_path), {"cache_dir": str(tmp_path)}
    assert local_headers("somebody/moe", where) == (str(snapshot), check_checkpoint_files(str(snapshot)))
    sorted(snapshot.glob("*.safetensors"))[0].unlink()
    assert local_headers("somebody/moe", where) is None
    assert local_headers("somebody/nothing", where) is None


@pytest.mark.parametrize("turned", [("down",), ("gate", "up")])
def test_transposed_experts_are_named(tiny, turned):
    """As many elements as the model wants, in other dims: Transformers would only point at a report in the log."""
    path = tiny("qwen3_moe")
    headers = check_checkpoint_files(path)
    for key, entry in headers["model.safetensors"].items():
        if key.endswith(tuple(f"{kind}_proj.weight" for kind in turned)):
            entry["shape"] = entry["shape"][::-1]
    with pytest.raises(ValueError, match=rf"safetensors: .*experts.0.{turned[0]}_proj.weight has shape .* would be"):
        check_headers(on_meta("qwen3_moe"), path, headers)


@pytest.mark.parametrize("content", ["{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_index_without_a_map(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index.json has no weight_map"):
        check_checkpoint_files(str(tmp_path))
