"""A stand-in for flash-linear-attention 0.6.0: its names, argument rules and values, on CPU, recording every call."""

import torch

from hf_fsdpturbo.kernels.causal_conv import causal_conv1d
from hf_fsdpturbo.kernels.gated_delta_rule import chunk_gated_delta_rule
from tests.support.linear_attention_model import install_module


class FlaStandIn:
    """calls: (operator, chunk_size or None, cu_seqlens as a list or None) in order."""

    def __init__(self):
        self.calls = []
        self.error = None  # raised by every chunk call when set
        self.scale = 1.0  # output is multiplied by it: a wrong kernel
        self.conv_error, self.conv_scale = None, 1.0  # the same for the convolution

    def chunk_gated_delta_rule(
        self, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
        cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs,
    ):  # fmt: skip
        if self.error is not None:
            raise self.error
        chunk_size = kwargs.pop("chunk_size", 64)
        assert chunk_size in (16, 32, 64)
        assert not kwargs, kwargs
        assert g.dtype == torch.float32
        assert cu_seqlens is None or q.shape[0] == 1
        if cu_seqlens_cpu is not None:
            assert cu_seqlens_cpu.tolist() == cu_seqlens.tolist()
        self.calls.append(("chunk", chunk_size, None if cu_seqlens is None else cu_seqlens.tolist()))
        out, state = chunk_gated_delta_rule(
            q, k, v, g=g, beta=beta, chunk_size=chunk_size, initial_state=initial_state,
            output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return out * self.scale, state

    def fused_recurrent_gated_delta_rule(self, q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, **kwargs):
        self.calls.append(("recurrent", None, None))
        return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, chunk_size=1, **kwargs)

    def causal_conv1d(
        self, x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False,
        activation=None, backend="triton", cu_seqlens=None, cu_seqlens_cpu=None, **kwargs,
    ):  # fmt: skip
        assert x.shape[-1] == weight.shape[0], "channel-last input"
        if self.conv_error is not None:
            raise self.conv_error
        self.calls.append(("conv", None, None if cu_seqlens is None else cu_seqlens.tolist()))
        y = causal_conv1d(x.transpose(1, 2), weight, bias, activation, cu_seqlens=cu_seqlens).transpose(1, 2)
        return y * self.conv_scale, None

    def install(self, monkeypatch):
        """Make `import fla...` find this, and let it count as usable on the CPU."""
        install_module(
            monkeypatch, "fla.ops.gated_delta_rule",
            chunk_gated_delta_rule=self.chunk_gated_delta_rule,
            fused_recurrent_gated_delta_rule=self.fused_recurrent_gated_delta_rule,
        )  # fmt: skip
        install_module(monkeypatch, "fla.modules.causal_conv1d", causal_conv1d=self.causal_conv1d)
        monkeypatch.setattr("hf_fsdpturbo.kernels.fla.why_not", lambda device_type: None)
        return self
