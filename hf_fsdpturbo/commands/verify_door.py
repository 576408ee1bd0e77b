"""``hf-fsdpturbo verify MODEL``: its words and the user's files, checked before anything heavy is imported."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdpturbo.arguments.before_ranks import check_before_ranks
from hf_fsdpturbo.commands.launch_options import launch_file
from hf_fsdpturbo.commands.recipe_words import MODEL, given_values, read_recipe
from hf_fsdpturbo.launch_config import LaunchConfig, set_environment_default
from hf_fsdpturbo.one_line import OneLineParser, positive, refuse
from hf_fsdpturbo.verify.faults import FAULTS
from hf_fsdpturbo.verify.few_ranks import Layout, on_few_ranks, on_two_ranks, read_layout, users_layout
from hf_fsdpturbo.verify.to_prove import COMMANDS, Asked, carried
from hf_fsdpturbo.verify.users_config import check_experts, check_has_experts, read_config, read_values

if TYPE_CHECKING:
    from hf_fsdpturbo.verify.verdicts import Verdict

PROG = "hf-fsdpturbo verify"
SIZES = ("ep_size", "efsdp_size", "cp_size", "mp_replicate_size")
DEVICES = ("auto", "cpu", "accelerator")


def _layout(text: str) -> Layout:
    try:
        return read_layout(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def make_parser() -> OneLineParser:
    """The command's own words; others are arguments of ``--command``, ``sft`` by default."""
    parser = OneLineParser(
        PROG,
        "A small copy of your MoE model, with your layout and arguments, on local ranks against one process of plain "
        "TRL: loss, gradients, norm, weights, recompute, packing, the saved file, resuming. Exit status 0: exact, 1: "
        "something differs, 2: wrong input.",
        usage=f"{PROG} [MODEL] [--config YAML] [--accelerate_config NAME|PATH] [options] [arguments of COMMAND]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="MODEL (first, or model_name_or_path of --config): a shipped name (hf-fsdpturbo plan --help), a "
        "config.json,\na folder, or a Hub id in the cache.\n\nfaults to inject, and the row that shows each:\n"
        + "\n".join(f"  {name:<24} {fault.row:<10} {fault.text}" for name, fault in FAULTS.items()),
    )
    add = parser.add_argument
    add("--command", choices=tuple(COMMANDS), default="sft", help="which hf-fsdpturbo command your run is (sft)")
    add("--config", metavar="YAML", help="the recipe's YAML")
    add("--accelerate_config", "--accelerate-config", type=launch_file, metavar="NAME|PATH",
        help="the launch file: a shipped name or a file")  # fmt: skip
    add("--nproc", type=positive, metavar="N", help="ranks of your run (default: the launch file's num_processes)")
    add("--layout", type=_layout, metavar="L", help="run this: ep2, ep2_efsdp2, ep2_cp2, ... (default: the axis of "
        "two ranks that is nearest to yours)")  # fmt: skip
    add("--full", action="store_true", help="your layout itself, on up to 16 ranks")
    add("--inject", choices=tuple(FAULTS), metavar="FAULT", help="break something, to see its row turn red")
    add("--device", choices=DEVICES, default="auto", help="auto: accelerators where there are as many as ranks (auto)")
    add("--fresh", action="store_true", help="ranks on CPU are new interpreters too, as those on accelerators are: "
        "slower")  # fmt: skip
    add("--seconds", type=positive, default=150, help="limit of one launch of ranks (150)")
    add("--keep", type=Path, metavar="FOLDER", help="a new folder for model, logs and checkpoints (default: none)")
    add("--json", action="store_true", help="print JSON")
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options with ``model`` (the first word, where it is no option), and the recipe's arguments."""
    words = list(argv)
    model = words.pop(0) if words and not words[0].startswith("-") else None
    options, rest = make_parser().parse_known_args(words)
    options.model = model
    return options, rest


def main(argv: Sequence[str]) -> int:
    """Check the words, prove, print the table; 0 exact, 1 differs; leaves with 2 for wrong input."""
    options, words = parse(argv)
    started = time.monotonic()
    try:
        asked = _asked(options, words)
        proof, devices = _begin(asked, started)
        small = proof.prepare()
    except ValueError as error:
        refuse(PROG, error)
    head = [
        f"{asked.model}: {small.architecture} with {small.sizes}, {small.kinds}; weights drawn, float32",
        f"layout {asked.layout.name}: {asked.layout.world} ranks on {devices}, against one process of plain TRL"
        + (f"; yours is {asked.users.name}" if asked.users not in (asked.layout, Layout()) else ""),
        *(f"note: {note}" for note in asked.notes),
    ]
    print("\n".join(head), file=sys.stderr if options.json else sys.stdout, flush=True)
    rows = proof.prove()
    return _report(options.json, asked, proof, rows, time.monotonic() - started)


