"""``hf-fsdpturbo convert FILE``: a LlamaFactory YAML becomes a recipe and a launch file, and it says how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_fsdpturbo import topology
from hf_fsdpturbo.commands.llamafactory import Converted, convert
from hf_fsdpturbo.one_line import OneLineParser, positive, refuse

PROG = "hf-fsdpturbo convert"
DEVICES = {"cuda": "MULTI_GPU", "npu": "MULTI_NPU", "cpu": "MULTI_GPU"}


def main(argv: Sequence[str]) -> int:
    """Write ``STEM_recipe.yaml`` and ``STEM_accelerate.yaml``; print notes and the command that trains."""
    parser = OneLineParser(PROG, "Turn a LlamaFactory training YAML into a recipe and an accelerate launch file.")
    parser.add_argument("file", metavar="FILE", help="LlamaFactory's YAML")
    parser.add_argument("--out", type=Path, default=Path("."), metavar="FOLDER", help="where both go (default: here)")
    parser.add_argument("--devices", type=positive, metavar="N", help="processes (default: what its sizes ask for)")
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="kind of device (default: cuda)")
    options = parser.parse_args(list(argv))
    stem = Path(options.file).stem
    recipe, launch = (options.out / f"{stem}_{kind}.yaml" for kind in ("recipe", "accelerate"))
    try:
        if not Path(options.file).exists():
            raise ValueError(f"there is no file {options.file!r}. Correct the path.")
        found = convert(options.file)
        check(found, Path(options.file))
        devices = options.devices or processes(found)
        batch(found, devices)
        for path in (recipe, launch):
            if path.exists():
                raise ValueError(f"{path} exists. Move it, or choose another --out.")
        options.out.mkdir(parents=True, exist_ok=True)
        recipe.write_text(f"# From LlamaFactory's {Path(options.file).name}\n{dump(found.recipe)}", encoding="utf-8")
        launch.write_text(dump(launch_file(found, devices, options.device)), encoding="utf-8")
    except (ValueError, OSError) as error:
        refuse(PROG, f"argument FILE: {error}")
    for key, words in found.notes:
        print(f"  {key}: {words}")
    print(f"{recipe}\n{launch}")
    print(f"hf-fsdpturbo {found.command} --accelerate_config {launch} --config {recipe}")
    return 0


def check(found: Converted, path: Path) -> None:
    """Look at our own fields as a run does.

    Raises:
        ValueError: a wrong type, or a value out of range.
    """
    from hf_fsdpturbo.arguments.yaml_fields import check_yaml_fields  # late: --help needs no torch

    ours: dict[str, Any] = {key: found.recipe[key] for key in ("kernel_config", "init_config") if key in found.recipe}
    check_yaml_fields({**found.launch, **ours}, path)
    topology.positive("micro_batch_size", found.recipe.get("per_device_train_batch_size", 1))


def processes(found: Converted) -> int:
    """As many as the sizes of the file ask for."""
    sizes = {**found.launch, **found.launch.get("dist_config", {})}
    return int(sizes.get("dp_size") or sizes.get("ep_size") or 1) * int(sizes.get("cp_size") or 1)


def batch(found: Converted, devices: int) -> None:
    """Say a global batch as accumulation.

    Raises:
        ValueError: it is no multiple of what one step of all devices takes.
    """
    if found.batch is None:
        return
    ranks = devices // int(found.launch.get("cp_size") or 1)
    step = ranks * int(found.recipe.get("per_device_train_batch_size", 1))
    if found.batch % step:
        raise ValueError(
            f"global_batch_size={found.batch} is no multiple of {step} (micro_batch_size x {ranks} data-parallel "
            "ranks). Give --devices, or another size."
        )
    found.recipe["gradient_accumulation_steps"] = found.batch // step
    found.notes.append(("global_batch_size", f"became gradient_accumulation_steps: {found.batch // step}"))


def launch_file(found: Converted, devices: int, device: str) -> dict[str, Any]:
    """The accelerate YAML, our fields in its ``fsdp_config`` block."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": DEVICES[device],
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": devices,
        "mixed_precision": "bf16" if found.recipe.get("bf16") else "no",
        "use_cpu": device == "cpu",
        "main_training_function": "main",
        "fsdp_config": {f"fsdp_turbo_{key}": value for key, value in found.launch.items()},
    }


def dump(content: dict[str, Any]) -> str:
    """YAML in the order given."""
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
