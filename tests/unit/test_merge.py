"""`hf-fsdpturbo merge`: file by file what PEFT's merge_and_unload saves; what it refuses, by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("peft")

from hf_fsdpturbo import cli
from hf_fsdpturbo.merge import merged_rows
from tests.families.tiny import tiny_config
from tests.support.adapter_runs import EXPERTS
from tests.support.tiny_models import VOCAB_SIZE, save_tiny, tiny_tokenizer

ATTENTION = ["q_proj", "v_proj"]
HEADS = ["embed_tokens", "lm_head"]
FEW = {"layers": 1, "num_experts": 4}
# name -> (family, model, LoraConfig, what else is done to the adapted model)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "per_expert_files": (
        "qwen3_moe",
        {"max_shard_size": "60KB"},
        {"target_modules": ATTENTION, "target_parameters": EXPERTS, "use_rslora": True, "rank_pattern": {"v_proj": 2},
         "alpha_pattern": {"layers.1.self_attn.q_proj": 3}},
        "",
    ),
    "w1_w2_w3": ("mixtral", FEW, {"target_parameters": EXPERTS}, ""),
    "transposed": ("gpt_oss", FEW, {"target_modules": ATTENTION, "target_parameters": EXPERTS}, ""),
    "linear_attention": ("qwen3_5_moe", FEW, {"target_modules": "all-linear"}, ""),
    "latent_attention": ("deepseek_v3", {"layers": 2}, {"target_modules": "all-linear"}, ""),
    "embeddings": ("qwen3_moe", FEW, {"target_modules": [*ATTENTION, *HEADS]}, ""),
    "head_saved_whole": ("qwen3_moe", FEW, {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]}, ""),
    "classifier": ("qwen3_moe", FEW, {"target_modules": ATTENTION, "task_type": "SEQ_CLS"}, ""),
    "larger_vocabulary": ("qwen3_moe", FEW, {"target_modules": ATTENTION}, "resize"),
    "larger_tied_vocabulary": ("qwen3_moe", {**FEW, "tie": True}, {"target_modules": ATTENTION}, "resize"),
}  # fmt: skip


def adapter_of(base: str, folder: Path, fields: dict[str, Any], also: str) -> dict[str, Tensor]:
    """Write a drawn adapter of plain PEFT into ``folder``; the tensors that its own merged model is saved with."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(3)
    more = {"num_labels": 3} if fields.get("task_type") else {}
    build = AutoModelForSequenceClassification if more else AutoModelForCausalLM
    model = build.from_pretrained(base, **more)
    if also == "resize":
        model.resize_token_embeddings(VOCAB_SIZE + 5)
    adapted: Any = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 8, **fields}))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
            elif also == "resize" and ("embed_tokens" in name or "lm_head" in name):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(folder, save_embedding_layers=True if also == "resize" else "auto")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    adapted.merge_and_unload().save_pretrained(folder / "merged")
    return tensors_of(folder / "merged")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def merge(*words: Any) -> int:
    return cli.main(["merge", *map(str, words)])


def differing(found: dict[str, Tensor], expected: dict[str, Tensor], before: dict[str, Tensor] | None) -> list[str]:
    """Names whose values differ; with ``before``, by more than one rounding of the update and one of the sum."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())[:6]
    odd = []
    for name, tensor in expected.items():
        step = torch.zeros(())
        if before is not None:
            step = tensor.abs().double()
            if name in before and before[name].shape == step.shape:
                step = step + before[name].abs()
            step = step * torch.finfo(found[name].dtype).eps
        if ((found[name].double() - tensor.double()).abs() > step).any():
            odd.append(name)
    return odd


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, "float32") for case in CASES]
    + [(case, "bfloat16") for case in ("per_expert_files", "transposed", "latent_attention")],
)
def test_equals_merge_and_unload(case: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Bit-equal in float32. In bfloat16 PEFT rounds the update of what `target_parameters` name before it is
    added, and the sum again; here the sum is rounded, once."""
    family, config, fields, also = CASES[case]
    base = save_tiny(family, tmp_path / "base", dtype=dtype, **config)
    expected = adapter_of(base, tmp_path / "adapter", fields, also)
    monkeypatch.setattr("hf_fsdpturbo.checkpoint.hub.CHUNK_BYTES", 1000)  # some rows at a time
    assert merge(tmp_path / "adapter", "--out", tmp_path / "out") == 0
    found, before = tensors_of(tmp_path / "out"), tensors_of(Path(base))
    others = differing(found, expected, None)
    print(f"{case} {dtype}: {len(others)} of {len(expected)} have other bits: {others[:3]}")
    of_parameters = [name for name in others if "experts" in name or name.endswith("mlp.gate.weight")]
    assert others == (of_parameters if dtype == "bfloat16" else [])
    assert not differing(found, expected, before)
    assert all(found[name].dtype == tensor.dtype for name, tensor in before.items() if name in found)
    unmerged = {n: before[n] if n in before and before[n].shape == t.shape else t for n, t in expected.items()}
    assert differing(found, unmerged, before), "nothing was merged"
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= there
    assert not {"adapter_config.json", "README.md"} & there
    ours, theirs = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "out", tmp_path / "adapter" / "merged")
    )
    for field in ("architectures", "vocab_size", "id2label", "dtype", "model_type", "tie_word_embeddings"):
        assert ours.get(field) == theirs.get(field), field


