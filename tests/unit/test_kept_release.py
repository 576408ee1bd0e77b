"""Stacks of an MXFP4 release that stay packed: Transformers' own values, what is held, what is seen if wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("peft")

from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hf_fsdpturbo.loading.seam import load_whole
from hf_fsdpturbo.parallelize.adapter_of_load import Adapter
from hf_fsdpturbo.parallelize.quantise import kept_of
from hf_fsdpturbo.quantised import mxfp4
from hf_fsdpturbo.quantised.kept_release import Kept
from hf_fsdpturbo.quantised.methods import PackedAs
from hf_fsdpturbo.quantised.packed_weight import packed_weight
from hf_fsdpturbo.quantised.released_weight import ReleasedWeight
from tests.support import packed_releases
from tests.support.adapter_runs import lora
from tests.support.tiny_models import save_tiny

CPU = torch.device("cpu")
MXFP4 = PackedAs("mxfp4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at_once", [2**20, 2**8, 1])
def test_values_have_the_bits_of_transformers(dtype, at_once, monkeypatch):
    """Of every byte and every scale but 255, which is not a number; a few rows at a time, or all matrices at once."""
    monkeypatch.setattr(mxfp4, "AT_ONCE", at_once)
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (3, 8, 4, 16), dtype=torch.uint8, generator=draw)
    scales = torch.randint(255, (3, 8, 4), dtype=torch.uint8, generator=draw)
    out = torch.empty(3, 128, 8, dtype=dtype)
    mxfp4.unpack_(out, codes, scales)
    assert torch.equal(out, convert_moe_packed_tensors(codes, scales, dtype=dtype))


def loaded(folder: str, dtype: torch.dtype) -> tuple[nn.Module, Kept]:
    """The model with an adapter in one process."""
    kept = Kept(CPU)
    adapter = Adapter(lora(), filling=kept)
    build = AutoModelForCausalLM.from_pretrained
    model = load_whole(folder, build, prepare=adapter.alone, know=kept.know, dtype=dtype)
    return adapter.finish(model, CPU), kept


def test_what_is_loaded_is_packed_and_a_wrong_byte_is_seen(tmp_path, capsys):
    """Stacks of one layer in full, of the other packed, as ``modules_to_not_convert`` allows."""
    folder = packed_releases.mxfp4(save_tiny("gpt_oss", tmp_path, hidden_size=64, intermediate_size=96))
    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    ).state_dict()
    model, kept = loaded(folder, torch.bfloat16)
    base = model.get_base_model()
    names = [
        f"model.layers.{layer}.mlp.experts.{stack}" for layer in (0, 1) for stack in ("gate_up_proj", "down_proj")
    ]
    assert sorted(kept.weights) == sorted(names)
    assert "dequantised" not in capsys.readouterr().out
    inside = {name: name.replace("experts.", "experts.base_layer.base_layer.") for name in names}
    for name in names:
        weight = packed_weight(base, inside[name])
        assert isinstance(weight, ReleasedWeight)
        assert torch.equal(weight.values(), plain[name])
        assert torch.equal(weight.values(torch.float32), plain[name].float())
        elements = plain[name].numel()
        assert (weight.bytes_held(), weight.bytes_in_full()) == (elements * 17 // 32, elements * 2)
        assert weight.is_near(plain[name], (slice(0, 8), slice(None), slice(None)))
        assert weight.is_near(plain[name][3:4, 33:40, 5:7], (slice(3, 4), slice(33, 40), slice(5, 7)))
    held = {p.dtype for name, p in base.named_parameters() if "experts" in name and p.ndim > 2}
    assert held == {torch.uint8}
    everything = (slice(None),) * 3
    codes, scales = weight._parameter(), weight._own_exponents()
    for part, wrong in ((codes, codes >> 4 | codes << 4), (scales, scales.roll(1, 0)), (scales, scales.roll(1, 2))):
        right = part.detach().clone()
        part.data.copy_(wrong)  # halves swapped; the scales of the next expert, of the next group
        assert not weight.is_near(plain[name], everything)
        part.data.copy_(right)
    assert weight.is_near(plain[name], everything)
    assert "GiB saved" in str(kept)


def test_what_the_release_has_in_full_or_in_another_shape_is_not_chosen():
    from tests.support.tiny_models import tiny_model

    model, kept = tiny_model("gpt_oss", hidden_size=64, intermediate_size=96), Kept(CPU)
    shapes = {"model.layers.1.mlp.experts.down_proj": (8, 96, 64), "model.layers.0.mlp.experts.down_proj": (8, 64, 64)}
    kept.know({name: SimpleNamespace(is_transposed=True, full_shape=shape) for name, shape in shapes.items()})
    kept.choose(model, {f"model.layers.{n}.mlp.experts": ("gate_up_proj", "down_proj") for n in (0, 1)})
    assert list(kept.choice) == ["model.layers.1.mlp.experts.down_proj"]


def test_when_they_stay_packed():
    def config(**changes: object) -> SimpleNamespace:
        params = {"dcp_path": None, "offload_params": False, "ep_backend": "torch", **changes}
        init = SimpleNamespace(name=params.pop("init_config", "init_on_meta"))
        return SimpleNamespace(fsdpturbo_params=SimpleNamespace(**params), init_params=init, device=CPU)

    assert kept_of(None, None, config()) == kept_of(PackedAs("fp8"), None, config()) == (None, [])
    assert kept_of(MXFP4, {"quant_method": "mxfp4", "dequantize": True}, config()) == (None, [])
    kept, notes = kept_of(MXFP4, None, config())
    assert isinstance(kept, Kept)
    assert notes == []
    for field, value in (("offload_params", True), ("init_config", "init_on_rank0"), ("ep_backend", "fsdp_turbo")):
        kept, notes = kept_of(MXFP4, None, config(**{field: value}))
        assert kept is None
        assert notes == [f"experts in MXFP4 are dequantised: {field}={value!r} does not take packed weights"]
