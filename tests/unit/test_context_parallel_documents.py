"""Packed documents at cp_size 1: models that would let them read each other get masks of their own."""

import pytest
import torch

from hf_fsdpturbo.packing.prepared_masks import keep_documents_apart, masks_ignore_documents
from tests.support.compare import distance
from tests.support.tiny_models import VOCAB_SIZE, tiny_model

LENGTHS = (9, 1, 14)


def packed():
    ids = torch.randint(3, VOCAB_SIZE, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    return ids, torch.cat([torch.arange(n) for n in LENGTHS])[None]


def apart(model, ids):
    with torch.no_grad():
        return torch.cat([model(input_ids=part).logits for part in ids.split(LENGTHS, dim=1)], dim=1)


def test_gpt_oss_leaks_and_is_helped():
    model = tiny_model("gpt_oss", sliding_window=6, attn_implementation="eager").eval()
    ids, positions = packed()
    expected = apart(model, ids)
    with torch.no_grad():
        leaking = model(input_ids=ids, position_ids=positions).logits
        single = model(input_ids=ids).logits
        keep_documents_apart(model)
        helped = model(input_ids=ids, position_ids=positions).logits
        assert torch.equal(model(input_ids=ids).logits, single)
    assert distance(leaking, expected) > 1e-3  # the fault, before
    assert distance(helped, expected) < 1e-6


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe", "mixtral", "deepseek_v3"])
def test_others_keep_documents_apart_by_themselves(kind):
    model = tiny_model(kind)
    keep_documents_apart(model)
    assert not model.base_model._forward_pre_hooks
    assert not masks_ignore_documents(model.base_model)


def test_generation_is_left_alone():
    model = tiny_model("gpt_oss", sliding_window=6, attn_implementation="eager").eval()
    ids, _ = packed()
    before = model.generate(ids, max_new_tokens=4, do_sample=False)
    keep_documents_apart(model)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), before)
