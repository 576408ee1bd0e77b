"""``hf-fsdpturbo plan MODEL --devices N``: GiB a rank by kind for a layout, or the layouts that fit, without a GPU."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdpturbo.hub_names import is_cached, is_path, not_here
from hf_fsdpturbo.one_line import OneLineParser
from hf_fsdpturbo.plan.planned_run import (
    DISPATCHERS,
    FROZEN,
    HEADS,
    LORA_TARGETS,
    OPTIMIZERS,
    RECOMPUTES,
    STORAGES,
    TASKS,
    Asked,
    PlannedRun,
)
from hf_fsdpturbo.plan.released import released_file, released_names
from hf_fsdpturbo.topology import Topology, positive

if TYPE_CHECKING:
    from hf_fsdpturbo.plan.shape import ModelShape

NODE = 8  # ranks of a node unless it is said


def _parser() -> OneLineParser:
    parser = OneLineParser("hf-fsdpturbo plan", str(__doc__))
    add = parser.add_argument
    names = ", ".join(released_names())
    add("model", metavar="MODEL", help=f"a Hub id in the cache, a folder, a config.json, or {names}")
    add("--devices", type=int, required=True, help="ranks")
    add("--memory", type=float, default=80.0, help="GiB of a device (80)")
    add("--search", action="store_true", help="rank the layouts that fit; print the accelerate YAML of the best")
    add("--ep_size", type=int, help="ranks that share the experts; as many as a node has and the experts allow")
    add("--efsdp_size", type=int, help="ranks that share one expert's weights; dp_size / ep_size")
    add("--cp_size", type=int, default=1, help="context parallel size (1)")
    add("--mp_replicate_size", type=int, default=1, help="replicas of the outer FSDP2, HSDP (1)")
    add("--ranks_per_node", type=int, help=f"ranks of a node ({NODE}, or all where they are fewer)")
    add("--sequence", type=int, default=4096, help="tokens of a sample (4096)")
    add("--batch", type=int, default=1, help="samples of a rank and micro-step (1)")
    add("--accumulation", type=int, default=1, help="micro-steps a step (1)")
    add("--storage", choices=STORAGES, default="bfloat16", help="dtype of the weights (bfloat16); compute is bf16")
    add("--task", choices=TASKS, default="sft", help="dpo has a reference, unless --lora_r (sft)")
    add("--recompute", choices=RECOMPUTES, help="activation checkpointing (off; --search tries all)")
    add("--dispatcher", choices=DISPATCHERS, default="fused", help="of the experts' rows (fused)")
    add("--head", choices=HEADS, default="on", help="fused_linear_cross_entropy (on)")
    add("--liger", action="store_true", help="fused norms (Liger, kernel_config auto on Ascend)")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="dtype of AdamW's moments (adamw: as the weights)")
    add("--offload", action="store_true", help="offload_params: weights, gradients, optimizer on the host")
    add("--lora_r", type=int, default=0, help="rank of LoRA; 0 trains all weights (0)")
    add("--lora_targets", choices=LORA_TARGETS, default="attention", help="what has adapters (attention)")
    add(
        "--frozen",
        choices=FROZEN,
        help="weights beside adapters: nf4 is load_in_4bit (mxfp4 of such a release, or full)",
    )
    add("--json", action="store_true", help="print JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0, or 1 where ``--search`` finds nothing. Wrong input exits with 2 and one error."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        asked = _asked(given)
        from hf_fsdpturbo.plan.shape import shape_of

        shape = shape_of(given.model, given.storage)
        if asked.settings["frozen"] is None:
            keeps = shape.release == "mxfp4" and given.lora_r and not given.offload
            asked.settings["frozen"] = "mxfp4" if keeps else "full"
        if given.search:
            return _search(shape, asked, given.json)
        asked.sizes["ep_size"] = asked.sizes["ep_size"] or _usual_ep(shape, asked)
        return _one(shape, asked, given.json)
    except ValueError as error:
        parser.error(str(error))


def _asked(given: argparse.Namespace) -> Asked:
    """What was asked, checked as far as the model is not needed: in time for a typing mistake.

    Raises:
        ValueError: naming the argument.
    """
    devices = positive("devices", given.devices)
    if not given.memory > 0:
        raise ValueError(f"memory must be GiB above 0, but it is {given.memory}. Set memory to what a device has.")
    if given.lora_r < 0:
        raise ValueError(f"lora_r must be 0 or more, but it is {given.lora_r}. Set lora_r to 0 for no LoRA.")
    near = min(NODE, devices) if given.ranks_per_node is None else given.ranks_per_node
    if given.ranks_per_node is None and devices % near:
        near = math.gcd(devices, NODE)
    sizes: dict[str, Any] = {
        "ep_size": given.ep_size,
        "efsdp_size": given.efsdp_size,
        "cp_size": given.cp_size,
        "mp_replicate_size": given.mp_replicate_size,
        "ranks_per_node": near,
    }
    settings: dict[str, Any] = {
        name: getattr(given, name)
        for name in (
            "sequence", "batch", "accumulation", "storage", "task", "recompute", "dispatcher", "liger", "optimizer",
            "offload", "lora_r", "lora_targets", "frozen",
        )
    }  # fmt: skip
    settings["fused_head"] = given.head == "on"
    checked = {name: value for name, value in sizes.items() if name != "ep_size" or value is not None}
    PlannedRun(
        Topology.resolve(devices, **checked),
        **(settings | {"recompute": given.recompute or "off", "frozen": given.frozen or "full"}),
    )
    _check_model(given.model)
    return Asked(given.model, devices, given.memory, sizes, settings)


def _check_model(model: str) -> None:
    """Raise ValueError unless MODEL is there; what it holds is seen later."""
    if released_file(model) or Path(model).is_file() or (Path(model) / "config.json").is_file():
        return
    if not is_path(model) and is_cached(model, ("config.json",)):
        return
    names = ", ".join(released_names())
    said = not_here("MODEL", model, "shipped name, config.json, folder with one, or Hub id in the cache")
    raise ValueError(f"{said} Shipped names: {names}.")


def _usual_ep(shape: ModelShape, asked: Asked) -> int:
    """As many ranks as share a node, divide dp and the experts."""
    cp = asked.sizes["cp_size"]
    near = max(1, asked.sizes["ranks_per_node"] // cp)
    return math.gcd(math.gcd(asked.devices // cp, near), shape.num_experts or 1)


def _one(shape: ModelShape, asked: Asked, as_json: bool) -> int:
    from hf_fsdpturbo.plan.printed import as_dict, in_words, print_json
    from hf_fsdpturbo.plan.shape import check_fits

    run = asked.run(recompute=asked.settings["recompute"] or "off")
    check_fits(shape, run)
    if as_json:
        print_json(as_dict(shape, run, asked.memory))
    else:
        print("\n".join(in_words(shape, run, asked.memory)))
    return 0


def _search(shape: ModelShape, asked: Asked, as_json: bool) -> int:
    from hf_fsdpturbo.plan.printed import as_dict, in_words, nothing_fits, print_json, ranking, yaml_of
    from hf_fsdpturbo.plan.search import search

    found = search(shape, asked)
    if as_json:
        print_json([as_dict(shape, candidate.run, asked.memory) for candidate in found])
    elif found:
        best = found[0].run
        lines = [*ranking(found, asked.memory), "", *in_words(shape, best, asked.memory), "", yaml_of(shape, best)]
        print("\n".join(lines))
    else:
        print("\n".join(nothing_fits(shape, asked)))
    return 0 if found else 1
