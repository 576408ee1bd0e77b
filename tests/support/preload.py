"""What every spawned rank needs, imported once in the fork server: importing trl costs seconds, forking does not.

`spawn.py` hands this module to the fork server. An import error here would be swallowed there and reported by the
first rank that needs the package, with its own traceback.

Beyond imports, what a process builds once and every rank would build again: Transformers' table of checkpoint
conversions compiles 900 patterns (over half of what a rank spends before its first step).
"""

import contextlib
import gc
import tempfile

import accelerate  # noqa: F401
import datasets  # noqa: F401
import pytest  # noqa: F401
import torch
import torch.distributed.checkpoint  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import transformers  # noqa: F401
import transformers.models.deepseek_v3.modeling_deepseek_v3  # noqa: F401
import transformers.models.gpt_oss.modeling_gpt_oss  # noqa: F401
import transformers.models.mixtral.modeling_mixtral  # noqa: F401
import transformers.models.qwen3_5_moe.modeling_qwen3_5_moe  # noqa: F401
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401
import transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe  # noqa: F401
from trl import DPOTrainer, RewardTrainer, SFTTrainer  # noqa: F401

with contextlib.suppress(ImportError):  # an optional package
    import peft  # noqa: F401
with contextlib.suppress(ImportError):
    import bitsandbytes  # noqa: F401

import hf_fsdpturbo.trainer
import hf_fsdpturbo.trl  # noqa: F401
from hf_fsdpturbo.sharding import unit_dtypes
from tests.support.tiny_models import save_tiny

torch.set_num_threads(1)
# Tiny embeddings lie below the size from which a float32 one gets a unit of its own beside bf16 matrices; those of
# real models do not. Vectors stay below it.
unit_dtypes.SMALL = 1024
# No backward here: autograd's threads do not survive a fork.
with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory(prefix="preload_") as folder:
    transformers.AutoModelForCausalLM.from_pretrained(save_tiny("qwen3_moe", folder))
gc.collect()
gc.freeze()  # else a rank's first collection visits, and so copies, everything that was imported
