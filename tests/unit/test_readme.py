"""What README.md promises in tables and code is what the package does."""

import ast
import re
from pathlib import Path

import hf_fsdpturbo
from hf_fsdpturbo.parallel_state import Topology

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_layout_table():
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d*) ?\| (\d+) \| \(([\d, ]+)\) \|", README, re.MULTILINE)
    assert len(rows) >= 8
    for world, ep, efsdp, cp, mesh in rows:
        found = Topology.resolve(
            int(world), ep_size=int(ep), efsdp_size=int(efsdp) if efsdp else None, cp_size=int(cp)
        )
        shape = (found.edp_size, found.efsdp_size, found.ep_size, found.cp_size)
        assert shape == tuple(map(int, mesh.split(", "))), (world, ep, efsdp, cp)


def test_imports_in_the_code_blocks_exist():
    lines = [line.strip() for line in README.splitlines() if line.startswith("    from hf_fsdpturbo import")]
    assert lines
    for line in lines:
        for alias in ast.parse(line).body[0].names:
            assert hasattr(hf_fsdpturbo, alias.name), alias.name


def test_files_it_names_exist():
    paths = set(re.findall(r"\b((?:accelerate_configs|recipes|requirements|docs|demo)/[\w./-]*\w)", README))
    assert {"recipes/sft.py", "accelerate_configs/cuda_ep8.yaml"} <= paths
    assert [path for path in sorted(paths) if not (ROOT / path.removesuffix("npu_")).exists()] == []


def test_make_targets_it_names_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"^    make (\w+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
