"""Tests of peers that pass with their own class and must not pass with ours, each with the reason we defend.

Keys are the end of a test's id, without its parameters.

TRL's tests of commit f2cd577 (older than the release that is installed; tests of names it no longer has fail with
both, and those that need images or an accelerator are skipped): reward 50 of 55, DPO 77 of 114, SFT 78 of 260 pass
with TRL's classes, and the same ones with ours.

Transformers' tests of 5.2.0.dev0 (9ffc481008; 5.24 is installed; ``sentencepiece`` and ``parameterized`` beside it):
test_trainer 120 of 195 pass with its class (61 are skipped: slow, staging, accelerators, optional packages), and the
same ones with ours; callback 40 of 41, and 37 with ours; jit_checkpoint 17 of 17 and utils 18 of 18 with both.
"""

from __future__ import annotations

OWN_CALLBACKS = (
    "the whole list of callbacks is compared, and ours has two more: NonFinite watches in one process too "
    "(on_nonfinite), Telemetry measures where fsdpturbo_metrics asks for it"
)

EXPECTED: dict[str, str] = {
    "TrainerCallbackTest::test_custom_callback_added_at_init": OWN_CALLBACKS,
    "TrainerCallbackTest::test_default_callbacks_are_present": OWN_CALLBACKS,
    "TrainerCallbackTest::test_printer_callback_when_tqdm_disabled": OWN_CALLBACKS,
}
