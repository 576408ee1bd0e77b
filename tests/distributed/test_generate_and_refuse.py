"""Decisions about sharded models: generation keeps ranks in step, images are refused, the aux loss is told."""

from __future__ import annotations

import pytest
import torch

from tests.support.reference_run import Run, build_trainer
from tests.support.spawn import run_plain, run_ranks
from tests.support.tiny_models import texts

PROMPTS = [[5, 9, 12], [7, 3, 8, 21, 30]]
NEW_TOKENS = [3, 9]  # ranks stop at different lengths: without synchronised steps the longer one would wait for ever


def generate(run: Run) -> list[list[int]]:
    """Rank function: each rank continues its own prompt; then parameters are shards again."""
    from torch.distributed.tensor import DTensor

    trainer = build_trainer(run, turbo=True)
    rank = trainer.args.process_index
    trainer.model.eval()
    with torch.no_grad():
        ids = torch.tensor([PROMPTS[rank]])
        out = trainer.model.generate(ids, max_new_tokens=NEW_TOKENS[rank], do_sample=False, eos_token_id=None)
    assert all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    return out.tolist()


def generate_plain(path: str) -> list[list[list[int]]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return [
        model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, eos_token_id=None).tolist()
        for ids, new in zip(PROMPTS, NEW_TOKENS, strict=True)
    ]


def test_generation_of_unequal_lengths_equals_one_process(tiny):
    run = Run(tiny("qwen3_moe"), {"text": texts(8)}, {"max_steps": 1}, {"ep_size": 2})
    assert run_ranks(generate, 2, run, timeout=60) == run_plain(generate_plain, run.model, timeout=60)


def refusals(path: str, output: str) -> tuple[str, str | None, str | None]:
    """Rank function: what an image batch says, and the aux-loss line of Trainer and of SFT."""
    from transformers import AutoModelForCausalLM

    from hf_fsdpturbo import FSDPTurboSFTTrainer, FSDPTurboTrainer, FSDPTurboTrainingArguments
    from hf_fsdpturbo.trainer.refusals import aux_loss_warning

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_router_logits=True)
    args = FSDPTurboTrainingArguments(
        output_dir=output, use_cpu=True, ep_size=2, report_to="none", gradient_accumulation_steps=3
    )
    trainer = FSDPTurboTrainer(model, args)
    said = ""
    try:
        trainer._prepare_inputs({"input_ids": torch.ones(1, 4, dtype=torch.long), "pixel_values": torch.ones(1, 3)})
    except ValueError as error:
        said = str(error)
    return said, aux_loss_warning(type(trainer), model, args), aux_loss_warning(FSDPTurboSFTTrainer, model, args)


def test_images_are_refused_and_the_aux_loss_is_told(tiny, tmp_path):
    for said, warned, quiet in run_ranks(refusals, 2, tiny("qwen3_moe"), str(tmp_path), timeout=60):
        assert "pixel_values" in said
        assert "6 times" in (warned or "")
        assert quiet is None


@pytest.mark.parametrize("inputs", [None, {"input_ids": 1}, {"pixel_values": None}])
def test_text_batches_pass(inputs):
    from hf_fsdpturbo.parallelize.order import ShardingReport
    from hf_fsdpturbo.trainer.refusals import refuse_images

    refuse_images(inputs, ShardingReport({}, "eager", no_images="there is no tower"))