def test_the_expert_is_the_fastest_index_of_lora_b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The fault that no shape shows: lora_B read with the expert slowest."""
    family, config, fields, also = CASES["w1_w2_w3"]
    expected = adapter_of(save_tiny(family, tmp_path / "base", **config), tmp_path / "adapter", fields, also)
    right = merged_rows.to_expert_first

    def wrong(factor: str, weight: Tensor, num_experts: int) -> Tensor:
        if factor == "lora_A":
            return right(factor, weight, num_experts)
        return weight.reshape(weight.shape[0], num_experts, -1).permute(1, 0, 2)

    monkeypatch.setattr(merged_rows, "to_expert_first", wrong)
    assert merge(tmp_path / "adapter", "--out", tmp_path / "out") == 0
    before = tensors_of(tmp_path / "base")
    assert len(differing(tensors_of(tmp_path / "out"), expected, before)) == 12


def test_an_adapter_of_the_text_model_merges_into_the_whole_release(tmp_path: Path):
    """Trained with the text class on a vision-language release: the tower and the release's names stay."""
    import transformers
    from peft import LoraConfig, get_peft_model

    config = tiny_config(transformers.CONFIG_MAPPING["qwen3_5_moe"], "qwen3_5_moe")
    transformers.Qwen3_5MoeForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert type(text).__name__ == "Qwen3_5MoeForCausalLM"
    adapted: Any = get_peft_model(text, LoraConfig(r=4, target_modules=["in_proj_qkv"], target_parameters=EXPERTS))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert merge(tmp_path / "adapter", "--out", tmp_path / "out") == 0
    found, expected = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "merged")
    before = tensors_of(tmp_path / "base")
    assert found.keys() == before.keys()
    tower = {name for name in found if ".visual." in name}
    assert expected.keys() == found.keys() - tower
    assert all(torch.equal(found[name], (before if name in tower else expected)[name]) for name in found)


def test_hub_ids_are_those_of_the_cache(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Snapshots are links into ``blobs``; both the adapter and the base that it names are found there."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    own = json.loads((pair / "adapter" / "adapter_config.json").read_text())
    for name in ("adapter", "base"):
        repository = tmp_path / f"models--some--{name}"
        snapshot, blobs = repository / "snapshots" / "1234", repository / "blobs"
        for folder in (snapshot, blobs, repository / "refs"):
            folder.mkdir(parents=True)
        (repository / "refs" / "main").write_text("1234")
        for file in (pair / name).iterdir():
            if file.is_file():
                blob = blobs / f"blob-{file.name}"
                blob.write_bytes(file.read_bytes())
                if file.name == "adapter_config.json":
                    blob.write_text(json.dumps({**own, "base_model_name_or_path": "some/base"}))
                (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    assert merge("some/adapter", "--out", tmp_path / "out") == 0
    assert merge(pair / "adapter", "--out", tmp_path / "plain") == 0
    assert differing(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "plain"), None) == []
    (tmp_path / "models--some--base" / "snapshots" / "1234" / "config.json").unlink()
    (tmp_path / "models--some--base" / "snapshots" / "1234" / "config.json").symlink_to("/etc/hostname")
    with pytest.raises(SystemExit):
        merge("some/adapter", "--out", tmp_path / "other")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tied base, an adapter of it, and what they say."""
    folder = tmp_path_factory.mktemp("pair")
    adapter_of(
        save_tiny("qwen3_moe", folder / "base", tie=True, **FEW), folder / "adapter", {"target_modules": ATTENTION}, ""
    )
    return folder


FIELDS = {
    "use_dora": True, "bias": "all", "lora_bias": True, "init_lora_weights": "pissa", "peft_type": "LOHA",
    "task_type": "QUESTION_ANS", "trainable_token_indices": [1], "layer_replication": [[0, 1]],
    "target_parameters": ["mlp.experts.gate_proj"],
}  # fmt: skip


def refused(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as status:
        merge(*words)
    said = capsys.readouterr().err.strip()
    assert status.value.code == 2
    assert said.startswith("hf-fsdpturbo merge: error: ")
    assert said.count("\n") == 0, said
    return said.removeprefix("hf-fsdpturbo merge: error: ")


def copied(pair: Path, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> Path:
    """The pair's adapter with other fields, or other tensors."""
    folder.mkdir()
    own = json.loads((pair / "adapter" / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**own, **config}))
    save_file(
        tensors or load_file(pair / "adapter" / "adapter_model.safetensors"), folder / "adapter_model.safetensors"
    )
    return folder


