"""The small sweep: what is known to be wrong is written down here, and nothing else may be wrong, nor less."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.checks import CRASH, REFUSED, RIGHT, WRONG
from tests.families.choices import Choices
from tests.families.listing import families
from tests.families.plain import release
from tests.families.small import SMALL
from tests.families.sweep import PREPARE, Job, carry_out, preparations
from tests.support.spawn import RankError, init_gloo, run_ranks

CHECKS_ON = {2: ("load", "train", "bf16", "near", "cp", "save_path"), 4: ("load4",)}

Verdicts = dict[tuple[str, str], tuple[str, str]]

KNOWN: Verdicts = {}
"""``(family, check)``: the verdict it has today, and the fault it is (``faults_found.md``). Empty since 2026-11-30."""


def _sweep(jobs: dict[int, list[Job]], folder: Path) -> Verdicts:
    """Verdict and detail of every job, world by world."""
    found: Verdicts = {}

    def report(note: dict) -> None:
        if "verdict" not in note:
            assert "failed" not in note, note
            return
        found[note["family"], note["check"]] = note["verdict"]["kind"], note["verdict"]["detail"]

    for world, asked in jobs.items():
        carry_out(asked, world, folder, limit=240, report=report)
    return found


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> Verdicts:
    known = families()
    chosen = [known[name] for name in SMALL]
    jobs = {1: preparations(chosen, [check for checks in CHECKS_ON.values() for check in checks])}
    jobs |= {world: [Job(f, check) for f in chosen for check in checks] for world, checks in CHECKS_ON.items()}
    return _sweep(jobs, tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("name", SMALL)
def test_family_is_right(verdicts, name: str):
    """Right everywhere (cp may be refused by name), but for what is known; what is known must still be so."""
    wrong = {}
    for (family, check), (kind, detail) in verdicts.items():
        expected = KNOWN.get((family, check), (RIGHT, ""))[0]
        allowed = {RIGHT, REFUSED} if check == "cp" and expected == RIGHT else {expected}
        if family == name and kind not in allowed:
            wrong[check] = f"{kind} instead of {expected}: {detail}"
    assert not wrong, f"{wrong} (right now? take it out of KNOWN)"
    assert {check for family, check in verdicts if family == name} == {c for cs in CHECKS_ON.values() for c in cs}


def test_known_faults_are_of_the_small_sweep():
    assert {family for family, _ in KNOWN} <= set(SMALL)


def fault_far_from_float32(folder: str, fault: str) -> tuple[str, str]:
    """Rank function: what the check says of gpt_oss with a fault in the package."""
    from tests.families.checks import CHECKS

    init_gloo()
    where, name, put_back = FAULTS[fault]
    setattr(importlib.import_module(where), name, put_back)
    verdict = CHECKS["near"].ask(families()["gpt_oss"], Path(folder) / "gpt_oss", "ep2")
    return verdict.kind, verdict.detail


FAULTS: dict[str, tuple[str, str, Any]] = {
    "none": ("builtins", "print", print),
    "norms, biases and the embedding in bf16": (
        "hf_fsdpturbo.parallelize.order",
        "float32_parameters",
        lambda model, dtype: set(),
    ),
    "another choice of experts": ("tests.families.nearness", "Choices", lambda given: Choices(None)),
}


def test_a_far_gradient_is_seen(tmp_path):
    """And a run that is not held to the truth's choices does not pass for a near one."""
    family = families()["gpt_oss"]
    _sweep({1: preparations([family], ["near"])}, tmp_path)
    assert run_ranks(fault_far_from_float32, 2, str(tmp_path), "none", timeout=90)[0][0] == RIGHT
    kind, detail = run_ranks(fault_far_from_float32, 2, str(tmp_path), list(FAULTS)[1], timeout=90)[0]
    assert (kind, "further from float32" in detail) == (WRONG, True), detail
    with pytest.raises(RankError, match="other experts than in the truth"):
        run_ranks(fault_far_from_float32, 2, str(tmp_path), "another choice of experts", timeout=90)


def test_faults_are_seen_and_do_not_end_the_sweep(tmp_path):
    """Two rows of a released tensor change places, another family has no files: wrong, a crash, the next is right."""
    from safetensors.torch import load_file, save_file

    known = families()
    chosen = [known[name] for name in ("mixtral", "olmoe", "qwen3_moe")]
    _sweep({1: [Job(family, PREPARE) for family in chosen]}, tmp_path)
    file = Path(release(tmp_path / "mixtral")) / "model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if key.endswith("experts.1.w2.weight"))
    tensors[key] = tensors[key][torch.tensor([1, 0, *range(2, len(tensors[key]))])].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    (tmp_path / "olmoe" / "plain.pt").unlink()
    jobs = [Job(family, check) for family in chosen for check in ("load", "train")]
    found = _sweep({2: jobs}, tmp_path)
    kinds = {key: kind for key, (kind, _) in found.items()}
    assert kinds == {
        ("mixtral", "load"): WRONG,
        ("mixtral", "train"): WRONG,
        ("olmoe", "load"): CRASH,
        ("olmoe", "train"): CRASH,
        ("qwen3_moe", "load"): RIGHT,
        ("qwen3_moe", "train"): RIGHT,
    }
    assert found["mixtral", "load"][1].startswith("1 of"), found["mixtral", "load"]
