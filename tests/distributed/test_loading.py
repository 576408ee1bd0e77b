"""Loading shard by shard: exact for every family and layout, nothing whole on a rank, damage refused on every rank."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.spawn import run_ranks
from tests.support.tiny_models import FAMILIES, tiny_model
from tests.support.topologies import fresh_state, plain_arguments

LAYOUTS = {
    "ep4": ({"ep_size": 4}, 8),
    "ep2_efsdp2": ({"ep_size": 2}, 8),
    "efsdp4": ({"ep_size": 1}, 8),
    "ep2_edp2_hsdp2": ({"ep_size": 2, "efsdp_size": 1, "mp_replicate_size": 2}, 8),
    "cp2_efsdp2": ({"ep_size": 1, "cp_size": 2}, 8),
    "one_expert_cut": ({"ep_size": 2}, 2),
    "two_experts_on_four": ({"ep_size": 1}, 2),
}


def load(path: str, state, dtype: torch.dtype | str = torch.float32, **kwargs):
    """The loader as the trainer mixin calls it, without a trainer."""
    from transformers import AutoModelForCausalLM

    from hf_fsdpturbo.loading.seam import load_sharded
    from hf_fsdpturbo.parallelize.order import parallelize_model

    def shard(model):
        return parallelize_model(model, plain_arguments(), state)[0]

    build = AutoModelForCausalLM.from_pretrained
    return load_sharded(path, build, shard, device=torch.device("cpu"), dtype=dtype, **kwargs)


def load_all(paths: dict[tuple[str, str], str]) -> dict:
    """Rank function: for each (layout, family) the whole weights and what this rank stores."""
    from torch.distributed.tensor import DTensor

    from tests.support.reference_run import whole_parameters
    from tests.support.spawn import init_gloo

    init_gloo()
    result: dict = {"counts": {}}
    for (layout, family), path in paths.items():
        with pytest.MonkeyPatch.context() as patches:
            result["counts"][layout, family] = count_files(patches)
            path, _, cache = path.partition("@")
            model = load(path, fresh_state(4, **LAYOUTS[layout][0]), **({"cache_dir": cache} if cache else {}))
        stored = {}
        for name, parameter in model.named_parameters():
            local = parameter.to_local()
            stored[name] = (parameter.numel(), local.numel(), local.untyped_storage().nbytes() // 4)
            assert isinstance(parameter, DTensor)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        assert not any(b.device.type == "meta" for b in buffers.values())
        config = model.config.to_dict()
        result[layout, family] = (whole_parameters(model), stored, buffers, "distributed_config" in config)
    return result


def count_files(patches: pytest.MonkeyPatch) -> dict[str, Counter[str]]:
    """Openings of weight files and headers read, by file, and keys that are renamed; counted from now on."""
    import safetensors
    from transformers import core_model_loading, modeling_utils

    from hf_fsdpturbo.loading import files

    counts: dict[str, Counter[str]] = {"opened": Counter(), "headers": Counter(), "walked": Counter()}

    def counted(what: str, function):
        def call(first, *args, **kwargs):
            counts[what][Path(first).name] += 1
            return function(first, *args, **kwargs)

        return call

    opened = counted("opened", safetensors.safe_open)
    for owner in (safetensors, modeling_utils):
        patches.setattr(owner, "safe_open", opened)
    patches.setattr(files, "safetensors_header", counted("headers", files.safetensors_header))
    walk = counted("walked", core_model_loading.rename_source_key)
    patches.setattr(core_model_loading, "rename_source_key", walk)
    return counts


CASES = [
    *((layout, "qwen3_moe") for layout in LAYOUTS),
    *(("ep2_efsdp2", family) for family in FAMILIES if family != "qwen3_moe"),
    *((layout, "gpt_oss") for layout in ("one_expert_cut", "two_experts_on_four")),
]


COUNTED = ("ep4", "qwen3_moe")
HUB_ID = ("ep4", "a Hub id")


def one_file_an_expert(source: str, folder: Path) -> str:
    """The same checkpoint with the tensors of each expert number in a file of their own."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    weight_map, files = {}, {}
    for path in Path(source).glob("*.safetensors"):
        for key, tensor in load_file(path).items():
            file = f"model-{key.split('.')[5] if '.experts.' in key else 'rest'}.safetensors"
            weight_map[key] = file
            files.setdefault(file, {})[key] = tensor
    for file, tensors in files.items():
        save_file(tensors, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return str(folder)


def in_hub_cache(folder: str) -> Path:
    """The folder's files as ``somebody/moe`` in a cache of the Hub beside it: links into ``blobs``."""
    cache = Path(folder).parent / "cache"
    entry, commit = cache / "models--somebody--moe", "a" * 40
    shutil.copytree(folder, entry / "blobs")
    for place in ("refs", f"snapshots/{commit}"):
        (entry / place).mkdir(parents=True)
    (entry / "refs" / "main").write_text(commit)
    for blob in (entry / "blobs").iterdir():
        (entry / "snapshots" / commit / blob.name).symlink_to(blob)
    return cache


@pytest.fixture(scope="module")
def counted(tiny, tmp_path_factory) -> str:
    source = tiny(COUNTED[1], num_experts=8, max_shard_size="20KB")
    return one_file_an_expert(source, tmp_path_factory.mktemp("counted") / "model")


@pytest.fixture(scope="module")
def loaded(tiny, counted) -> list[dict]:
    experts = {layout: number for layout, (_, number) in LAYOUTS.items()}
    paths = {
        (layout, family): tiny(family, num_experts=experts[layout], max_shard_size="20KB") for layout, family in CASES
    }
    paths[COUNTED] = counted
    paths[HUB_ID] = f"somebody/moe@{in_hub_cache(counted)}"
    return run_ranks(load_all, 4, paths, timeout=150)


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_every_weight_is_exact(loaded, layout: str, family: str):
    """Bit for bit the weights the checkpoint was made from, on every rank; buffers too."""
    model = tiny_model(family, num_experts=LAYOUTS[layout][1])
    for rank in loaded:
        weights, _, buffers, named = rank[layout, family]
        assert weights.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            assert torch.equal(weights[name], parameter), name
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffers[name], buffer, msg=name)
        assert not named, "config.json would carry a distributed_config"


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_no_rank_holds_more_than_its_share(loaded, layout: str, family: str):
    """Local storage is as large as the local shard (no view into a whole tensor), and shards add up."""
    sizes = LAYOUTS[layout][0]
    replicas = sizes.get("mp_replicate_size", 1)
    edp = 4 // (sizes["ep_size"] * sizes.get("efsdp_size", 4 // sizes["ep_size"] // sizes.get("cp_size", 1)))
    edp //= sizes.get("cp_size", 1)
    for name, (total, _, _) in loaded[0][layout, family][1].items():
        locals_ = [rank[layout, family][1][name][1] for rank in loaded]
        storages = [rank[layout, family][1][name][2] for rank in loaded]
        copies = edp if ".experts." in name else replicas
        assert sum(locals_) == total * copies, name
        # FSDP pads an uneven dim 0 to the largest shard
        assert max(storages) <= max(locals_), name


