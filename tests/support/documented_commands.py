"""Every command that a page shows, and what runs it: a test, its parser, or nothing, for a named reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
STARTS = ("hf-fsdpturbo ", "make ", "accelerate launch ", "torchrun ", "python -m ", "python benchmarks/",
          "python3 benchmarks/", "python3 -m ", "srun ", "vllm ")  # fmt: skip


class Shown(NamedTuple):
    """A command as written, continuation lines joined, and its page."""

    page: str
    command: str


def pages() -> list[Path]:
    """README and all pages."""
    return [
        ROOT / "README.md",
        ROOT / "benchmarks" / "README.md",
        ROOT / "SECURITY.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]


def shown(page: Path) -> list[Shown]:
    """Commands in blocks, and in the text between backquotes, of one page; a comment after one is not of it."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found, fenced, part = [], False, ""
    name = page.relative_to(ROOT).as_posix()
    for line in lines:
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        if not (fenced or line.startswith("    ")):
            part = ""
            spans = (span.strip() for span in re.findall(r"`([^`]+)`", line))
            found += [Shown(name, span) for span in spans if span.startswith(STARTS)]
            continue
        text = f"{part} {line.strip()}".strip()
        if text.endswith("\\"):
            part = text[:-1].strip()
            continue
        part = ""
        text = re.split(r"\s+#\s", text)[0].strip()
        if text.startswith(STARTS):
            found.append(Shown(name, text))
    return found


HARDWARE = "not run: needs {}"
GPU, NPU, CLUSTER, HUB = (
    HARDWARE.format(what)
    for what in ("an NVIDIA GPU", "an Ascend NPU", "several machines", "a model or data set of the Hub")
)
# First match wins. What runs it: a file of tests/, "parsed: <file of tests/>", or "not run: ...".
RUN_BY: list[tuple[str, str]] = [
    (r"srun ", CLUSTER),
    (r"torchrun .*--nnodes", CLUSTER),
    (r"accelerate launch .*--num_machines", CLUSTER),
    (r"accelerate launch .*npu_", NPU),
    (
        r"accelerate launch .*cpu_ep2\.yaml recipes/sft\.py --config recipes/demo_sft\.yaml",
        "distributed/test_demo_end_to_end.py",
    ),
    (r"accelerate launch ", HUB),
    (r"hf-fsdpturbo convert", "unit/test_convert.py"),
    (r"hf-fsdpturbo sft .*--nnodes 2", "distributed/test_installed_command.py"),
    (r"hf-fsdpturbo sft .*_recipe\.yaml", "parsed: unit/test_convert.py"),
    (r"hf-fsdpturbo (sft|dpo) --config [\w.-]+/\w+_\d+x\d+", "parsed: unit/test_commands.py"),
    (r"hf-fsdpturbo (sft|dpo|reward)$", "distributed/test_installed_command.py"),
    (r"hf-fsdpturbo (sft|dpo|reward) ", HUB),
    (r"hf-fsdpturbo plan", "unit/test_plan.py"),
    (r"hf-fsdpturbo report", "unit/test_telemetry_alone.py"),
    (r"hf-fsdpturbo verify", "distributed/test_verify_on_ranks.py"),
    (r"hf-fsdpturbo configs", "unit/test_commands.py"),
    (r"hf-fsdpturbo doctor", "unit/test_doctor.py"),
    (r"hf-fsdpturbo export .*--merge", "distributed/test_lora.py"),
    (r"hf-fsdpturbo export", "distributed/test_installed_command.py"),
    (r"hf-fsdpturbo merge", "unit/test_merge.py"),
    (r"hf-fsdpturbo report", "unit/test_telemetry_alone.py"),
    (r"vllm ", "not run: vLLM is not installed"),
    (r"make (demo|demo-dpo|demo-reward)$", "distributed/test_demo_end_to_end.py"),
    (r"make demo-vl$", "not run: minutes; its trainer and processor are those of distributed/test_images.py"),
    (r"make (test|quick|lint)", "not run: it runs the tests"),
    (r"make (fuzz|families|matrix|peers|chaos|verify)", "not run: hours, or minutes; its parts are in make test"),
    (r"python3? -m tests\.families", "distributed/test_families.py"),
    (r"python3? -m tests\.models_recipes", "not run: minutes; tests compare what it wrote with plan, and run one"),
    (r"python3? -m tests\.support\.", "unit/test_upstream_table.py"),
    (r"python3? -m tests\.(device|fuzz|peers)", "not run: minutes, or a GPU"),
    (r"python3? (-m )?benchmarks", "not run: a measurement is no test"),
]


def run_by(command: str) -> str | None:
    """What runs a command; None where the table has no row for it."""
    return next((by for pattern, by in RUN_BY if re.match(pattern, command)), None)
