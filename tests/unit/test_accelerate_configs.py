"""Every shipped accelerate YAML: accelerate's own loader takes it, ours parses it strictly, the layout is as named."""

import os
from pathlib import Path

import pytest

from hf_fsdpturbo.arguments import FSDPTurboTrainingArguments, sizes_for_world, turbo_arguments
from hf_fsdpturbo.launch_config import read_launch_config
from hf_fsdpturbo.parallel_state import Topology

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"
BOTH = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]

# name -> type, world, (edp, efsdp, ep, expert_cp), dispatcher, kernels, chunk size, storage
EXPECTED = {
    "npu_ep16": ("MULTI_NPU", 16, (1, 1, 16, 1), "eager", ["flash-linear-attention"], 16, "bfloat16"),
    "npu_ep16_fused": ("MULTI_NPU", 16, (1, 1, 16, 1), "fused", ["flash-linear-attention"], 16, "bfloat16"),
    "npu_cp2_ep4_efsdp2": (
        "MULTI_NPU", 16, (1, 2, 4, 2), "fused", ["auto", "flash-linear-attention"], 64, "bfloat16",
    ),
    "npu_cp2_ep4_efsdp2_eager": (
        "MULTI_NPU", 16, (1, 2, 4, 2), "eager", ["auto", "flash-linear-attention"], 64, "bfloat16",
    ),
    "npu_ep8": ("MULTI_NPU", 8, (1, 1, 8, 1), "eager", None, None, "bfloat16"),
    "cpu_ep2": ("MULTI_GPU", 2, (1, 1, 2, 1), "eager", None, None, "auto"),
    "cuda_ep2": ("MULTI_GPU", 2, (1, 1, 2, 1), "fused", None, None, "auto"),
    "cuda_ep8": ("MULTI_GPU", 8, (1, 1, 8, 1), "fused", None, None, "auto"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("FSDPTURBO_", "ACCELERATE_")) or name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(turbo_arguments, "_warned", set())


def test_the_list_is_complete():
    assert {path.stem for path in CONFIGS.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_accelerate_loads_it(name):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    path = str(CONFIGS / f"{name}.yaml")
    config = load_config_from_file(path)
    assert (config.distributed_type.value, config.num_processes) == EXPECTED[name][:2]
    parsed = launch_command_parser().parse_args(["--config_file", path, "--num_machines", "1", "train.py"])
    args, _, _ = _validate_launch_command(parsed)
    assert args.multi_gpu
    assert not any((args.use_fsdp, args.use_deepspeed, args.use_megatron_lm, args.use_parallelism_config))


@pytest.mark.parametrize("name", EXPECTED)
def test_it_parses_strictly_and_gives_its_layout(name, monkeypatch, tmp_path):
    _, world, shape, dispatcher, kernels, chunk, storage = EXPECTED[name]
    monkeypatch.setenv("FSDPTURBO_ACCELERATE_CONFIG", str(CONFIGS / f"{name}.yaml"))
    launch = read_launch_config()
    bf16 = launch.mixed_precision == "bf16"
    assert bf16 == (name != "cpu_ep2")
    args = FSDPTurboTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=bf16, report_to="none")
    topology = Topology.resolve(world, **sizes_for_world(args, world))
    assert topology.expert_shape == shape
    params = args.fsdpturbo_params
    assert (params.ep_dispatcher, params.param_storage_dtype, params.ep_backend) == (dispatcher, storage, "torch")
    if kernels is None:
        assert args.kernel_params is None
    else:
        found = args.kernel_params
        assert (found.name, found.include_kernels, found.chunk_size) == (kernels, BOTH, chunk)
    assert launch.use_cpu == (name == "cpu_ep2")
