"""demo/two_ranks.ipynb is a notebook without outputs, its code compiles, and the files and options it names exist."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTEBOOK = json.loads((ROOT / "demo" / "two_ranks.ipynb").read_text(encoding="utf-8"))
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_it_is_clean():
    assert NOTEBOOK["nbformat"] == 4
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    for number, source in enumerate(CODE):
        compile(source, f"cell {number}", "exec")


def test_what_it_runs_is_there():
    from hf_fsdpturbo.cli import COMMANDS

    source = "\n".join(CODE)
    for file in ("demo/make_inputs.py", "recipes/demo_sft.yaml"):
        assert file in source
        assert (ROOT / file).is_file()
    assert (ROOT / "accelerate_configs" / "cpu_ep2.yaml").is_file()
    assert {"sft", "report"} <= COMMANDS.keys()
