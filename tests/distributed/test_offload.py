"""`offload_params`: shards, gradients and optimizer on the host; parity with one process, checkpoint and resume.

On CPU over gloo "the host" is where everything is, so this shows the path (policies, loading, norm, checkpoints), not
the saving. `pin_memory` needs an accelerator and is refused without one.
"""

from __future__ import annotations

import pytest

from tests.distributed.test_checkpoint_resume import Layout, bit_equal
from tests.support.compare import compare
from tests.support.reference_run import Run, merge_batches, run_references, run_turbo
from tests.support.spawn import run_plain, run_ranks
from tests.support.tiny_models import texts

OFFLOAD = {"offload_params": True, "pin_memory": False}
LAYOUTS = {"ep2": (2, {"ep_size": 2}), "ep2_efsdp2": (4, {"ep_size": 2})}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(tiny, layout: str):
    ranks, sizes = LAYOUTS[layout]
    run = Run(tiny("qwen3_moe"), {"text": texts(24)}, {"max_steps": 3}, {**sizes, "dist_config": OFFLOAD})
    by_rank = run_ranks(run_turbo, ranks, run, timeout=90)
    reference = run_plain(run_references, [(run, ranks, merge_batches(by_rank))], timeout=90)[0]
    comparison = compare(by_rank[0], reference)
    print(comparison.report)
    assert comparison, comparison.report


def offloaded(run: Run) -> tuple[bool, bool]:
    """Rank function: whether every FSDP unit was told to offload, and whether experts are left to FSDP."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

    from tests.support.reference_run import build_trainer

    trainer = build_trainer(run, turbo=True)
    units = [m._get_fsdp_state() for m in trainer.model.modules() if isinstance(m, FSDPModule)]
    groups = [group for state in units for group in getattr(state, "_fsdp_param_groups", [state._fsdp_param_group])]
    experts = [m for n, m in trainer.model.named_modules() if n.endswith(".experts")]
    managed = [bool(m._get_fsdp_state()._fsdp_param_group) for m in experts]
    return all(isinstance(g.offload_policy, CPUOffloadPolicy) for g in groups if g), all(managed)


def test_every_unit_offloads(tiny):
    run = Run(tiny("qwen3_moe"), {"text": texts(8)}, {"max_steps": 1}, {"ep_size": 2, "dist_config": OFFLOAD})
    assert run_ranks(offloaded, 2, run, timeout=60) == [(True, True)] * 2


def test_resumes_with_and_without(tiny, tmp_path):
    """Six steps at once, against three, a checkpoint, and three more, with offloading or without."""
    with_offload, without = Layout(2, {"ep_size": 2, "dist_config": OFFLOAD}), Layout(2, {"ep_size": 2})
    model = tiny("qwen3_moe")
    whole = with_offload.train(with_offload.run(model), tmp_path / "a")[0]
    checkpoint = str(tmp_path / "a" / "checkpoint-3")
    for name, layout in (("b", with_offload), ("c", without)):
        again = layout.train(layout.run(model), tmp_path / name, checkpoint)[0]
        assert bit_equal(again.loaded, whole.at_save[3]) == []
        assert bit_equal(again.end, whole.end) == []
        assert {step: again.losses[step] for step in (4, 5, 6)} == {step: whole.losses[step] for step in (4, 5, 6)}
