"""`save_quantized`: what is refused, by name, before a model is loaded; a copy appears whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_fsdpturbo import cli
from hf_fsdpturbo.loading import release_copy
from hf_fsdpturbo.trainer.frozen_base import FrozenBase
from tests.support import packed_releases
from tests.support.tiny_models import save_tiny

LORA = SimpleNamespace(modules_to_save=None)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, few = tmp_path_factory.mktemp("bases"), {"layers": 1, "num_experts": 4}
    packed = packed_releases.float8(save_tiny("qwen3_moe", folder / "packed", **few))
    return {"packed": packed, "full": save_tiny("qwen3_moe", folder / "full", **few)}


def frozen_base(model: Any, adapter: Any = LORA, trained: tuple[str, ...] = ("q_proj.lora_A",), **fields: Any) -> Any:
    names = ["model.norm.weight", *trained]
    parameters = [(f"base_model.{n}", torch.nn.Parameter(torch.ones(1), n in trained)) for n in names]
    saving = SimpleNamespace(staging=None, leads=True)
    trainer = SimpleNamespace(model=SimpleNamespace(named_parameters=lambda: parameters), _saving=saving)
    own = {"save_quantized": True, "router_bias_update_rate": None, "model_init_kwargs": None, "dcp_path": None}
    config = SimpleNamespace(**{**own, **fields})
    config.fsdpturbo_params = SimpleNamespace(dcp_path=config.dcp_path)
    given = {"model": model, "peft_config": adapter}
    return FrozenBase(trainer, SimpleNamespace(config=config, given=given))


@pytest.mark.parametrize(
    ("model", "change", "text"),
    [
        ("packed", {"adapter": None}, "without an adapter all of it is trained"),
        ("packed", {"adapter": SimpleNamespace(modules_to_save=["lm_head"])}, r"modules_to_save=\['lm_head'\]"),
        ("packed", {"dcp_path": "some/dcp"}, "dist_config dcp_path='some/dcp' changes its weights"),
        ("packed", {"router_bias_update_rate": 1e-3}, "router_bias_update_rate=0.001 changes"),
        ("packed", {"model_init_kwargs": {"subfolder": "no"}}, "which has no config.json"),
        ("full", {}, "is stored in full"),
        (object(), {}, "model is an object"),
    ],
)
def test_refused_before_a_model_is_loaded(bases, model, change, text):
    path = bases[model] if isinstance(model, str) else model
    with pytest.raises(ValueError, match=f"save_quantized=True.*{text}"):
        frozen_base(path, **change)
    assert not frozen_base(path, save_quantized=False, **change).wanted


def test_what_is_trained_of_the_release_is_refused_before_training(bases):
    frozen_base(bases["packed"]).check()
    with pytest.raises(ValueError, match="base_model.lm_head.weight and 0 more of its own parameters are trained"):
        frozen_base(bases["packed"], trained=("q_proj.lora_A", "lm_head.weight")).check()


def test_a_copy_appears_whole_and_replaces_an_older_one(bases, tmp_path, monkeypatch):
    out, packed = tmp_path / "out", Path(bases["packed"])
    (out / "base").mkdir(parents=True)
    (out / "base" / "model-00007-of-00007.safetensors").write_text("older")
    own = release_copy.shutil.copyfile

    def full_disk(source: str, target: str) -> Any:
        if source.endswith("config.json"):
            raise OSError(28, "No space left on device")
        return own(source, target)

    base = frozen_base(bases["packed"])
    with monkeypatch.context() as patch:
        patch.setattr(release_copy.shutil, "copyfile", full_disk)
        with pytest.raises(ValueError, match="copying the release .* failed.*No space left"):
            base.save(str(out))
    assert os.listdir(out / "base") == ["model-00007-of-00007.safetensors"]
    base.trainer._saving.staging = str(out)  # a checkpoint-N
    base.save(str(out))
    assert len(os.listdir(out / "base")) == 1
    base.trainer._saving.staging = None
    base.save(str(out))
    assert os.listdir(out) == ["base"]
    names = sorted(os.listdir(out / "base"))
    assert names == sorted(entry.name for entry in packed.iterdir())
    assert all((out / "base" / name).read_bytes() == (packed / name).read_bytes() for name in names)
    frozen_base(str(out / "base")).save(str(out))  # a run that starts from the copy
    assert sorted(os.listdir(out / "base")) == names


def test_links_that_lead_out_and_missing_files_are_refused(bases, tmp_path):
    def copied(name: str) -> Path:
        release_copy.copy_release(bases["packed"], {}, str(tmp_path / name))
        return tmp_path / name / "base"

    (tmp_path / "secret.json").write_text("{}")
    (copied("a") / "tokenizer_config.json").unlink()
    (tmp_path / "a" / "base" / "tokenizer_config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ValueError, match="outside its folder"):
        release_copy.copy_release(str(tmp_path / "a" / "base"), {}, str(tmp_path / "out"))
    next(copied("b").glob("*-00002-of-*")).unlink()
    with pytest.raises(ValueError, match="is missing: the checkpoint's index names it"):
        frozen_base(str(tmp_path / "b" / "base"))
    index = copied("c") / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {key: "../../secret.json" for key in content["weight_map"]}
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="only plain names inside its folder"):
        frozen_base(str(tmp_path / "c" / "base"))
    assert not (tmp_path / "out").exists() or not os.listdir(tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--save_quantized"], "needs an adapter"),
        (["--load_in_4bit"], "--load_in_4bit is for --merge"),
        (["--use_bnb_nested_quant"], "--use_bnb_nested_quant is for --load_in_4bit"),
        (["--base", "some/model"], "--base is for --merge and --save_quantized"),
    ],
)
def test_words_of_export(tmp_path, capsys, words, text):
    with pytest.raises(SystemExit) as status:
        cli.main(["export", str(tmp_path), str(tmp_path / "out"), *words])
    assert status.value.code == 2
    assert text in capsys.readouterr().err
