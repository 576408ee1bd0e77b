"""Files of others, judged before anything is made of them: names, links, numbers of experts, values of a config."""

from __future__ import annotations

import json
import os
from functools import partial
from types import SimpleNamespace

import pytest

from hf_fsdpturbo.checkpoint import commit
from hf_fsdpturbo.checkpoint.inside import check_links, own_folder, path_inside
from hf_fsdpturbo.checkpoint.state_file import check_state
from hf_fsdpturbo.loading import files
from hf_fsdpturbo.loading.config_values import asks_for_much, check_counts, check_dtypes, check_values
from hf_fsdpturbo.loading.expert_numbers import check_expert_numbers
from hf_fsdpturbo.loading.files import base_of_adapter, refuse_impossible, refuse_trusted_base, safetensors_header
from hf_fsdpturbo.trainer.given_models import GivenModels
from hf_fsdpturbo.trainer.rows import TokensInRange


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", "a\0b", "a//b", "..\\x", "a\nb"])
def test_names_that_lead_out(tmp_path, name: str):
    with pytest.raises(ValueError, match="plain names inside its folder") as caught:
        path_inside(str(tmp_path), name, "the index")
    assert "the index" in str(caught.value)


def test_links_that_lead_out_and_those_of_the_hub(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (blobs / "1").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    (snapshot / "notes.md").symlink_to("/etc/hostname")
    (snapshot / "inner").mkdir()
    (snapshot / "inner" / "config.json").symlink_to("../../../blobs/1")
    check_links(str(snapshot))
    check_links(str(snapshot / "inner"))  # from_pretrained's subfolder
    (tmp_path / "elsewhere").write_text("{}")
    (snapshot / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="outside its folder"):
        check_links(str(snapshot))
    with pytest.raises(ValueError, match="outside its folder"):
        path_inside(str(snapshot), "model.safetensors", "the index")
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "a.json").symlink_to(blobs / "1")
    with pytest.raises(ValueError, match="outside its folder"):
        check_links(str(plain))


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "chat_template.jinja", "optimizer.pt"])
def test_what_would_be_read_for_ever_is_refused(tmp_path, name):
    """A pipe waits for a writer, a device never ends, a link may lead to itself: named before anybody opens it."""
    for kind, said in (("pipe", "is a pipe or a device"), ("device", "is a pipe or a device"), ("loop", "symbolic")):
        folder = tmp_path / kind
        folder.mkdir()
        path = folder / name
        os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero" if kind == "device" else name)
        for look in (check_links, partial(refuse_impossible, from_pretrained_kwargs={})):
            with pytest.raises(ValueError, match=said) as caught:
                look(str(folder))
            assert name in str(caught.value)
    (tmp_path / "gone.json").symlink_to("nowhere")
    os.mkfifo(tmp_path / "my.pipe")  # nobody reads a file of such a name
    check_links(str(tmp_path))


@pytest.mark.parametrize("content", [b"[]", b"\0" * 9, b"\xff\xfe", b"[" * 5000, b'{"a":' * 5000])
def test_small_files_are_mappings(tmp_path, content):
    """Transformers' own errors (RecursionError, AttributeError, JSONDecodeError) name no file."""
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        refuse_impossible(str(tmp_path), {})


@pytest.mark.parametrize("inner", ["", "inner"])
def test_a_folder_is_looked_at_once(tmp_path, monkeypatch, inner):
    """Every rank looks at its start; the folder itself before the config in it, or in a subfolder, is sought."""
    (tmp_path / inner).mkdir(exist_ok=True)
    (tmp_path / inner / "config.json").write_text("{}")
    looked = []

    def noted(name, own, path, *more):
        looked.append((name, path))
        return own(path, *more)

    for name in ("check_links", "check_small_files", "config_folder"):
        monkeypatch.setattr(files, name, partial(noted, name, getattr(files, name)))
    for given in (str(tmp_path), f"{tmp_path}/"):
        looked.clear()
        refuse_impossible(given, {"subfolder": inner})
        places = [os.path.realpath(place) for _, place in looked]
        whole, part = str(tmp_path), str(tmp_path / inner)
        wanted = [("check_links", whole), ("config_folder", whole), ("check_small_files", whole)]
        wanted += [("check_links", part), ("check_small_files", part)] if inner else []
        assert [(name, place) for (name, _), place in zip(looked, places, strict=True)] == wanted


def test_staging_is_no_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / commit.STAGING).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link"):
        commit.open_staging(str(tmp_path / "run"), "checkpoint-1")
    with pytest.raises(ValueError, match="is a link"):
        own_folder(str(tmp_path / "run" / commit.STAGING))
    with pytest.raises(ValueError, match="is a link"):
        commit.staging_dir(str(tmp_path / "run"), "1a2b3c4d")
    assert os.listdir(tmp_path / "elsewhere") == []