@pytest.mark.parametrize("case", [COUNTED, HUB_ID], ids=lambda case: case[1])
def test_a_rank_opens_the_files_of_its_own_slices(loaded, counted, case):
    """One rank of the node reads the headers; a file is opened once for data; a key of a stack is renamed once."""
    index = json.loads(Path(counted, "model.safetensors.index.json").read_text())["weight_map"]
    for rank, found in enumerate(loaded):
        counts = found["counts"][case]
        assert set(counts["headers"].values()) == ({1} if rank == 0 else set())
        assert set(counts["headers"]) == (set(index.values()) if rank == 0 else set())
        own = {"model-rest.safetensors", *(f"model-{expert}.safetensors" for expert in (2 * rank, 2 * rank + 1))}
        data = counts["opened"] - counts["headers"]
        assert data == dict.fromkeys(own, 1)
        assert counts["walked"].keys() == index.keys()
        assert {count for key, count in counts["walked"].items() if ".experts." in key} == {1}


def load_variants(paths: dict[str, str]) -> dict:
    """Rank function: dtypes, attention implementation, and one process's loader left as it was."""
    from transformers import PreTrainedModel

    from tests.support.reference_run import whole_parameters
    from tests.support.spawn import init_gloo

    init_gloo()
    before = PreTrainedModel.__dict__.get("maybe_distribute_model")
    state = fresh_state(2, ep_size=2)
    eager = load(paths["float32"], state, attn_implementation="eager")
    result = {
        "attention": {m.config._attn_implementation for m in eager.modules() if hasattr(m, "config")},
        "down": whole_parameters(load(paths["float32"], state, dtype=torch.bfloat16)),
        "up": whole_parameters(load(paths["bfloat16"], state)),
        "auto": {str(p.dtype) for p in load(paths["bfloat16"], state, dtype="auto").parameters()},
        "tied": whole_parameters(load(paths["tied"], state)),
    }
    after = PreTrainedModel.__dict__.get("maybe_distribute_model")
    result["loader restored"] = (before is None and after is None) or before.__func__ is after.__func__
    return result


