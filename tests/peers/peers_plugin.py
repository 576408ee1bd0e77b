"""A pytest plugin for other people's tests: our trainer classes under their names, everything on the CPU.

PEERS_CLASSES=ours python -m pytest -p peers_plugin .../trl/tests/test_sft_trainer.py
PEERS_CLASSES=ours python -m pytest -p peers_plugin .../transformers/tests/trainer/test_trainer.py
"""

from __future__ import annotations

import importlib
import os
from typing import Any

OF_OTHER_RELEASES = {
    "transformers": ("GlueDataset", "GlueDataTrainingArguments", "DataCollatorForWholeWordMask"),
    "trl.import_utils": ("is_joblib_available",),
    "trl.trainer.sft_trainer": ("_chunked_cross_entropy_loss", "_patch_chunked_ce_lm_head", "dft_loss"),
}
"""What tests of a checkout near the installed release import, and it does not have: their own tests then fail."""


def pytest_configure(config: Any) -> None:
    import transformers
    import trl

    for module, names in OF_OTHER_RELEASES.items():
        asked = importlib.import_module(module)
        for name in names:
            if not hasattr(asked, name):
                setattr(asked, name, lambda: False)
    own = transformers.TrainingArguments.__post_init__

    def on_cpu(self: Any) -> None:
        self.use_cpu = True  # TRL's bf16 default asks for it where there is no accelerator
        own(self)

    transformers.TrainingArguments.__post_init__ = on_cpu
    if os.environ.get("PEERS_CLASSES") == "ours":
        import hf_fsdpturbo

        transformers.Trainer = hf_fsdpturbo.FSDPTurboTrainer
        for name in ("SFTTrainer", "DPOTrainer", "RewardTrainer"):
            setattr(trl, name, getattr(hf_fsdpturbo, f"FSDPTurbo{name}"))
