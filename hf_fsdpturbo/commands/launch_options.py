"""How many processes on which machines: our launch options, and the words of ``accelerate launch`` they become."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from hf_fsdpturbo.launch_config.early_check import LaunchFile
from hf_fsdpturbo.launch_config.slurm import SlurmStep
from hf_fsdpturbo.one_line import OneLineParser, not_negative, positive
from hf_fsdpturbo.shipped import launch_files

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Endpoint:
    """Where the launcher of the first machine listens."""

    host: str
    port: int


def launch_file(text: str) -> Path:
    """A shipped name or a path.

    Raises:
        argparse.ArgumentTypeError: neither.
    """
    shipped = launch_files()
    if text in shipped:
        return shipped[text]
    path = Path(text).expanduser()
    if not path.is_file():
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a file nor a shipped name ({', '.join(shipped)}); see hf-fsdpturbo configs"
        )
    return path.absolute()


def endpoint(text: str) -> Endpoint:
    """``HOST:PORT``, or ``HOST`` for port 29500; an IPv6 address stands in brackets.

    Raises:
        argparse.ArgumentTypeError: neither.
    """
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\s/]+)(?::(\d+))?", text)
    port = int(match[2] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, the same on every machine, but it is {text!r}")
    return Endpoint(match[1], port)


def make_parser(prog: str, description: str) -> OneLineParser:
    """The launch options alone; the recipe's arguments stay for it (``parse_known_args``)."""
    usage = f"{prog} [launch options] [--config YAML] [arguments of the recipe]"
    parser = OneLineParser(prog, description, add_help=False, usage=usage)
    group = parser.add_argument_group("launch options")
    group.add_argument(
        "--accelerate_config", "--accelerate-config", type=launch_file, metavar="NAME|PATH",
        help="accelerate YAML: a shipped name (hf-fsdpturbo configs) or a file; it says device, processes, layout",
    )  # fmt: skip
    group.add_argument("--nproc", type=positive, metavar="N", help="processes on this machine (default: the YAML's)")
    group.add_argument("--nnodes", type=positive, metavar="M", help="machines (default: srun's, or the YAML's)")
    group.add_argument(
        "--node_rank", "--node-rank", type=not_negative, metavar="R", help="which machine this is, from 0"
    )
    group.add_argument(
        "--rdzv_endpoint", "--rdzv-endpoint", type=endpoint, metavar="HOST:PORT",
        help="the first machine, as all machines name it",
    )  # fmt: skip
    return parser


def accelerate_words(
    options: argparse.Namespace, file: LaunchFile | None, step: SlurmStep | None
) -> tuple[list[str], int | None]:
    """Options of ``accelerate launch``, and the processes over all machines; None where nothing says how many.

    Args:
        options: parsed by :func:`make_parser`.
        file: the YAML of ``--accelerate_config``.
        step: what Slurm says, read only where ``--nnodes`` is not given.

    Raises:
        ValueError: an option is missing or does not go with the others.
    """
    nnodes = options.nnodes or (step.nnodes if step else None) or (file.num_machines if file else 1)
    nproc = options.nproc or (file.num_processes // file.num_machines if file else None)
    words, world = ["--config_file", str(file.path)] if file else [], nproc and nproc * nnodes
    if nproc is None and nnodes > 1:
        raise ValueError(f"--nproc is needed with {nnodes} machines: how many processes run on each of them.")
    if world is not None:
        words += ["--multi_gpu"] if world > 1 else []  # accelerate's word for one process a device
        words += ["--num_processes", str(world)]
    words += ["--num_machines", str(nnodes)]
    if nnodes == 1:
        for name in ("node_rank", "rdzv_endpoint"):
            if getattr(options, name) not in (None, 0):
                raise ValueError(f"--{name} is for several machines. Give --nnodes as well, or leave it out.")
        # A free port: two runs on one machine do not meet.
        own_port = file is not None and file.main_process_port is not None
        return words if own_port or nproc in (None, 1) else [*words, "--main_process_port", "0"], world
    rank, head = _place(options, file, step)
    if rank >= nnodes:
        raise ValueError(f"--node_rank must be below the number of machines ({nnodes}), but it is {rank}.")
    words += ["--machine_rank", str(rank), "--main_process_ip", head.host, "--main_process_port", str(head.port)]
    return words, world


def _place(options: argparse.Namespace, file: LaunchFile | None, step: SlurmStep | None) -> tuple[int, Endpoint]:
    """Which machine this is, and the first one: from the options, Slurm, or a YAML written for several machines."""
    rank, head = options.node_rank, options.rdzv_endpoint
    if step:
        rank = step.node_rank if rank is None else rank
        head = head or Endpoint(step.head, step.port)
    elif file and file.num_machines > 1 and options.nnodes is None:
        rank = file.machine_rank if rank is None else rank
        if head is None and file.main_process_ip:
            head = Endpoint(file.main_process_ip, file.main_process_port or DEFAULT_PORT)
    if rank is None:
        raise ValueError("--node_rank is needed with several machines: 0 on the first, 1 on the next, and so on.")
    if head is None:
        raise ValueError("--rdzv_endpoint is needed with several machines: HOST:PORT of the first one.")
    return rank, head