KEY = "model.layers.0.mlp.experts.{}.up_proj.weight"


@pytest.mark.parametrize("numbers", [[0, 9, 2], [0, 1, 1], [0, 1, -3], [0, 1, "02"], [1, 2, 3], [0, 1, 999999999]])
def test_expert_numbers_are_0_to_the_last_once_each(numbers):
    sources = [("f", KEY.format(number)) for number in numbers]
    with pytest.raises(ValueError, match="numbered 0 to 2") as caught:
        check_expert_numbers("up", r"mlp\.experts.*.up_proj.weight$", sources)
    assert "f: model.layers.0" in str(caught.value)


@pytest.mark.parametrize("other", ["mlp/experts.1.up_proj.weight", "mlpnexperts.1.up_proj.weight"])
def test_a_key_whose_dot_was_changed_is_seen(other):
    """Transformers' pattern takes it, and stacks it where its key is sorted to: another expert's place."""
    sources = [("f", KEY.format(0)), ("f", KEY.format(2)), ("f", KEY.partition("mlp")[0] + other)]
    with pytest.raises(ValueError, match="begin with") as caught:
        check_expert_numbers("up", r"mlp.experts.*.up_proj.weight$", sources)
    assert other in str(caught.value)


def test_right_expert_numbers_in_any_order():
    check_expert_numbers("up", "experts.*.up_proj.weight", [("f", KEY.format(n)) for n in (2, 0, 1)])


HEADERS = {"f": {"a.weight": {"dtype": "BF16", "shape": [8, 4]}, "b.weight": {"dtype": "BF16", "shape": []}}}


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"text_config": {"num_hidden_layers": 3}}, "text_config.num_hidden_layers=3"),
        ({"num_experts": 9}, "num_experts=9"),
        ({"num_hidden_layers": -1}, "negative"),
    ],
)
def test_counts_that_no_file_bears_out(config, word: str):
    with pytest.raises(ValueError, match=r"^config\.json: ") as caught:
        check_counts("config.json", config, HEADERS)
    assert word in str(caught.value)


def test_counts_that_files_bear_out():
    config = {"num_hidden_layers": 2, "num_experts": 8, "vision": {"depth": 1}}
    check_counts("c", config, HEADERS)
    assert not asks_for_much(config)
    assert asks_for_much({"text_config": {"num_hidden_layers": 1000}})


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN"),
        ({"a": {"layer_norm_eps": -1.0}}, "a.layer_norm_eps"),
        ({"attention_dropout": 1e9}, "attention_dropout"),
        ({"num_experts_per_tok": 9, "num_experts": 8}, "at most the number of experts, 8"),
    ],
)
def test_values_that_spoil_all_results(config, word: str):
    with pytest.raises(ValueError, match=word):
        check_values("the config", config)


def test_defaults_of_families_have_good_values():
    from transformers import CONFIG_MAPPING

    for kind in ("qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral", "bamba", "t5", "doge", "gpt2"):
        check_values(kind, CONFIG_MAPPING[kind]().to_dict())


@pytest.mark.parametrize("dtype", ["I8", "U8", "F8_E4M3", "I64"])
def test_coded_weights_that_nothing_explains(dtype: str):
    headers = {"f": {"a.weight": {"dtype": dtype, "shape": [8, 4]}}}
    with pytest.raises(ValueError, match=f"a.weight has dtype {dtype}"):
        check_dtypes("d", {"quantization_config": None}, headers, {"a.weight"})
    check_dtypes("d", {}, headers, set())  # carried, not used
    check_dtypes("d", {"quantization_config": {}}, headers, {"a.weight"})
    check_dtypes("d", {}, {"f": {"a.position_ids": {"dtype": "I64", "shape": [1, 8]}}}, {"a.position_ids"})


HEADER_TEXTS = [b"[]", b'{"a": {}}', b'{"a": []}', b'{"a": {"dtype": ["F32"]}}', b"[" * 5000, b"{}"]


@pytest.mark.parametrize("header", HEADER_TEXTS)
def test_headers_that_are_none(tmp_path, header: bytes):
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    if header == b"{}":
        assert safetensors_header(str(path)) == {}
        return
    with pytest.raises(ValueError, match="m.safetensors"):
        safetensors_header(str(path))


