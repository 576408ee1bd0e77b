"""A stand-in for torch_npu's elementwise operators: their schemas, dtype rules and values, on CPU.

Schemas as in torch_npu 2.7.1 to 2.14:
npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor);
npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half') -> Tensor;
npu_swiglu(Tensor input, int dim=-1) -> Tensor.
"""

import torch
import torch.nn.functional as F

from tests.support.linear_attention_model import install_module


class TorchNpuStandIn:
    def __init__(self):
        self.calls = []

    def npu_rms_norm(self, x, gamma, epsilon=1e-6):
        assert x.dtype == gamma.dtype, "one dtype for input and gamma"
        assert gamma.shape == x.shape[-1:]
        assert isinstance(epsilon, float)
        self.calls.append("npu_rms_norm")
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
        return (x.float() * rstd).to(x.dtype) * gamma, rstd

    def npu_rotary_mul(self, x, r1, r2, rotary_mode="half"):
        assert rotary_mode == "half"
        assert x.ndim == r1.ndim == r2.ndim == 4
        assert x.dtype == r1.dtype == r2.dtype
        assert x.shape[-1] == r1.shape[-1]
        assert x.shape[-1] % 2 == 0
        assert x.is_contiguous() or x.transpose(1, 2).is_contiguous()
        self.calls.append("npu_rotary_mul")
        first, second = x.chunk(2, -1)
        return x * r1 + torch.cat((-second, first), -1) * r2

    def npu_swiglu(self, x, dim=-1):
        assert x.shape[dim] % 2 == 0
        self.calls.append("npu_swiglu")
        gate, up = x.chunk(2, dim)
        return F.silu(gate) * up

    def install(self, monkeypatch, without=()):
        names = {"npu_rms_norm", "npu_rotary_mul", "npu_swiglu"} - set(without)
        install_module(monkeypatch, "torch_npu", **{name: getattr(self, name) for name in names})
        return self
