"""Where documents begin: from position ids, cumulative lengths and sequence ids; and that recompute sees its own."""

import pytest
import torch

from hf_fsdpturbo.kernels import linear_attention
from hf_fsdpturbo.kernels.apply import apply_kernels
from hf_fsdpturbo.packing import documents as documents_module
from hf_fsdpturbo.packing.documents import derive_documents
from tests.support.linear_attention_model import VOCAB, small_qwen3_5_moe


def lengths(documents):
    return None if documents is None else documents.cu_seqlens_cpu.tolist()


def test_position_ids():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    documents = derive_documents(2, 6, position_ids=positions)
    assert lengths(documents) == [0, 3, 5, 6, 12]
    assert documents.ids.diff().bool().tolist() == [[False, False, True, False, True], [False] * 5]
    assert documents.cu_seqlens.dtype == torch.int32


def test_rows_that_are_one_document():
    assert derive_documents(2, 4) is None
    assert derive_documents(2, 4, position_ids=torch.arange(4).expand(2, -1)) is None
    assert derive_documents(2, 4, position_ids=torch.arange(7, 11)[None]) is None
    assert derive_documents(1, 1, position_ids=torch.tensor([[5]])) is None


def test_padding_is_never_read():
    left = torch.tensor([[0, 0, 0, 1, 2, 3]])
    assert lengths(derive_documents(1, 6, position_ids=left)) == [0, 1, 2, 6]
    right = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]])
    assert lengths(derive_documents(1, 8, position_ids=right)) == [0, 3, 5, 6, 7, 8]


def test_multi_axis_ids_take_no_part_but_stacked_text_positions_do():
    text = torch.tensor([[0, 1, 2, 0, 1, 2]])
    image = torch.tensor([[0, 1, 1, 1, 2, 3]])
    assert derive_documents(1, 6, position_ids=torch.stack([image] * 3)) is None
    stacked = torch.stack([torch.arange(6)[None], image, image, image])
    assert derive_documents(1, 6, position_ids=stacked) is None
    assert lengths(derive_documents(1, 6, position_ids=torch.stack([text, image, image, image]))) == [0, 3, 6]


def test_explicit_sources_come_first():
    positions = torch.arange(6)[None]
    cumulative = torch.tensor([0, 2, 6], dtype=torch.int32)
    assert lengths(derive_documents(1, 6, position_ids=positions, cu_seq_lens_q=cumulative)) == [0, 2, 6]
    ids = torch.tensor([[0, 0, 0, 0, 1, 1]], dtype=torch.int32)
    assert lengths(derive_documents(1, 6, cu_seq_lens_q=cumulative, seq_idx=ids)) == [0, 4, 6]


def last_documents_in_a_global(monkeypatch):
    """The design that the keyword avoids: layers read the documents of whatever forward began last."""
    latest = {}
    derive, make = documents_module.derive_documents, linear_attention.make_rule

    def remember(*args, **kwargs):
        latest["documents"] = derive(*args, **kwargs)
        return latest["documents"]

    def make_forgetful(choice):
        rule = make(choice)
        return lambda *args, documents=None, **kwargs: rule(*args, documents=latest["documents"], **kwargs)

    monkeypatch.setattr(documents_module, "derive_documents", remember)
    monkeypatch.setattr(linear_attention, "make_rule", make_forgetful)


def test_the_recompute_test_can_fail(monkeypatch):
    last_documents_in_a_global(monkeypatch)
    with pytest.raises(AssertionError):
        test_recompute_uses_the_documents_of_its_own_forward(True)


def test_fsdp_leaves_the_keyword_alone():
    """On its way to a layer FSDP casts and moves what it finds in containers: the CPU copy has to stay on the CPU."""
    from torch.distributed.utils import _apply_to_tensors, _to_kwargs

    documents = derive_documents(1, 4, position_ids=torch.tensor([[0, 1, 0, 1]]))
    assert _apply_to_tensors(lambda t: t + 1, {"documents": documents})["documents"] is documents
    _, moved = _to_kwargs((), {"documents": documents}, torch.device("meta"), False)
    assert moved[0]["documents"] is documents
    assert documents.cu_seqlens_cpu.tolist() == [0, 2, 4]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_uses_the_documents_of_its_own_forward(use_reentrant):
    """Another forward with other documents runs between forward and backward: gradients must not notice."""

    def gradient(checkpoint):
        model = small_qwen3_5_moe().train()
        report = apply_kernels(model, None, "cpu")
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        ids = torch.randint(0, VOCAB, (1, 30), generator=torch.Generator().manual_seed(3))
        positions = torch.cat([torch.arange(10), torch.arange(20)])[None]
        loss = model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss
        with torch.no_grad():
            model(input_ids=ids, position_ids=torch.arange(30)[None], use_cache=False)
        loss.backward()
        report.close()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    plain, recomputed = gradient(False), gradient(True)
    assert plain.keys() == recomputed.keys()
    for name, expected in plain.items():
        torch.testing.assert_close(recomputed[name], expected, rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
