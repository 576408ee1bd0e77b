"""Planning an export costs what its names cost: no memory and no conversions that grow with widths or with layers."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.export_planning import MODELS
from hf_fsdpturbo.checkpoint import conversion_groups, hub_plan

# class, config, experts a layer, layers with experts
RELEASED = {"Qwen3-235B-A22B": (*MODELS["Qwen3-235B-A22B"], 128, 94), "DeepSeek-V3": (*MODELS["DeepSeek-V3"], 256, 58)}


class HostBytes(TorchDispatchMode):
    """Bytes of every tensor that an operator gives on the CPU, views too, added up; nothing is taken off."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self.made += tensor.numel() * tensor.element_size()
        return result


@pytest.mark.parametrize("name", RELEASED)
def test_planning_at_real_widths_takes_no_memory_and_one_probe_a_kind(name, monkeypatch):
    model_class, config, experts, layers = RELEASED[name]
    with torch.device("meta"):
        model = model_class(config)
    tensors = {n: t.to(torch.bfloat16) for n, t in model.state_dict().items()}
    probes, own = [], conversion_groups.RowProof._probe

    def counting(self, group, shapes):
        probes.append(shapes)
        return own(self, group, shapes)

    monkeypatch.setattr(conversion_groups.RowProof, "_probe", counting)
    with HostBytes() as counted:
        jobs = hub_plan.make_jobs(model, tensors)
    assert counted.made < 50 * 2**20
    assert len(probes) == 2  # gate and up, down
    rows = [job for job in jobs if job.row is not None]
    assert len(rows) == 2 * experts * layers
    down = next(job for job in rows if "down_proj" in job.sources[0] and job.row == experts - 1)
    assert down.outputs[0].name.endswith(f"mlp.experts.{experts - 1}.down_proj.weight")
    assert down.outputs[0].shape == (config.hidden_size, config.moe_intermediate_size)
    assert not any(job.whole for job in jobs)