def _report(as_json: bool, asked: Asked, proof: Any, rows: list[Verdict], seconds: float) -> int:
    from hf_fsdpturbo.verify import verdicts

    if as_json:
        more = {"model": asked.model, "layout": asked.layout.name, "injected": asked.fault, "seconds": round(seconds)}
        print(verdicts.as_json(rows, **more))
    else:
        print("\n".join(["", *verdicts.table(rows), f"{proof.routing()}; {seconds:.0f} s"]))
        for log in filter(None, proof.logs):
            print(f"\nthe last words of a run that failed:\n{log}", file=sys.stderr)
    return verdicts.verdict_of(rows)


def _begin(asked: Asked, started: float) -> tuple[Any, str]:
    """Everything that is heavy is imported here, once, and ranks on CPU are forked from it."""
    # What asks here whether there is a GPU (an import of Transformers) need not start CUDA for that.
    set_environment_default("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    importlib.import_module("hf_fsdpturbo.trl")
    from hf_fsdpturbo.verify import proof

    def tell(line: str) -> None:
        if sys.stderr.isatty():
            print(f"[{time.monotonic() - started:4.0f} s] {line}", file=sys.stderr, flush=True)

    return proof.begin(asked, tell)


def _asked(options: argparse.Namespace, words: list[str]) -> Asked:
    """What was asked, checked as far as no model is needed.

    Raises:
        ValueError: naming the argument.
    """
    if words and not words[0].startswith("--"):
        raise ValueError(f"{words[0]!r}: one MODEL is enough.")
    recipe = read_recipe([] if options.config is None else ["--config", options.config])
    model = options.model or recipe.get(MODEL)
    if not model:
        raise ValueError(f"MODEL is missing: give it, or a --config with {MODEL}.")
    if options.full and options.layout is not None:
        raise ValueError("--layout and --full are two layouts: give one.")
    if options.keep is not None and options.keep.exists():
        raise ValueError(f"--keep: {options.keep} exists. Choose a new folder.")
    values = read_values(str(model))
    given, processes = _given(options, words, recipe)
    users = users_layout(options.nproc or processes, {name: given.get(name) for name in SIZES})
    if options.full and users.world == 1:
        raise ValueError("--full: nothing says what your layout is: give --accelerate_config, --nproc or sizes.")
    layout = options.layout or (on_few_ranks(users) if options.full else on_two_ranks(users))
    for ep_size in (users.ep, layout.ep):
        check_experts(values, str(model), ep_size)
    check_has_experts(read_config(values, str(model)), str(model))
    fields, notes = carried(given, cpu=options.device != "accelerator", command=options.command)
    if "vision_config" in values:
        notes = (*notes, "pictures are not proven: rows are text, and the small copy has no processor")
    if options.layout is None and not options.full and users.world > 2:
        notes = (*notes, f"two ranks do not show all of your layout ({users.name}): --full does")
    return Asked(
        model=str(model), values=values, users=users, layout=layout, command=options.command, fault=options.inject,
        seconds=float(options.seconds), device=options.device, fresh=options.fresh, folder=options.keep, notes=notes,
        **fields,
    )  # fmt: skip


def _given(options: argparse.Namespace, words: list[str], recipe: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    """The user's arguments by name, command line over YAML over launch file, and the processes of the launch file."""
    given: dict[str, Any] = {}
    processes, launch = None, LaunchConfig()
    if options.accelerate_config is not None:
        from hf_fsdpturbo.arguments.yaml_fields import check_yaml_fields
        from hf_fsdpturbo.launch_config.early_check import read_early

        try:
            file = read_early(options.accelerate_config)
            check_yaml_fields(file.fields, file.path)
        except ValueError as error:
            raise ValueError(f"--accelerate_config: {error}") from error
        given, processes, launch = dict(file.fields), file.num_processes, file.config
    if recipe or words:
        config = [] if options.config is None else ["--config", options.config]
        check_before_ranks(words, recipe, launch, None)
        own = given_values(options.command, [*config, *words], recipe)
        given = {**given, **own, "dist_config": {**_mapping(given), **_mapping(own)}}
    inner = _mapping(given)
    for name in ("ep_size", "ep_dispatcher"):
        given[name] = inner.get(name) if given.get(name) is None else given[name]
    given["efsdp_size"], given["dist_config"] = inner.get("efsdp_size"), inner
    return given, processes


def _mapping(given: dict[str, Any]) -> dict[str, Any]:
    value = given.get("dist_config")
    if not value:
        return {}
    from hf_fsdpturbo.arguments.mappings import parse_mapping

    return parse_mapping("dist_config", value)
