"""The table of upstream names, its page, our sources and the installed releases say the same."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path

import pytest

from hf_fsdpturbo.kernels.rebinding import CONV, RECURRENT, ROTARY, RULE
from tests.support.upstream_scan import facts_read, is_upstream, mentions, names_set, own_names, private_names, sources
from tests.support.upstream_table import KINDS, PAGE, TABLE, Row, cells, find, render
from tests.unit.test_trainer_contract import OVERRIDES

SOURCES = sources()
OWN = own_names(SOURCES)
UNIT = Path(__file__).parent

# Private-looking names in our sources that are not upstream's.
OURS = {
    "_clock": "prefix of a file that is made to ask a file system for its time",
    "_current_frames": "sys, Python's own",
    "_deleting": "suffix of a folder that is being removed",
    "_dump_nccl_trace_json": "torch's, but only in builds with NCCL: asked for with a default",
    "_exit": "os, Python's own",
    "_fsdpturbo_unused": "ours, on a model: the tensors of its release that it does not use",
    "_gradient_divide_factor": "a field of fsdp_turbo's plan, older releases; tests/support/fsdp_turbo_stand_in",
}
# Attributes that our sources set on other objects, and that need no watching.
PUBLIC = {
    "__kwdefaults__": "of a function that we make",
    "atexit": "weakref.finalize",
    "data": "torch: storage of a parameter",
    "expert_ids_per_ep_rank": "fsdp_turbo's, which is not installed here",
    "fsdpturbo_block": "our own, on experts modules",
    "grad": "torch: gradient of a parameter",
    "hidden_size": "fsdp_turbo's dispatchers read it; the attribute is ours",
    "inference_mode": "peft: a field of an adapter's configuration",
    "loss": "a field of TRL's output, which is made for each call",
    "model_init_kwargs": "a public field of TRL's configs, filled as TRL's scripts fill it",
    "num_labels": "transformers: a public field of a config",
    "should_save": "transformers: TrainerControl is there to be set",
    "should_training_stop": "the same",
    "tape": "our own thread-local",
    "token_of_row": "our own, on experts modules",
    "vocab_size": "transformers: a public field of a config",
}

# Names that tests have from kernels/rebinding.py: RULE, RECURRENT, CONV, ROTARY.
CONSTANTS = {RULE, RECURRENT, CONV, ROTARY}


def page_rows(text: str) -> set[tuple[str, ...]]:
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {tuple(line) for line in lines}


def missing_on_page(text: str) -> list[str]:
    return sorted(row.name for row in TABLE if cells(row) not in page_rows(text))


def without_row(tree: ast.Module, file: str) -> list[str]:
    """Private names, set attributes and facts of one of our files that no row of that file has."""
    rows = [row for row in TABLE if file in row.files]
    last = {row.name.rpartition(".")[2] for row in rows}
    found = private_names(tree, OWN) | (names_set(tree, OWN) - PUBLIC.keys())
    faults = [f"{file}: {name}" for name in sorted(found - last - OURS.keys())]
    facts = " ".join(row.why for row in rows if row.kind == "fact")
    return faults + [f"{file}: {how}" for how in sorted(facts_read(tree)) if f"``{how}``" not in facts]


def identifiers(found: object) -> set[str]:
    return mentions(ast.parse(textwrap.dedent(inspect.getsource(found))))  # type: ignore[arg-type]


def test_the_page_is_the_table():
    text = PAGE.read_text(encoding="utf-8")
    assert missing_on_page(text) == []
    assert page_rows(text) == {cells(row) for row in TABLE}, "a row of the page is not in the table"
    assert text == render(), "run python -m tests.support.upstream_table"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_row_that_leaves_the_page_is_seen(row: Row):
    text = PAGE.read_text(encoding="utf-8")
    line = f"| {' | '.join(cells(row))} |\n"
    assert line in text
    assert missing_on_page(text.replace(line, "")) == [row.name]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.kind}-{row.name}")
def test_every_name_exists(row: Row):
    """In the installed release: importable, or an attribute that the object before it names in its source."""
    found, rest = find(row.name)
    assert len(rest) <= 1, f"{row.name}: {rest[0]} is gone"
    if rest:
        assert rest[0] in identifiers(found), f"{row.name} is gone"


GONE = ["transformers.Trainer._save_now", "torch.distributed.tensor._gone.compute", "torch.no"]


@pytest.mark.parametrize("name", GONE)
def test_a_name_that_is_gone_is_seen(name: str):
    with pytest.raises(AssertionError, match="is gone"):
        test_every_name_exists(TABLE[0]._replace(name=name))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.kind}-{row.name}")
def test_every_row_is_in_our_sources_and_has_a_test(row: Row):
    last = row.name.rpartition(".")[2]
    assert row.files
    for file in row.files:
        assert last in mentions(SOURCES[file]), f"{file} does not mention {last}: the row is stale"
    file, _, function = row.test.partition("::")
    tree = ast.parse((UNIT / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, row.test
    if row.kind != "fact" and function != "test_every_name_exists" and last not in CONSTANTS:
        assert last in (UNIT / file).read_text(encoding="utf-8"), f"{file} does not mention {last}"
    assert row.kind in KINDS
    assert row.why
    assert row.until


@pytest.mark.parametrize("file", SOURCES)
def test_every_private_name_in_our_sources_has_a_row(file: str):
    assert without_row(SOURCES[file], file) == []


READS = {
    "from transformers.modeling_utils import _gone": "_gone",
    "from torch.distributed._hidden import name": "name",
    "def f(model): return model._gone": "_gone",
    "def f(model): return getattr(model, '_gone')": "_gone",
    "def f(cls): return cls.__dict__['_gone']": "_gone",
    "def f(model): model.public = 1": "public",
    "def f(model): del model.public": "public",
    "from transformers import Trainer\nTrainer.train = None": "train",
    "def f(x): return x.forward.__code__.co_names": "co_names",
    "def f(x): return x.__code__.co_consts": "co_consts",
    "import inspect\ndef f(x): return inspect.getsource(x)": "getsource",
    "def f(x): return x.__globals__": "__globals__",
}


@pytest.mark.parametrize("code", READS)
def test_a_private_name_without_a_row_is_seen(code: str):
    assert without_row(ast.parse(code), "new.py") == [f"new.py: {READS[code]}"]


def test_our_own_private_names_need_no_row():
    code = "from hf_fsdpturbo import shards\nfrom hf_fsdpturbo.shards import _own\nshards._private\nself._rows = 1"
    assert without_row(ast.parse(code), "new.py") == []
    assert is_upstream("torch.nn")
    assert not is_upstream("json")
    assert not is_upstream("hf_fsdpturbo.shards")


def test_every_override_has_a_row():
    rows = {row.name.rpartition(".")[2] for row in TABLE if row.kind == "override"}
    assert rows == OVERRIDES.keys()


def test_exceptions_are_still_needed():
    found = {name for tree in SOURCES.values() for name in private_names(tree, OWN) | names_set(tree, OWN)}
    assert sorted((OURS.keys() | PUBLIC.keys()) - found) == []