def test_dtype_attention_and_tied_weights(tiny):
    paths = {
        "float32": tiny("qwen3_moe"),
        "bfloat16": tiny("qwen3_moe", dtype="bfloat16"),
        "tied": tiny("qwen3_moe", tie=True),
    }
    found = run_ranks(load_variants, 2, paths, timeout=90)[0]
    weights = dict(tiny_model("qwen3_moe").named_parameters())
    assert found["attention"] == {"eager"}
    assert found["auto"] == {"torch.bfloat16"}
    assert found["loader restored"]
    for name, weight in weights.items():
        assert torch.equal(found["down"][name], weight.bfloat16()), name
        assert torch.equal(found["up"][name], weight.bfloat16().float()), name
    tied = dict(tiny_model("qwen3_moe", tie=True).named_parameters())
    assert found["tied"].keys() == tied.keys()
    assert all(torch.equal(found["tied"][name], weight) for name, weight in tied.items())


# Damage: name -> what is done to a copy of a checkpoint (several files and an index)


def _damage_truncated(path: Path) -> str:
    file = sorted(path.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])
    return file.name


def _damage_header(path: Path) -> str:
    file = sorted(path.glob("*.safetensors"))[0]
    file.write_bytes(b"\xff" * 7)
    return file.name


def _damage_missing_file(path: Path) -> str:
    file = sorted(path.glob("*.safetensors"))[2]
    file.unlink()
    return file.name


def _damage_index_promises(path: Path) -> str:
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = next(iter(content["weight_map"].values()))
    content["weight_map"]["model.layers.0.extra.weight"] = name
    index.write_text(json.dumps(content))
    return "model.layers.0.extra.weight"


def _rewrite(path: Path, key: str, change) -> None:
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = path / content["weight_map"][key]
    tensors = load_file(file)
    tensor = change(tensors.pop(key))
    for new_key, value in tensor.items():
        tensors[new_key] = value
        content["weight_map"][new_key] = file.name
    if key not in tensor:
        del content["weight_map"][key]
    save_file(tensors, file, metadata={"format": "pt"})
    index.write_text(json.dumps(content))


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
ROUTER = "model.layers.0.mlp.gate.weight"


def _damage_missing_dense(path: Path) -> str:
    _rewrite(path, ROUTER, lambda tensor: {})
    return ROUTER


def _damage_missing_expert(path: Path) -> str:
    """Left to itself the loader puts the next expert in its place, without an error on all ranks but the last."""
    _rewrite(path, EXPERT, lambda tensor: {})
    return EXPERT


def _damage_missing_whole_expert(path: Path) -> str:
    for part in ("up_proj", "gate_proj", "down_proj"):
        _rewrite(path, EXPERT.replace("up_proj", part), lambda tensor: {})
    return "An expert is missing"


def _damage_unknown_dtype(path: Path) -> str:
    file = sorted(path.glob("*.safetensors"))[1]
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].replace(b'"F32"', b'"F99"', 1)
    file.write_bytes(content[:8] + header + content[8 + length :])
    return "has dtype 'F99'"


def _damage_dense_shape(path: Path) -> str:
    _rewrite(path, ROUTER, lambda tensor: {ROUTER: tensor[:, :-4].contiguous()})
    return ROUTER


def _damage_expert_shape(path: Path) -> str:
    _rewrite(path, EXPERT, lambda tensor: {EXPERT: tensor[:-4].contiguous()})
    return EXPERT


DAMAGES = {name.removeprefix("_damage_"): f for name, f in globals().items() if name.startswith("_damage_")}


def try_to_load(paths: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Rank function: (exception class, message) for each damaged checkpoint; loading afterwards still works."""
    from tests.support.spawn import init_gloo

    init_gloo()
    state = fresh_state(2, ep_size=2)
    result = {}
    for name, path in paths.items():
        try:
            load(path, state)
            result[name] = ("", "")
        except Exception as error:  # noqa: BLE001  (the test says which class it has to be)
            result[name] = (type(error).__name__, str(error))
    return result


@pytest.fixture(scope="module")
def damaged(tiny, tmp_path_factory) -> tuple[list[dict], dict[str, str]]:
    whole = tiny("qwen3_moe", max_shard_size="20KB")
    paths, named = {}, {}
    for name, damage in DAMAGES.items():
        copy = tmp_path_factory.mktemp(name) / "checkpoint"
        shutil.copytree(whole, copy)
        named[name] = damage(copy)
        paths[name] = str(copy)
    return run_ranks(try_to_load, 2, {**paths, "whole": whole}, timeout=90), named


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_value_error_on_every_rank(damaged, damage: str):
    """Naming the file or the key."""
    by_rank, named = damaged
    for rank in by_rank:
        kind, message = rank[damage]
        assert kind == "ValueError", (kind, message)
        assert named[damage] in message, message


def test_undamaged_loads(damaged):
    assert all(rank["whole"] == ("", "") for rank in damaged[0])
