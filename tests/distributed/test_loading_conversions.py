"""Loading by path where Transformers converts on the way: in slices, bit for bit what plain loading gives.

The families are those whose weights were scrambled without an error, and those that could not be loaded in slices.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_fsdpturbo.loading import conversions
from tests.support.spawn import run_ranks
from tests.support.topologies import fresh_state, plain_arguments

SCRAMBLED = (
    "kimi_linear",  # joined along the sharded dim
    "bailing_hybrid",
    "glm5_next",
    "qwen4_exp_text",  # one table from many parts
    "minimax_m3_vl",  # gate and up of dense and shared experts
    "mistral_large4",  # permuted for rotary embeddings
    "step3p7",  # split, then permuted
    "unlimited_ocr",  # split
)
FAILED = (
    "qwen3_vl_moe",  # transposed stacks
    "lara_mini",  # split by sizes
    "inkling2",  # padded vocabulary, interleaved gate and up
    "ernie4_5_vl_moe",  # transposed router, two stacks from one list
)
LAYOUTS = {
    "ep2_efsdp2": {"ep_size": 2},
    "ep2_hsdp2": {"ep_size": 2, "efsdp_size": 1, "mp_replicate_size": 2},
}


CASES = [
    *((family, "ep2_efsdp2") for family in (*SCRAMBLED, *FAILED)),
    *((family, "ep2_hsdp2") for family in ("kimi_linear", "step3p7", "qwen3_vl_moe", "inkling2")),
]


def load(folder: str, architecture: str, layout: str, peft_config: Any = None, **keywords: Any) -> Any:
    """As the trainer loads: sharded on meta (adapters inside, hidden), then filled."""
    import transformers

    from hf_fsdpturbo.loading.seam import load_sharded
    from hf_fsdpturbo.parallelize.build import Adapter

    state, adapter = fresh_state(4, **LAYOUTS[layout]), Adapter(peft_config)
    build = getattr(transformers, architecture).from_pretrained
    keywords = {"device": torch.device("cpu"), "dtype": torch.float32, **keywords}

    def shard(model: Any) -> Any:
        return adapter.parallelize(model, plain_arguments(), state)[0]

    return load_sharded(folder, build, shard, **keywords)


def different(model: Any, folder: str) -> tuple[list[str], int]:
    """Tensors of this rank that have other bits than in a plain load, and how many were compared."""
    from hf_fsdpturbo.shards import local_box, local_tensor

    plain = torch.load(f"{folder}/plain.pt", weights_only=True, mmap=True)
    mine = model.state_dict()
    assert mine.keys() == plain["tensors"].keys()
    assert [repr(rule) for rule in model._weight_conversions] == plain["conversions"]
    wrong = [n for n, t in mine.items() if not torch.equal(local_tensor(t), plain["tensors"][n][local_box(t).slices])]
    return wrong, len(mine)


def load_all(made: dict[str, tuple[str, str]], damaged: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Rank function: every case; then faults put back; then damaged checkpoints."""
    from peft import LoraConfig

    from tests.support.spawn import init_gloo

    init_gloo()
    result: dict[str, Any] = {"found": {}, "opened": {}, "damaged": {}}
    for family, layout in CASES:
        folder, architecture = made[family]
        try:
            result["found"][family, layout] = different(load(folder, architecture, layout), folder)
        except ValueError as error:  # raised on every rank: the others can go on
            result["found"][family, layout] = ([str(error)], 0)
    adapted = load(*made["qwen3_vl_moe"], "ep2_efsdp2", LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    result["adapted"] = different(adapted, made["qwen3_vl_moe"][0])[0]
    for operation, family in OPENED.items():
        result["opened"][operation] = with_the_list_opened(operation, *made[family])
    for name, (folder, architecture) in damaged.items():
        result["damaged"][name] = failure(folder, architecture)
    return result


def failure(folder: str, architecture: str, **keywords: Any) -> tuple[str, str]:
    """Class and message of what loading raises."""
    try:
        load(folder, architecture, "ep2_efsdp2", **keywords)
    except Exception as error:  # noqa: BLE001  (the test says which class it has to be)
        return type(error).__name__, str(error)
    return "", "no error"


OPENED = {"PermuteForRope": "mistral_large4", "Concatenate": "kimi_linear"}
"""Operation that is allowed where it may not be -> family that has it along the sharded dim."""


def with_the_list_opened(operation: str, folder: str, architecture: str) -> dict[str, Any]:
    """The fault put back: what a load without a check gets wrong, and what the checks say.

    A permutation is said to touch nothing, and to be safe on slices; all joins are left to Transformers' loader.
    """
    with pytest.MonkeyPatch.context() as patch:
        if operation == "Concatenate":
            patch.setattr("hf_fsdpturbo.loading.whole_sources.runs_on_slices", lambda *arguments: True)
        else:
            by_transformers = ((operation,), *conversions.BY_TRANSFORMERS)
            patch.setitem(conversions.TOUCHED, operation, ())
            patch.setattr(conversions, "BY_TRANSFORMERS", by_transformers)
        checks = {mode: failure(folder, architecture, check_loading=mode) for mode in ("sample", "full")}
        model = load(folder, architecture, "ep2_efsdp2", check_loading="off")
    return {"wrong": different(model, folder)[0], **checks}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, tuple[str, str]]:
    """Family -> (folder, class): a checkpoint of several files in the released names, and what plain loading gives."""
    import transformers

    from tests.families.listing import families
    from tests.families.tiny import tiny_model

    result = {}
    for name in (*SCRAMBLED, *FAILED):
        family, folder = families()[name], str(tmp_path_factory.mktemp(name))
        tiny_model(family).save_pretrained(folder, max_shard_size="60KB")
        plain = getattr(transformers, family.architecture).from_pretrained(folder, dtype=torch.float32)
        conversions = [repr(rule) for rule in plain._weight_conversions]
        torch.save({"tensors": plain.state_dict(), "conversions": conversions}, os.path.join(folder, "plain.pt"))
        result[name] = (folder, family.architecture)
    return result


