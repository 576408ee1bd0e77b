"""``hf-fsdpturbo export CHECKPOINT OUT``: its words, checked before the export itself is imported."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence

from hf_fsdpturbo.commands.four_bit_words import add_four_bit_words, four_bit_of
from hf_fsdpturbo.one_line import OneLineParser, refuse

PROG = "hf-fsdpturbo export"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(argv: Sequence[str]) -> int:
    """Write a Hub checkpoint from a sharded one; exit status 2 for wrong input, 1 where writing failed."""
    parser = OneLineParser(PROG, "A Hub checkpoint from a sharded one, on one machine, without a GPU.")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a finished checkpoint-N directory")
    parser.add_argument("out", metavar="OUT", help="new directory for the Hub checkpoint")
    parser.add_argument("--max-file-size", type=size_in_bytes, default="5GB", help="size of a weight file (5GB)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run model code that lies in the checkpoint")
    parser.add_argument("--merge", action="store_true", help="of a LoRA run: the merged model, not the adapter")
    parser.add_argument("--base", metavar="MODEL", help="base to merge into (default: what the adapter names)")
    parser.add_argument(
        "--save_quantized", action="store_true", help="of a LoRA run: its packed base too, byte for byte, in OUT/base"
    )
    add_four_bit_words(parser)
    options = parser.parse_args(list(argv))
    return write(PROG, options.out, lambda: _export(options))


def write(prog: str, out: str, files: Callable[[], list[str]]) -> int:
    """Call ``files``, which writes weight files into ``out`` and names them; the exit status of the command.

    ValueError is wrong input (2), OSError a disk that failed (1).
    """
    try:
        names = files()
    except ValueError as error:
        refuse(prog, error)
    except OSError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    print(f"{out}: {len(names)} weight file(s)")
    return 0


def _export(options: argparse.Namespace) -> list[str]:
    _check_folders(options.checkpoint, options.out)
    of_adapter = os.path.isfile(os.path.join(options.checkpoint, "adapter_config.json"))
    four_bit = four_bit_of(options)
    if options.base is not None and not (options.merge or options.save_quantized):
        raise ValueError("--base is for --merge and --save_quantized. Give one of them as well, or leave it out.")
    if four_bit is not None and not options.merge:
        raise ValueError("--load_in_4bit is for --merge. Give --merge as well, or leave it out.")
    if options.merge and not of_adapter:
        raise ValueError(f"--merge: {options.checkpoint} has no adapter to merge. Leave it out.")
    if options.save_quantized and (options.merge or not of_adapter):
        merged = "is --merge's opposite" if options.merge else f"needs an adapter, and {options.checkpoint} has none"
        raise ValueError(f"--save_quantized copies a base as it was: it {merged}. Leave it out.")
    from hf_fsdpturbo.export import export_adapter, export_checkpoint  # late: it brings torch and transformers

    if not of_adapter:
        return export_checkpoint(options.checkpoint, options.out, options.max_file_size, options.trust_remote_code)
    from hf_fsdpturbo.loading.release_copy import check_frozen, check_packed, copy_release
    from hf_fsdpturbo.merge.adapter_config import find_base, read_adapter

    if options.save_quantized:
        adapter = read_adapter(options.checkpoint)
        check_frozen(adapter.config.get("modules_to_save"))
        base = find_base(adapter, options.base)
        check_packed(base, {})
        return [*export_adapter(options.checkpoint, options.out), *copy_release(base, {}, options.out)]
    if not options.merge:
        return export_adapter(options.checkpoint, options.out)
    from hf_fsdpturbo.merge.merged_files import merge

    with tempfile.TemporaryDirectory() as folder:  # an adapter is small
        export_adapter(options.checkpoint, folder)
        adapter = read_adapter(folder)
        return merge(adapter, find_base(adapter, options.base), options.out, options.max_file_size, four_bit)


def _check_folders(checkpoint: str, out: str) -> None:
    if not os.path.isdir(checkpoint):
        raise ValueError(f"CHECKPOINT {checkpoint} is no directory. Give a finished checkpoint-N directory.")
    check_out(out, "OUT")


def check_out(out: str, argument: str) -> None:
    """A directory that is new or empty.

    Raises:
        ValueError: it is not; begins with ``argument``.
    """
    if os.path.exists(out) and not os.path.isdir(out):
        raise ValueError(f"{argument} {out} is a file. Choose a new directory.")
    if os.path.isdir(out) and os.listdir(out):
        raise ValueError(f"{argument} {out} is not empty. Choose a new directory.")


def size_in_bytes(text: str) -> int:
    """``5GB``, ``500MB`` or a number of bytes.

    Raises:
        argparse.ArgumentTypeError: none of these.
    """
    match = re.fullmatch(r"(\d+)\s*(|KB|MB|GB)", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB, 500MB or a number of bytes")
    return int(match[1]) * _UNITS[match[2]]
