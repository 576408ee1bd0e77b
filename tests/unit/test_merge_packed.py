"""`hf-fsdpturbo merge` onto releases in MXFP4 and FP8, and into what 4 bits leave of a base: the bits of PEFT's
merge_and_unload on the same dequantised weights."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from hf_fsdpturbo.merge.four_bit_base import through_four_bits
from hf_fsdpturbo.quantised.asked import FourBit
from tests.support import packed_releases
from tests.support.adapter_runs import EXPERTS
from tests.support.packed_runs import SIZES, dequantised, save_dequantised
from tests.support.tiny_models import save_tiny
from tests.unit.test_merge import ATTENTION, adapter_of, differing, merge, refused, tensors_of

LORA = {"target_modules": ATTENTION, "target_parameters": EXPERTS}
FEW = {"layers": 1, "num_experts": 4}
GPT_OSS = {**FEW, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
QWEN = {**FEW, **{name: size for name, size in SIZES.items() if name != "kind"}}
NESTED = ["--bnb_4bit_quant_type", "fp4", "--use_bnb_nested_quant"]
# name -> (family, model, how it is packed, LoraConfig, words, (quant type, nested) or None, dtype)
CASES: dict[str, tuple[str, dict, dict | None, dict, list[str], tuple[str, bool] | None, str]] = {
    "mxfp4": ("gpt_oss", GPT_OSS, {}, LORA, [], None, "float32"),
    "mxfp4_bf16": ("gpt_oss", GPT_OSS, {}, LORA, [], None, "bfloat16"),
    "fp8": ("qwen3_moe", FEW, {"block": (8, 32)}, LORA, [], None, "float32"),
    "fp8_latent": ("deepseek_v3", {"layers": 2}, {"scale_fmt": "ue8m0"}, {"target_modules": "all-linear"}, [], None,
                   "float32"),
    "nf4": ("qwen3_moe", QWEN, None, LORA, ["--load_in_4bit"], ("nf4", False), "float32"),
    "nf4_bf16": ("qwen3_moe", QWEN, None, LORA, ["--load_in_4bit"], ("nf4", False), "bfloat16"),
    "fp4_nested": ("qwen3_moe", QWEN, None, LORA, ["--load_in_4bit", *NESTED], ("fp4", True), "float32"),
    "nf4_on_mxfp4": ("gpt_oss", GPT_OSS, {}, LORA, ["--load_in_4bit"], ("nf4", False), "bfloat16"),
    "nested_on_fp8": ("qwen3_moe", QWEN, {"block": (8, 32)}, LORA, ["--load_in_4bit", *NESTED], ("fp4", True),
                      "float32"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_equals_merge_and_unload_on_the_dequantised_base(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Bit-equal in float32. In bfloat16 what `target_parameters` name differs as on a base in full: PEFT rounds the
    update before it adds it."""
    family, config, packing, fields, words, bits, dtype = CASES[case]
    base = plain = save_tiny(family, tmp_path / "base", dtype=dtype, **config)
    if packing is not None:
        packed_releases.mxfp4(base) if family == "gpt_oss" else packed_releases.float8(base, **packing)
        plain = packed_releases.in_full(base, str(tmp_path / "plain"), dtype)
    if bits is not None:
        plain = save_dequantised(plain, str(tmp_path / "bits"), *bits, dtype=dtype)
    merged = adapter_of(plain, tmp_path / "adapter", fields, "")
    monkeypatch.setattr("hf_fsdpturbo.checkpoint.hub.CHUNK_BYTES", 1000)  # some rows at a time
    assert merge(tmp_path / "adapter", "--out", tmp_path / "out", "--base", base, *words) == 0
    found, before = tensors_of(tmp_path / "out"), tensors_of(Path(plain))
    released = tensors_of(Path(base))
    dtypes = {name: released[name].dtype if name in released else getattr(torch, dtype) for name in found}
    dtypes |= {name: getattr(torch, dtype) for name, kind in dtypes.items() if kind.itemsize == 1}
    assert {name: tensor.dtype for name, tensor in found.items()} == dtypes
    expected = {name: tensor.to(dtypes[name]) for name, tensor in merged.items()}
    others = differing(found, expected, None)
    of_parameters = [name for name in others if "experts" in name]
    assert others == (of_parameters if dtype == "bfloat16" else [])
    assert not differing(found, expected, before)
    assert differing(found, before, before), "nothing was merged"
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in written
    assert written["architectures"] == json.loads(Path(base, "config.json").read_text())["architectures"]
    if bits is not None:  # and not the released weights
        assert merge(tmp_path / "adapter", "--out", tmp_path / "released", "--base", base) == 0
        changed = set(differing(tensors_of(tmp_path / "released"), found, None))
        kept = ("embed", "lm_head", "norm", ".gate.weight", "router", "bias", "sinks")
        assert changed == {name for name in found if not any(part in name for part in kept)}


