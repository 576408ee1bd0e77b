"""The words of ``merge`` and ``export --merge`` that say in which 4 bits an adapter's base was; named as in TRL."""

from __future__ import annotations

import argparse

from hf_fsdpturbo.quantised.asked import TYPES, FourBit, asked_for

_DETAILS = ("bnb_4bit_quant_type", "use_bnb_nested_quant", "llm_int8_skip_modules")


def add_four_bit_words(parser: argparse.ArgumentParser) -> None:
    """Add ``--load_in_4bit`` and what it may be told."""
    words = parser.add_argument_group("the base of a QLoRA run")
    words.add_argument(
        "--load_in_4bit", action="store_true", help="merge into what 4 bits leave of the base, as the run had it"
    )
    words.add_argument("--bnb_4bit_quant_type", choices=TYPES, help="as the run had it (nf4)")
    words.add_argument("--use_bnb_nested_quant", action="store_true", default=None, help="with double quantisation")
    words.add_argument(
        "--llm_int8_skip_modules", nargs="+", metavar="NAME", help="modules that the run left in full (lm_head)"
    )


def four_bit_of(options: argparse.Namespace) -> FourBit | None:
    """The 4 bits that were asked for; None where the base is merged into as it was released.

    Raises:
        ValueError: details of them without ``--load_in_4bit``.
        MissingDependencyError: bitsandbytes is not installed.
    """
    given = [name for name in _DETAILS if getattr(options, name) is not None]
    if not options.load_in_4bit:
        if given:
            raise ValueError(f"--{given[0]} is for --load_in_4bit. Give --load_in_4bit as well, or leave it out.")
        return None
    values = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": options.bnb_4bit_quant_type or "nf4",  # TRL's default
        "bnb_4bit_use_double_quant": bool(options.use_bnb_nested_quant),
        "llm_int8_skip_modules": options.llm_int8_skip_modules,
    }
    return asked_for(values, "--")