DAMAGED = {  # name -> (family, part of the key that is taken away, what the message must have)
    "part of a join": ("kimi_linear", "k_conv1d.weight", ("lacks", "k_conv1d.weight", "self_attn.conv1d.weight")),
    "one expert of two stacks": (
        "ernie4_5_vl_moe",
        "experts.3.up_proj.weight",
        ("ErnieFuseAndSplitTextVisionExperts", "mlp.text_moe.experts.gate_up_proj", "Copy the whole checkpoint"),
    ),
}


@pytest.fixture(scope="module")
def damaged(made, tmp_path_factory) -> dict[str, tuple[str, str]]:
    import shutil

    result = {}
    for name, (family, part, _) in DAMAGED.items():
        folder, architecture = made[family]
        copy = tmp_path_factory.mktemp("damaged") / "checkpoint"
        shutil.copytree(folder, copy)
        take_away(copy, part)
        result[name] = (str(copy), architecture)
    return result


def take_away(folder: Path, part: str) -> None:
    """Remove the first tensor whose name has a part, from its file and from the index."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    key = next(key for key in index["weight_map"] if part in key)
    file = folder / index["weight_map"].pop(key)
    tensors = load_file(file)
    del tensors[key]
    save_file(tensors, file, metadata={"format": "pt"})
    path.write_text(json.dumps(index))


@pytest.fixture(scope="module")
def loaded(made, damaged) -> list[dict[str, Any]]:
    return run_ranks(load_all, 4, made, damaged, timeout=200)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_every_tensor_is_what_plain_loading_gives(loaded, family: str, layout: str):
    for rank in loaded:
        wrong, compared = rank["found"][family, layout]
        assert wrong == []
        assert compared > 20


def test_the_base_of_an_adapter_too(loaded):
    assert [rank["adapted"] for rank in loaded] == [[]] * 4


@pytest.mark.parametrize("operation", OPENED)
def test_a_list_opened_too_far_fails_parity_and_is_named_on_every_rank(loaded, operation: str):
    by_rank = [rank["opened"][operation] for rank in loaded]
    assert any(found["wrong"] for found in by_rank)
    for found in by_rank:
        for mode in ("sample", "full"):
            kind, message = found[mode]
            assert kind in ("ValueError", "CheckpointError"), (kind, message)  # the latter is a ValueError too
            assert operation in message
            assert ".safetensors" in message


@pytest.mark.parametrize("damage", DAMAGED)
def test_an_absent_source_is_named_on_every_rank(loaded, damage: str):
    for rank in loaded:
        kind, message = rank["damaged"][damage]
        assert kind in ("ValueError", "CheckpointError"), (kind, message)
        for part in DAMAGED[damage][2]:
            assert part in message, message