@pytest.mark.parametrize("nested", [False, True])
def test_each_matrix_of_a_stack_is_quantised_by_itself(nested: bool):
    """As bitsandbytes does it: double quantisation takes off the mean of one matrix, whatever lies beside it."""
    weight_EIO = torch.randn(3, 128, 64, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    weight_EIO = weight_EIO * torch.tensor([1.0, 5.0, 0.1]).view(3, 1, 1)
    assert torch.equal(
        through_four_bits(weight_EIO, FourBit("nf4", nested)), dequantised(weight_EIO.contiguous(), "nf4", nested)
    )


class LiveBytes(TorchDispatchMode):
    """The most bytes of storages on the CPU that were alive at once, files that are mapped left out."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage.filename is None:
                    self.alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return result


@pytest.mark.parametrize("words", [[], ["--load_in_4bit"]])
def test_a_few_rows_of_one_expert_are_in_memory(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An expert in float32 is 256 KB here, all of the model 28 MB; PEFT's whole update of a matrix is beside it."""
    sizes = {"layers": 2, "num_experts": 16, "hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 16}
    base = packed_releases.float8(save_tiny("qwen3_moe", tmp_path / "base", **sizes), block=(64, 64))
    adapter_of(packed_releases.in_full(base, str(tmp_path / "plain"), "float32"), tmp_path / "adapter", LORA, "")
    monkeypatch.setattr("hf_fsdpturbo.checkpoint.hub.CHUNK_BYTES", 2**18)
    gc.collect()
    with LiveBytes() as counted:
        assert merge(tmp_path / "adapter", "--out", tmp_path / "out", "--base", base, *words) == 0
    expert, whole = 4 * 2 * 256 * 256, sum(tensor.nbytes for tensor in tensors_of(tmp_path / "out").values())
    print(f"at most {counted.most:,} bytes, an expert {expert:,}, the model {whole:,}")
    assert whole > 20 * expert
    assert counted.most < 8 * expert


def test_bad_packed_bases_and_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base = save_tiny("qwen3_moe", tmp_path / "base", **FEW)
    adapter_of(base, tmp_path / "adapter", {"target_modules": ATTENTION}, "")
    words = (tmp_path / "adapter", "--out", tmp_path / "out")
    assert "--bnb_4bit_quant_type is for --load_in_4bit" in refused(capsys, *words, "--bnb_4bit_quant_type", "nf4")
    assert "invalid choice: 'int4'" in refused(capsys, *words, "--load_in_4bit", "--bnb_4bit_quant_type", "int4")
    assert "rows of 32 elements, which are not whole blocks of 64" in refused(capsys, *words, "--load_in_4bit")
    packed_releases.float8(base)
    file = next(Path(base).glob("*-00002-of-*"))
    scales = load_file(file)
    gone = next(name for name in scales if ".experts.2.up_proj" in name)
    index = Path(base, "model.safetensors.index.json")
    content = json.loads(index.read_text())
    del content["weight_map"][gone]
    index.write_text(json.dumps(content))
    save_file({name: tensor for name, tensor in scales.items() if name != gone}, file, {"format": "pt"})
    assert f"and no scales: there is no {gone}" in refused(capsys, *words)
    config = json.loads(Path(base, "config.json").read_text())
    for method, expected in (
        ("bitsandbytes", "Give the release that they were made of, with --load_in_4bit"),
        ("gptq", "quant_method='gptq', which is not supported"),
        ("mxfp4", "has dtype F8_E4M3, which has no values of its own"),
    ):
        config["quantization_config"] = {"quant_method": method}
        Path(base, "config.json").write_text(json.dumps(config))
        assert expected in refused(capsys, *words), method
    assert not (tmp_path / "out").exists()
