"""``hf-fsdpturbo merge ADAPTER --out DIR``: its words, checked before the merge itself is imported."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hf_fsdpturbo.commands.export_door import check_out, size_in_bytes, write
from hf_fsdpturbo.commands.four_bit_words import add_four_bit_words, four_bit_of
from hf_fsdpturbo.merge.adapter_config import find_base, read_adapter
from hf_fsdpturbo.one_line import OneLineParser

PROG = "hf-fsdpturbo merge"


def main(argv: Sequence[str]) -> int:
    """Write one model from a LoRA adapter and its base; exit status 2 for wrong input, 1 where writing failed."""
    parser = OneLineParser(PROG, "A LoRA adapter merged into its base, tensor by tensor, without a GPU.")
    parser.add_argument("adapter", metavar="ADAPTER", help="adapter files of PEFT: a folder, or a Hub id in the cache")
    parser.add_argument("--out", required=True, metavar="DIR", help="new directory for the merged model")
    parser.add_argument("--base", metavar="MODEL", help="folder or cached Hub id (default: what the adapter names)")
    parser.add_argument("--max-file-size", type=size_in_bytes, default="5GB", help="size of a weight file (5GB)")
    add_four_bit_words(parser)
    options = parser.parse_args(list(argv))
    return write(PROG, options.out, lambda: _merge(options))


def _merge(options: argparse.Namespace) -> list[str]:
    check_out(options.out, "--out")
    four_bit = four_bit_of(options)
    adapter = read_adapter(options.adapter)
    base = find_base(adapter, options.base)
    from hf_fsdpturbo.merge.merged_files import merge  # late: it brings torch, transformers and peft

    return merge(adapter, base, options.out, options.max_file_size, four_bit)
