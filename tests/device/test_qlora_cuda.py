"""NF4 weights on the GPU itself: bitsandbytes' CUDA kernels, and one step against the same dequantised weights."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: the same runs on CPU in tests/unit/test_packed_weights.py", allow_module_level=True)

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from torch import nn

from hf_fsdpturbo.dispatch.recompute import install_routing_tape
from hf_fsdpturbo.model_spec import find_experts
from hf_fsdpturbo.quantised.asked import FourBit
from hf_fsdpturbo.quantised.packed_weight import PackedWeight
from tests.support.compare import distance
from tests.support.packed_runs import adapted, dequantised, small_model, step


@pytest.mark.parametrize("bits", [FourBit(), FourBit("fp4"), FourBit(nested=True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_values_are_those_of_bitsandbytes(bits, dtype):
    module = nn.Module()
    weight = torch.randn(5, 96, 192, device="cuda").to(dtype)
    module.weight = nn.Parameter(weight.clone(), requires_grad=False)
    packed = PackedWeight(module, "weight", bits, weight.device)
    packed.settle()
    expected = dequantised(weight, bits.quant_type, bits.nested)
    assert torch.equal(packed.values(), expected)
    assert torch.equal(packed.values(torch.float32), expected.float())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_equals_stock_peft_on_dequantised_weights(nested, recompute):
    ours = adapted(small_model("cuda"), True, nested=nested)
    plain = adapted(small_model("cuda"), False, nested=nested)
    if recompute:
        base = ours.get_base_model()
        install_routing_tape(base, tuple(find_experts(base, 1)))
        ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = step(plain)
    for _ in range(2):
        found = step(ours)
        assert set(found) == set(expected)
        worst = max(distance(found[name], tensor) for name, tensor in expected.items())
        print(f"nested={nested} recompute={recompute}: {worst:.1e}")
        assert worst < 1e-4


def test_bf16_in_autocast_is_no_further_from_float32_than_plain():
    truth = step(adapted(small_model("cuda"), False))
    ours, plain = adapted(small_model("cuda"), True), adapted(small_model("cuda"), False)
    for module in ours.modules():
        view = getattr(vars(module).get("forward"), "experts", None)
        if view is not None:
            view.compute_as = torch.bfloat16
    with torch.autocast("cuda", torch.bfloat16):
        mine, theirs = step(ours), step(plain)
    for found in (mine, theirs):
        found["all"] = torch.cat([found[name].float().flatten() for name in truth if name != "loss"])
    whole = torch.cat([truth[name].flatten() for name in truth if name != "loss"])
    far = distance(mine["all"], whole), distance(theirs["all"], whole)
    print(f"ours {far[0]:.2e}, plain {far[1]:.2e}")
    assert far[0] <= 1.5 * far[1]
