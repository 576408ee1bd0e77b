"""Weights in 4 bits: bitsandbytes' own numbers, one step against the dequantised weights, what is held and when."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_fsdpturbo.dispatch.recompute import install_routing_tape
from hf_fsdpturbo.loading.seam import load_whole
from hf_fsdpturbo.model_spec import find_experts
from hf_fsdpturbo.parallelize.adapter_of_load import Adapter
from hf_fsdpturbo.parallelize.quantise import choose_weights
from hf_fsdpturbo.quantised import fleeting
from hf_fsdpturbo.quantised.asked import FourBit, asked_for, take
from hf_fsdpturbo.quantised.filling import Filling, reading
from hf_fsdpturbo.quantised.packed_weight import PackedWeight, packed_weight
from tests.support.adapter_runs import lora
from tests.support.compare import TOLERANCE, distance
from tests.support.packed_runs import SIZES, adapted, dequantised, four_bits, small_model, step

CPU = torch.device("cpu")


@pytest.mark.parametrize("bits", [FourBit(), FourBit("fp4"), FourBit(nested=True)], ids=str)
@pytest.mark.parametrize("shape", [(96, 128), (3, 40, 192)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_values_are_those_of_bitsandbytes(bits, shape, dtype):
    """Bit for bit, each matrix of a stack by itself; rounded to the stored dtype on the way to a wider one."""
    module = nn.Module()
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.arange(1, shape[-2] + 1)[:, None]
    weight = weight.to(dtype)
    module.weight = nn.Parameter(weight.clone(), requires_grad=False)
    packed = PackedWeight(module, "weight", bits, CPU)
    packed.settle()
    expected = dequantised(weight, bits.quant_type, bits.nested)
    assert torch.equal(packed.values(), expected)
    assert torch.equal(packed.values(torch.float32), expected.float())
    assert packed.is_near(weight.float(), tuple(slice(None) for _ in shape)) or bits.nested
    assert not packed.is_near(weight.float().roll(1, -2), tuple(slice(None) for _ in shape))
    elements = weight.numel()
    assert packed.bytes_held() <= elements * (0.52 if bits.nested else 9 / 16) + 64 * 3 * bits.nested * 16
    assert packed.bytes_in_full() == elements * dtype.itemsize


class Alive:
    """Bytes of weights in full that are alive, whoever holds them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[StorageWeakRef] = []
        make = fleeting.Fleeting.make

        def counted(call, *args):
            weight = make(call, *args)
            self.made.append(StorageWeakRef(weight.untyped_storage()))
            return weight

        monkeypatch.setattr(fleeting.Fleeting, "make", counted)

    def __call__(self) -> int:
        storages = (torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in self.made)
        return sum(storage.nbytes() for storage in storages if storage is not None)


@pytest.mark.parametrize("dispatcher", ["fused", "eager", "auto"])
@pytest.mark.parametrize("recompute", ["none", "with tape", "without tape"])
def test_a_step_equals_stock_peft_on_dequantised_weights(dispatcher, recompute, monkeypatch):
    """Loss and gradients; and no weight in full is alive between forward and backward, or after."""
    alive, found = Alive(monkeypatch), []
    ours, plain = adapted(small_model(), True, dispatcher), adapted(small_model(), False)
    if recompute != "none":
        base = ours.get_base_model()
        if recompute == "with tape":
            install_routing_tape(base, tuple(find_experts(base, 1)))
        ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = step(plain)
    for _ in range(2):
        gradients = step(ours, lambda: found.append(alive()))
        found.append(alive())
        assert set(gradients) == set(expected)
        assert max(distance(gradients[name], tensor) for name, tensor in expected.items()) < TOLERANCE
    assert found == [0] * 4
    assert len(alive.made) >= 4 * 2
    with torch.no_grad():
        ours.eval()(input_ids=torch.ones(1, 8, dtype=torch.long))
    assert alive() == 0


