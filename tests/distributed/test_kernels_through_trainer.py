"""kernel_config and ep_backend fsdp_turbo through TRL's SFT trainer: parity with one plain process, fp32."""

import pytest

from hf_fsdpturbo.kernels.apply import apply_kernels
from tests.support import upstream_ranks
from tests.support.compare import compare
from tests.support.reference_run import Record, Run, merge_batches, run_references, run_turbo, sharded_and_reference
from tests.support.spawn import run_plain, run_ranks
from tests.support.tiny_models import texts

CHUNK_16 = {"name": "auto, flash-linear-attention", "chunk_size": 16}
PACK = {"packing": True, "max_length": 32}


def keep_documents_apart(model) -> None:
    """For the reference too: stock Transformers lets packed documents leak through linear attention."""
    apply_kernels(model, None, "cpu")


def with_stand_in(run: Run) -> Record:
    """Rank function: a run that finds the fsdp_turbo stand-in."""
    upstream_ranks.configure()
    return run_turbo(run)


@pytest.fixture(scope="module")
def outcome(tiny):
    data = {"text": texts(48)}
    model = tiny("qwen3_5_moe", layers=4)
    runs = {
        "chunk 16": Run(model, data, {}, {"ep_size": 2, "kernel_config": CHUNK_16}),
        "packed": Run(model, data, PACK, {"ep_size": 2}, as_object=True, prepare=keep_documents_apart),
    }
    return sharded_and_reference(runs, 2, timeout=200, yardstick=runs)


@pytest.mark.parametrize("name", ["chunk 16", "packed"])
def test_linear_attention(outcome, name):
    record, reference, second = outcome[name]
    comparison = compare(record, reference, yardstick=second)
    assert comparison, comparison.report
    if name == "packed":
        positions = [b["position_ids"] for b in record.batches if "position_ids" in b]
        assert any((p.diff(dim=-1) < 0).any() for p in positions), "no batch held two documents"


@pytest.mark.parametrize("layout", [(2, {"ep_size": 2}), (4, {"ep_size": 2})], ids=["ep2", "ep2_efsdp2"])
def test_fsdp_turbo_backend(tiny, layout):
    world_size, sizes = layout
    turbo = {**sizes, "dist_config": {"ep_backend": "fsdp_turbo"}}
    run = Run(tiny("qwen3_moe"), {"text": texts(48)}, {"gradient_accumulation_steps": 2}, turbo)
    records = run_ranks(with_stand_in, world_size, run, timeout=120)
    (reference,) = run_plain(run_references, [(run, world_size, merge_batches(records))], timeout=120)
    comparison = compare(records[0], reference)
    assert comparison, comparison.report
    assert all(record.digest == records[0].digest for record in records)