@pytest.mark.parametrize("field", FIELDS)
def test_what_is_not_merged_is_refused_by_its_field(pair: Path, field: str, tmp_path: Path, capsys: Any):
    adapter = copied(pair, tmp_path / "adapter", {field: FIELDS[field]})
    said = refused(capsys, adapter, "--out", tmp_path / "out")
    assert said.startswith("ADAPTER")
    assert field in said
    assert not (tmp_path / "out").exists()


def test_wrong_folders_and_bases(pair: Path, tmp_path: Path, capsys: Any):
    out = ("--out", tmp_path / "out")
    assert refused(capsys, "nowhere", *out).startswith("ADAPTER 'nowhere' is no folder, nor")
    assert "without adapter_config.json" in refused(capsys, pair / "base", *out)
    assert refused(capsys, pair / "adapter", "--out", pair).startswith("--out")
    assert "is needed" not in refused(capsys, pair / "adapter", *out, "--base", "no/model")
    nameless = copied(pair, tmp_path / "nameless", {"base_model_name_or_path": None})
    assert refused(capsys, nameless, *out).startswith("--base is needed")
    lost = copied(pair, tmp_path / "lost", {"base_model_name_or_path": "no/model"})
    assert "'no/model'" in refused(capsys, lost, *out)
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    own = json.loads((pair / "base" / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**own, "quantization_config": {"quant_method": "gptq"}}))
    assert "quant_method='gptq', which is not supported" in refused(capsys, lost, *out, "--base", quantised)
    other = save_tiny("gpt_oss", tmp_path / "other", layers=1, hidden_size=48)
    assert "has shape" in refused(capsys, pair / "adapter", *out, "--base", other)
    deeper = save_tiny("qwen3_moe", tmp_path / "deeper", layers=2, num_experts=4)
    assert "lacks base_model" in refused(capsys, pair / "adapter", *out, "--base", deeper)
    assert not (tmp_path / "out").exists()


def test_tensors_that_do_not_fit_and_tied_weights(pair: Path, tmp_path: Path, capsys: Any):
    out = ("--out", tmp_path / "out")
    tensors = load_file(pair / "adapter" / "adapter_model.safetensors")
    first = min(tensors)
    lacking = {key: tensor for key, tensor in tensors.items() if key != first}
    assert f"lacks {first}" in refused(capsys, copied(pair, tmp_path / "a", {}, lacking), *out)
    more = {**tensors, first.replace("q_proj", "k_proj"): tensors[first].clone()}
    assert "have no place" in refused(capsys, copied(pair, tmp_path / "b", {}, more), *out)
    strong = copied(pair, tmp_path / "c", {"r": 8})
    assert "(4, 32), but" in refused(capsys, strong, *out)
    head = {**tensors, "base_model.model.lm_head.weight": torch.ones(VOCAB_SIZE, 32)}
    tied = copied(pair, tmp_path / "d", {"modules_to_save": ["lm_head"]}, head)
    assert "tie_word_embeddings" in refused(capsys, tied, *out)
    assert not os.path.exists(tmp_path / "out")
