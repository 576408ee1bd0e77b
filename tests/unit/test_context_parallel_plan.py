"""The plan of a sequence and the kernels on whole heads: masks, documents, windows, against a dense reference."""

import pytest
import torch
from torch import nn

from hf_fsdpturbo.context_parallel import local_attention
from hf_fsdpturbo.context_parallel.local_attention import KERNELS, Call
from hf_fsdpturbo.context_parallel.ulysses import head_copies
from hf_fsdpturbo.packing.sequence_plan import make_plan

BATCH, LENGTH, HEADS, GROUPS, WIDTH = 2, 12, 4, 2, 8
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2]])
IDS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2]])
LEFT = torch.ones(BATCH, LENGTH, dtype=torch.long)
LEFT[0, :3] = 0
RIGHT = LEFT.flip(1)
CASES = {
    "causal": {},
    "packed": {"position_ids": POSITIONS},
    "padded left": {"attention_mask": LEFT},
    "padded right": {"attention_mask": RIGHT},
    "packed and padded": {"position_ids": POSITIONS, "attention_mask": LEFT},
}


def plan_of(case, **more):
    return make_plan(None, BATCH, LENGTH, torch.device("cpu"), **CASES[case], **more)


def allowed(case, window):
    """[B, S, S] the slow way."""
    keep = torch.zeros(BATCH, LENGTH, LENGTH, dtype=torch.bool)
    mask = CASES[case].get("attention_mask", torch.ones(BATCH, LENGTH))
    for b in range(BATCH):
        for q in range(LENGTH):
            for k in range(q + 1):
                same = "position_ids" not in CASES[case] or IDS[b, q] == IDS[b, k]
                keep[b, q, k] = same and mask[b, k] > 0 and (window is None or q - k < window)
    return keep


def inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = ((BATCH, heads, LENGTH, WIDTH) for heads in (HEADS, GROUPS, GROUPS))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def dense(query, key, value, keep):
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2) / WIDTH**0.5).masked_fill(~keep[:, None], -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ value).transpose(1, 2)


def call(window=None, module=None, **kwargs):
    return Call(module or nn.Module(), None, window, kwargs.get("sinks"), kwargs.get("softcap"), {})


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("case", CASES)
def test_mask_is_what_may_be_read(case, window):
    plan = plan_of(case)
    keep = allowed(case, window)
    real = CASES[case].get("attention_mask", torch.ones(BATCH, LENGTH)).bool()
    mask = plan.mask(window)
    if case in ("causal", "padded right") and window != 3:
        assert mask is None  # padding at the end is out of every real query's reach
    else:
        whole = mask.expand(BATCH, 1, LENGTH, LENGTH)[:, 0]
        assert torch.equal(whole[real], keep[real])
    assert plan.mask(window) is mask  # once a forward
    additive = plan.additive_mask(window, torch.float32).expand(BATCH, 1, LENGTH, LENGTH)[:, 0] == 0
    assert torch.equal(additive[real], keep[real])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("case", CASES)
def test_sdpa(case, window):
    query, key, value = inputs()
    out = KERNELS["sdpa"].run(query, key, value, plan_of(case), call(window))
    real = CASES[case].get("attention_mask", torch.ones(BATCH, LENGTH)).bool()
    expected = dense(query, key, value, allowed(case, window))
    assert torch.allclose(out[real], expected[real], atol=1e-6)


def test_long_packed_rows_run_document_by_document(monkeypatch):
    query, key, value = inputs()
    plan = plan_of("packed")
    monkeypatch.setattr(local_attention, "LONGEST_MASKED", 4)
    out = KERNELS["sdpa"].run(query, key, value, plan, call())
    assert torch.allclose(out, dense(query, key, value, allowed("packed", None)), atol=1e-6)
    assert not any("mask" in str(key) for key in plan._kept)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("case", ["causal", "packed", "padded left"])
def test_flex(case, window, monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention
    from transformers.integrations import flex_attention as theirs

    monkeypatch.setattr(theirs, "compile_friendly_flex_attention", lambda *a, training, **k: flex_attention(*a, **k))
    query, key, value = inputs()
    out = KERNELS["flex_attention"].run(query, key, value, plan_of(case), call(window))
    real = CASES[case].get("attention_mask", torch.ones(BATCH, LENGTH)).bool()
    expected = dense(query, key, value, allowed(case, window))
    assert torch.allclose(out[real], expected[real], atol=1e-5)


class FlashStandIn:
    """Transformers' ``_flash_attention_forward`` for what we hand it: lengths or a padding mask, computed densely."""

    def __init__(self):
        self.calls = []

    def __call__(self, query, key, value, attention_mask, **kwargs):
        self.calls.append(kwargs)
        window = kwargs["sliding_window"]
        positions = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
        keep = positions[:, :, None] >= positions[:, None, :]
        if window is not None:
            keep &= positions[:, :, None] - positions[:, None, :] < window
        if (bounds := kwargs.get("cu_seq_lens_q")) is not None:
            document = torch.searchsorted(bounds.long(), positions, right=True)
            keep &= document[:, :, None] == document[:, None, :]
            assert kwargs["max_length_q"] == int(bounds.diff().max())
        if attention_mask is not None:
            keep &= attention_mask[:, None, :].bool()
        return dense(*(x.transpose(1, 2) for x in (query, key, value)), keep)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("case", ["causal", "packed", "padded left", "padded right"])
def test_flash_gets_lengths_and_masks(case, window, monkeypatch):
    from transformers import modeling_flash_attention_utils as theirs

    stand_in = FlashStandIn()
    monkeypatch.setattr(theirs, "_flash_attention_forward", stand_in)
    query, key, value = inputs()
    module = nn.Linear(2, 2)
    module.config = object()
    out = KERNELS["flash_attention_2"].run(query, key, value, plan_of(case), call(window, module))
    real = CASES[case].get("attention_mask", torch.ones(BATCH, LENGTH)).bool()
    expected = dense(query, key, value, allowed(case, window))
    assert torch.allclose(out[real], expected[real], atol=1e-6)
    assert stand_in.calls[0]["attn_implementation"] == "flash_attention_2"


def test_flash_refuses_packed_with_padding_in_front():
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="packed documents and padding"):
        KERNELS["flash_attention_2"].run(*inputs(), plan_of("packed and padded"), call(None, module))


@pytest.mark.parametrize("axes", [3, 4])
def test_only_two_dimensional_positions_pack(axes):
    rotary = POSITIONS[None].expand(axes, -1, -1).clone()
    rotary[-1] = 0  # mRoPE restarts inside a document
    plan = make_plan(None, BATCH, LENGTH, torch.device("cpu"), position_ids=rotary)
    assert (plan.documents is None) == (axes == 3)  # of four axes the first holds the text's 2-D positions


@pytest.mark.parametrize(
    ("heads", "size", "copies"), [(8, 2, 1), (2, 2, 1), (1, 4, 4), (2, 4, 2), (6, 4, 2), (4, 6, 3), (2, 3, 3)]
)
def test_head_copies(heads, size, copies):
    assert head_copies(heads, size) == copies
    assert heads * copies % size == 0


def test_positions_of_padding_are_no_documents():
    """Left-padded rows with the positions that Transformers gives them: one document each, so a mask is enough."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, :3] = 0
    for at_padding in (0, 1):
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, at_padding)
        plan = make_plan(None, BATCH, LENGTH, torch.device("cpu"), attention_mask=mask, position_ids=positions)
        assert plan.documents is None
        assert plan.valid is not None