def test_reading_holds_one_weight_in_full(tiny, monkeypatch):
    """While it is read, a model's other frozen weights are bytes, or not there yet; expert by expert, too."""
    path = tiny(**SIZES)
    filling = Filling(FourBit(nested=True), CPU)
    adapter, seen = Adapter(lora(), filling=filling), []
    fill = PackedWeight.fill

    def counted(weight, local):
        others = [w.module._parameters[w.name] for w in filling.weights.values() if w is not weight]
        seen.append(sum(p.numel() for p in others if not p.is_meta and p.dtype != torch.uint8))
        fill(weight, local)

    monkeypatch.setattr(PackedWeight, "fill", counted)
    build = reading(AutoModelForCausalLM.from_pretrained, filling)
    model = adapter.finish(load_whole(path, build, prepare=adapter.alone, dtype=torch.float32), CPU)
    assert seen == [0] * 2 * 6
    weights = load_file(f"{path}/model.safetensors")
    base = model.get_base_model()
    q_proj = packed_weight(base, "model.layers.1.self_attn.q_proj.base_layer.weight")
    assert torch.equal(q_proj.values(), dequantised(weights["model.layers.1.self_attn.q_proj.weight"], nested=True))
    assert packed_weight(base, "lm_head.weight") is None
    assert packed_weight(base, "model.layers.1.mlp.gate.weight") is None


# What is asked for


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, None),
        ({"load_in_4bit": False, "quantization_config": None}, None),
        ({"load_in_4bit": True}, FourBit("fp4")),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, FourBit("nf4")),
        ({"quantization_config": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}}, FourBit("fp4", True)),
    ],
)
def test_settings(values, expected):
    kwargs = {**values, "dtype": "auto"}
    assert take(kwargs) == expected
    assert kwargs == ({"dtype": "auto"} if expected else {**values, "dtype": "auto"})


def test_settings_of_bitsandbytes():
    config = four_bits(bnb_4bit_use_double_quant=True, llm_int8_skip_modules=["lm_head", "q_proj"])
    assert take({}, config) == FourBit("nf4", True, ("lm_head", "q_proj"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"load_in_8bit": True}, ("load_in_8bit",)),
        ({"quantization_config": {"load_in_8bit": True}}, ("quantization_config",)),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ("quantization_config", "gptq")),
        ({"load_in_4bit": True, "load_in_8bit": True}, ("load_in_8bit",)),
        ({"quantization_config": {"load_in_4bit": True, "load_in_8bit": True}}, ("load_in_8bit",)),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, ("bnb_4bit_quant_type", "int4", "nf4")),
    ],
)
def test_refused_settings(values, words):
    with pytest.raises(ValueError, match=".*".join(words)):
        asked_for(values, "model_init_kwargs ")


def test_two_settings_and_a_missing_package(monkeypatch):
    with pytest.raises(ValueError, match="one place"):
        take({"quantization_config": four_bits()}, four_bits())
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"load_in_4bit=True needs bitsandbytes.*hf_fsdpturbo\[qlora\]"):
        asked_for({"load_in_4bit": True})


def test_rows_that_are_not_whole_blocks_are_named():
    from tests.support.tiny_models import tiny_model

    odd = tiny_model("qwen3_moe", **{k: v for k, v in SIZES.items() if k != "kind"} | {"moe_intermediate_size": 48})
    with pytest.raises(ValueError, match=r"experts.down_proj has rows of 48.*llm_int8_skip_modules.*mlp.experts"):
        choose_weights(odd, Filling(FourBit(), CPU))
    skipping = Filling(FourBit(skip=("lm_head", "mlp.experts")), CPU)
    choose_weights(odd, skipping)
    assert len(skipping.choice) == 2 * 4
    with pytest.raises(ValueError, match="nothing of .* is left"):
        choose_weights(odd, Filling(FourBit(skip=("model", "lm_head")), CPU))
