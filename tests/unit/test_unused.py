"""Tensors that the model class does not use: where they are read, what a checkpoint holds, what a config claims."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_fsdpturbo.arguments.sources import PUBLIC_DEFAULTS, resolve_settings
from hf_fsdpturbo.checkpoint import hub, unused
from hf_fsdpturbo.launch_config import ENV_PREFIX
from hf_fsdpturbo.loading.unused_keys import by_module
from tests.support.tiny_models import tiny_model

EXTRA = {"mtp.a": torch.randn(3, 5).bfloat16(), "mtp.b": torch.arange(4), "mtp.c": torch.zeros(0, 2)}


@pytest.fixture
def model_and_file(tmp_path):
    """A model of one tensor, and a release that has more."""
    path = tmp_path / "release.safetensors"
    save_file({**EXTRA, "weight": torch.ones(2)}, path)
    model = torch.nn.Linear(2, 1, bias=False)
    unused.remember(model, unused.find([str(path)], EXTRA))
    return model, path


def staged(tmp_path, step: int) -> str:
    folder = tmp_path / "run" / "_saving" / f"checkpoint-{step}"
    os.makedirs(folder)
    return str(folder)


def publish(folder: str) -> str:
    """As ``commit.commit`` does it."""
    final = unused.commit.final_dir(folder)
    os.rename(folder, final)
    return final


def same(path, expected=EXTRA) -> None:
    got = load_file(path)
    assert sorted(got) == sorted(expected)
    assert all(got[name].dtype == t.dtype and torch.equal(got[name], t) for name, t in expected.items())


def test_a_second_checkpoint_links_the_file_of_the_first(model_and_file, tmp_path):
    model, _ = model_and_file
    first, second = staged(tmp_path, 1), staged(tmp_path, 2)
    unused.keep_beside(model, first)
    first = publish(first)
    unused.keep_beside(model, second)
    files = [os.path.join(folder, unused.UNUSED_FILE) for folder in (first, second)]
    assert os.stat(files[0]).st_ino == os.stat(files[1]).st_ino
    os.remove(files[0])
    same(files[1])


def test_where_there_are_no_hard_links_the_bytes_are_written_again(model_and_file, tmp_path, monkeypatch):
    def refused(*args):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refused)
    model, _ = model_and_file
    for step in (1, 2):
        folder = staged(tmp_path, step)
        unused.keep_beside(model, folder)
        same(os.path.join(publish(folder), unused.UNUSED_FILE))


def test_a_release_that_changed_is_not_read(model_and_file, tmp_path, caplog):
    """The fault put back: without the look at size and time, other bytes would be carried under these names."""
    model, path = model_and_file
    folder = staged(tmp_path, 1)
    unused.keep_beside(model, folder)
    folder = publish(folder)
    save_file({**{name: torch.zeros_like(t) for name, t in EXTRA.items()}, "weight": torch.ones(2)}, path)
    os.utime(path, ns=(1, 1))
    assert {tensor.path for tensor in unused.readable(model)} == {os.path.join(folder, unused.UNUSED_FILE)}
    os.remove(os.path.join(folder, unused.UNUSED_FILE))
    assert unused.readable(model) == []
    assert "written without them" in caplog.text
    assert "mtp." in caplog.text


def test_an_export_over_its_own_source_can_be_repeated(tmp_path):
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), **EXTRA}, file, {"format": "pt"})
    unused.remember(model, unused.find([str(file)], EXTRA))
    for _ in range(2):
        hub.export_model(model, str(tmp_path), 10**9)
        got = load_file(file)
        assert all(torch.equal(got[name], t) for name, t in EXTRA.items())
    for _ in range(2):
        names = hub.export_model(model, str(tmp_path), 30_000)
        got = {name: t for file in names for name, t in load_file(tmp_path / file).items()}
        assert all(torch.equal(got[name], t) for name, t in EXTRA.items())


def test_big_tensors_are_copied_in_chunks(model_and_file, tmp_path, monkeypatch):
    model, _ = model_and_file
    monkeypatch.setattr(unused, "CHUNK_BYTES", 7)
    unused.write(unused.readable(model), str(tmp_path / "out"))
    same(tmp_path / "out")


def test_a_model_without_a_known_release_adopts_what_a_checkpoint_holds(model_and_file, tmp_path):
    model, _ = model_and_file
    folder = staged(tmp_path, 1)
    unused.keep_beside(model, folder)
    other, dropping = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    unused.remember(dropping, [])
    for each in (other, dropping):
        unused.adopt(each, folder)
    assert sorted(tensor.name for tensor in unused.readable(other)) == sorted(EXTRA)
    assert unused.readable(dropping) == []
    again = staged(tmp_path, 2)
    unused.keep_beside(other, again)
    assert os.path.samefile(os.path.join(folder, unused.UNUSED_FILE), os.path.join(again, unused.UNUSED_FILE))


def test_names_that_the_model_writes_are_the_model_s(tmp_path):
    model = tiny_model("qwen3_moe")
    save_file({"model.norm.weight": torch.full((32,), 7.0), "mtp.a": torch.ones(2)}, tmp_path / "release")
    unused.remember(model, unused.find([str(tmp_path / "release")]))
    hub.export_model(model, str(tmp_path), 10**9)
    got = load_file(tmp_path / "model.safetensors")
    assert torch.equal(got["model.norm.weight"], model.model.norm.weight)
    assert torch.equal(got["mtp.a"], torch.ones(2))


def test_a_config_no_longer_claims_them():
    from transformers import DeepseekV3Config, Qwen3_5MoeConfig

    config = DeepseekV3Config(num_nextn_predict_layers=1)
    assert unused.mend_config(config)
    assert not [name for name in unused.CLAIMS if config.to_dict().get(name)]
    config = Qwen3_5MoeConfig(text_config={"mtp_num_hidden_layers": 1})
    assert unused.mend_config(config) == ["text_config.mtp_num_hidden_layers"]
    assert config.to_dict()["text_config"]["mtp_num_hidden_layers"] == 0
    assert unused.mend_config(config) == []


def test_keys_in_few_words():
    keys = ["mtp.fc.weight", "model.layers.9.a.0.b", "model.layers.9.c", "extra"]
    assert by_module(keys) == {"mtp.fc.weight": 1, "model.layers.9.*": 2, "extra": 1}


def test_drop_unused_tensors_is_a_setting_like_others(monkeypatch):
    unset = dict.fromkeys(PUBLIC_DEFAULTS)
    settings, _ = resolve_settings(unset)
    assert settings["drop_unused_tensors"].value is False
    monkeypatch.setenv(ENV_PREFIX + "DROP_UNUSED_TENSORS", "True")
    settings, _ = resolve_settings(unset)
    assert settings["drop_unused_tensors"].value is True
    settings, _ = resolve_settings({**unset, "drop_unused_tensors": False})
    assert settings["drop_unused_tensors"].value is False
    monkeypatch.setenv(ENV_PREFIX + "DROP_UNUSED_TENSORS", "perhaps")
    with pytest.raises(ValueError, match="must be true or false"):
        resolve_settings(unset)
    monkeypatch.delenv(ENV_PREFIX + "DROP_UNUSED_TENSORS")
    with pytest.raises(ValueError, match="drop_unused_tensors must be"):
        resolve_settings({**unset, "drop_unused_tensors": "no"})