def test_an_adapter_brings_its_base_and_no_trust(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    assert base_of_adapter(str(tmp_path)) == "org/base"
    refuse_trusted_base(str(tmp_path), False)
    with pytest.raises(ValueError, match="trust_remote_code"):
        refuse_trusted_base(str(tmp_path), True)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match="adapter_config.json names no"):
        base_of_adapter(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert base_of_adapter(str(tmp_path)) == str(tmp_path)
    with pytest.raises(ValueError, match="its code is not run"):
        refuse_trusted_base(str(tmp_path), True, "org/base")


@pytest.mark.parametrize("beside", [(), ("config.json",)])
def test_training_goes_on_from_an_adapter_without_trust_in_its_base(tmp_path, beside):
    pytest.importorskip("peft").LoraConfig(base_model_name_or_path="org/base").save_pretrained(tmp_path)
    for name in beside:
        (tmp_path / name).write_text("{}")
    for config in ({"trust_remote_code": True}, {"model_init_kwargs": {"trust_remote_code": True}}):
        models = GivenModels(type, {}, SimpleNamespace(**config), None, None)
        with pytest.raises(ValueError, match="names the base 'org/base': its code is not run"):
            models._load_adapter(str(tmp_path))


STATE = {"global_step": 3, "max_steps": 4, "epoch": 0.5, "log_history": [{"loss": 1.0}], "best_metric": None}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"global_step": 10**9}, "global_step=1000000000"),
        ({"global_step": "3"}, "global_step='3'"),
        ({"globam_step": 3}, "globam_step"),
        ({"log_history": 5}, "log_history=5"),
        ({"epoch": float("nan")}, "epoch=nan"),
        ({"max_steps": 2}, "more than max_steps"),
        ({"logging_steps": 0}, "logging_steps=0"),
        ({"save_steps": None}, "save_steps=None"),
    ],
)
def test_a_trainer_state_that_is_not_the_checkpoints(tmp_path, change, word: str):
    folder = tmp_path / "checkpoint-3"
    args = SimpleNamespace(logging_strategy="steps", eval_strategy="no", save_strategy="steps")
    folder.mkdir()
    check_state(str(folder), args)
    (folder / "trainer_state.json").write_text(json.dumps(STATE))
    check_state(str(folder), args)
    (folder / "trainer_state.json").write_text(json.dumps({**STATE, **change}))
    with pytest.raises(ValueError, match="trainer_state.json") as caught:
        check_state(str(folder), args)
    assert word in str(caught.value)


def test_token_ids_that_the_model_has_no_row_for():
    import torch

    def batch(**tensors):
        return lambda features: {name: torch.tensor(value) for name, value in tensors.items()}

    good = {"input_ids": [[0, 7]], "labels": [[-100, 7]], "weights": [[99, 99]]}
    assert TokensInRange(batch(**good), 8)([])["input_ids"].tolist() == [[0, 7]]
    for bad in ({"input_ids": [[0, 1], [8, 1]]}, {"chosen_input_ids": [[-1]]}, {"labels": [[-7]]}, {"labels": [[8]]}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            TokensInRange(batch(**bad), 8)([])


def test_marker_and_topology_that_hold_nothing(tmp_path):
    from hf_fsdpturbo.checkpoint import facts, intact

    (tmp_path / commit.COMPLETE).write_text("[]")
    with pytest.raises(ValueError, match=commit.COMPLETE):
        intact.check(str(tmp_path))
    for content in ("[]", "{}", '{"format": 1}'):
        (tmp_path / facts.TOPOLOGY_JSON).write_text(content)
        with pytest.raises(ValueError, match="is damaged"):
            facts.read(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda c: c["groups"][0].pop("weight_decay"), "lacks weight_decay"),
        (lambda c: c["groups"][0].update(lr="1"), "lr='1'"),
        (lambda c: c["groups"][0].update(betas=[0.9]), "betas"),
        (lambda c: c["groups"][0].update(eps=float("nan")), "eps=nan"),
        (lambda c: c["groups"][0].update(params=None), "no groups"),
        (lambda c: c.pop("plain_state"), "plain_state"),
        (lambda c: c.update({"class": 5}), "no optimizer class"),
    ],
)
def test_hyperparameters_that_no_step_would_take(tmp_path, change, word: str):
    import torch

    from hf_fsdpturbo.checkpoint.optimizer_file import check_optimizer_file

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    group = {**optimizer.param_groups[0], "params": ["a"], "initial_lr": 0.1}
    content = {"class": "AdamW", "groups": [group], "plain_state": {}}
    path = tmp_path / "optimizer.json"
    path.write_text(json.dumps(content))
    check_optimizer_file(str(path), optimizer)
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="optimizer.json") as caught:
        check_optimizer_file(str(path), optimizer)
    assert word in str(caught.value)


def test_export_builds_model_classes_only():
    from hf_fsdpturbo.export import _model_class

    for name in ("pipeline", "Trainer", "AutoConfig", "__name__", 5, None):
        with pytest.raises(ValueError, match="topology.json names the model class"):
            _model_class(name, None, False)
    assert _model_class("Qwen3MoeForCausalLM", None, False).__name__ == "Qwen3MoeForCausalLM"
