"""The one sharded run of `make quick`: two ranks, expert parallel, against one process. The rest is in `make test`."""

from __future__ import annotations

import math

from tests.support.compare import compare
from tests.support.reference_run import Run, sharded_and_reference
from tests.support.tiny_models import VOCAB_SIZE, texts


def test_loss_norm_and_gradients_equal_one_process(tiny):
    args = {"gradient_accumulation_steps": 2, "max_steps": 2}
    run = Run(tiny("qwen3_moe"), {"text": texts(24)}, args, {"ep_size": 2})
    record, reference, _ = sharded_and_reference({"quick": run}, 2)["quick"]
    comparison = compare(record, reference)
    print(comparison.report)
    assert comparison, comparison.report
    assert len(record.gradients) == len(record.grad_norms) == len(record.losses) == 2
    assert set(record.gradients[0]) == set(record.weights), "a parameter has no gradient"
    assert math.isclose(record.losses[0], math.log(VOCAB_SIZE), abs_tol=0.3), "it does not train on text"
