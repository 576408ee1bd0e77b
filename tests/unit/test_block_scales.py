"""Codes and scales in full: bit for bit Transformers' own dequantisation, whole and in parts; pairs of keys."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_fsdpturbo.loading.open_files import OpenFiles
from hf_fsdpturbo.quantised import block_scales
from hf_fsdpturbo.quantised.methods import PackedAs, check_asked, packed_as, refuse_settings
from hf_fsdpturbo.quantised.packed_pairs import paired

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MXFP4, FLOAT8 = PackedAs("mxfp4"), PackedAs("fp8", (8, 4))
FILE = "model.safetensors"


def same(a: Tensor, b: Tensor) -> bool:
    """The same bits; what is not a number has several."""
    zero = torch.zeros((), dtype=a.dtype)
    found = [torch.where(t.isnan(), zero, t).contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(*found)


def opened(folder, tensors: dict[str, Tensor], release: PackedAs) -> OpenFiles:
    """A file of these tensors as the loader sees it."""
    save_file(tensors, folder / FILE)
    return OpenFiles(str(folder), paired(str(folder), headers_of(tensors), release))


CODES = {torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
CODES |= {torch.float8_e8m0fnu: "F8_E8M0", torch.float32: "F32", torch.bfloat16: "BF16", torch.int32: "I32"}


def headers_of(tensors: dict[str, Tensor]) -> dict[str, dict[str, dict]]:
    return {FILE: {key: {"dtype": CODES[t.dtype], "shape": list(t.shape)} for key, t in tensors.items()}}


def theirs_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales, dtype=dtype)


def theirs_float8(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(SimpleNamespace())._dequantize_one(weight, scales, dtype)


def drawn_mxfp4() -> dict[str, Tensor]:
    """Every number under every scale, in either half of a byte; 3 experts, R = 86, C = 64."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(33)[: 3 * 86 * 2 * 16].reshape(3, 86, 2, 16)
    return {
        "a.w_blocks": codes,
        "a.w_scales": torch.arange(3 * 86 * 2).remainder(256).to(torch.uint8).reshape(3, 86, 2),
    }


def all_float8(scales: Tensor, code: torch.dtype = torch.float8_e4m3fn) -> dict[str, Tensor]:
    """Every code under these scales: [n, 16] rows of blocks of 8 x 4."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16).repeat(len(scales) // 2, 1)
    return {"a.weight": codes.view(code), "a.weight_scale_inv": scales}


EXPONENTS = torch.arange(256, dtype=torch.uint8).reshape(64, 4)
SCALES = {
    "float32": torch.randn(64, 4).exp(),
    "bfloat16": torch.randn(64, 4).exp().bfloat16(),
    "ue8m0": EXPONENTS.view(torch.float8_e8m0fnu),
    "bytes": EXPONENTS,
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_under_every_scale_has_transformers_bits(tmp_path, dtype):
    held = drawn_mxfp4()
    got = opened(tmp_path, held, MXFP4)["a.w"].read((), dtype)
    assert got.shape == (3, 64, 86)
    assert same(got, theirs_mxfp4(*held.values(), dtype))
    for name, scales in SCALES.items():
        for code in (torch.float8_e4m3fn, torch.float8_e5m2):
            held = all_float8(scales, code)
            got = opened(tmp_path, held, FLOAT8)["a.weight"].read((), dtype)
            assert same(got, theirs_float8(*held.values(), dtype)), (name, code)


def test_other_forms_have_transformers_bits_too(tmp_path):
    """Half bytes (DeepSeek-V4's experts); a stack with a stack of scales; one scale a matrix, or a row."""
    half = {"a.weight": torch.randint(-128, 128, (6, 16), dtype=torch.int8), "a.scale": torch.rand(6, 4)}
    stack = {"experts.w": torch.randn(3, 16, 8).to(torch.float8_e4m3fn), "experts.w_scale_inv": torch.rand(3, 2, 2)}
    for key, held, release in (
        ("a.weight", half, PackedAs("fp8", (1, 8))),
        ("experts.w", stack, FLOAT8),
        *(("a.weight", {**all_float8(SCALES["float32"]), "a.weight_scale_inv": one}, PackedAs("fp8"))
          for one in (torch.rand(()), torch.rand(1), torch.rand(1, 1), torch.rand(512, 1))),
    ):  # fmt: skip
        files = opened(tmp_path, held, release)
        assert list(files) == [key]
        weight, scales = held.values()
        want = theirs_float8(weight, scales, torch.bfloat16)
        assert tuple(files[key].get_shape()) == tuple(want.shape)
        assert same(files[key].read((), torch.bfloat16), want)


def test_the_last_block_may_be_cut(tmp_path):
    """DeepSeek-V3's kv_a_proj_with_mqa has 576 rows in blocks of 128: five scales. Transformers refuses it."""
    held = {"a.weight": torch.randn(9, 6).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.rand(3, 2)}
    got = opened(tmp_path, held, PackedAs("fp8", (4, 4)))["a.weight"].read((), torch.float32)
    scales = held["a.weight_scale_inv"].repeat_interleave(4, 0)[:9].repeat_interleave(4, 1)[:, :6]
    assert torch.equal(got, held["a.weight"].float() * scales)


@pytest.mark.parametrize("at_once", [1, 2**20])
def test_a_part_has_the_bits_of_the_whole(tmp_path, monkeypatch, at_once):
    """Wherever it is cut: in a block, in a byte, at nothing; all rows at once, or no more than a row of blocks."""
    monkeypatch.setattr(block_scales, "AT_ONCE", at_once)
    draw = random.Random(0)
    for held, release, key in (
        (drawn_mxfp4(), MXFP4, "a.w"),
        (all_float8(SCALES["float32"][:8]), FLOAT8, "a.weight"),
        ({"w": torch.randn(3, 16, 8).to(torch.float8_e4m3fn), "w_scale_inv": torch.rand(3, 2, 2)}, FLOAT8, "w"),
        (
            {"a.weight": torch.randint(-128, 128, (6, 16), dtype=torch.int8), "a.scale": torch.rand(6, 4)},
            FLOAT8,
            "a.weight",
        ),
    ):
        files = opened(tmp_path, held, release)
        source, sizes, read = files[key], [0], files.read
        monkeypatch.setattr(files, "read", lambda *asked, r=read, s=sizes: (s.append(r(*asked).numel()), r(*asked))[1])
        whole = source.read((), torch.bfloat16)
        for _ in range(10):
            cuts = [sorted(draw.choices(range(size + 1), k=2)) for size in whole.shape]
            index = tuple(slice(*cut) for cut in cuts)
            assert same(source.read(index, torch.bfloat16), whole[index]), index
        assert at_once > 1 or max(sizes) <= source.packed.block[0] * source.packed.shape[-1]
        assert same(source[...], source.read((slice(None),), torch.float32))


def of_another_expert(read, file, key, index):
    moved = (slice(1, 2), *index[1:]) if key.endswith("_scales") else index
    return read(file, key, moved)


HALVES, STORED = block_scales.half_bytes, block_scales._scales


def high_half_first(codes: Tensor) -> Tensor:
    codes = codes.view(torch.uint8)
    return HALVES(codes << 4 | codes >> 4)


FAULTS = {
    "high half first": ("half_bytes", high_half_first),
    "another table": ("E2M1", tuple(reversed(block_scales.E2M1))),
    "another bias": ("_scales", lambda stored, code: STORED(stored, code) - 1),
}


@pytest.mark.parametrize("fault", [*FAULTS, "scales of another expert", "transposed"])
def test_a_fault_put_back_is_seen(tmp_path, monkeypatch, fault):
    held = drawn_mxfp4()
    files = opened(tmp_path, held, MXFP4)
    want = theirs_mxfp4(*held.values(), torch.bfloat16)
    if fault in FAULTS:
        monkeypatch.setattr(block_scales, *FAULTS[fault])
    elif fault == "transposed":
        monkeypatch.setattr(block_scales.Packed, "is_transposed", False)
    else:
        read = files.read
        monkeypatch.setattr(files, "read", lambda *asked: of_another_expert(read, *asked))
    assert not same(files["a.w"].read((), torch.bfloat16), want)


F8, SCALE = torch.zeros(16, 8, dtype=torch.float8_e4m3fn), torch.zeros(2, 2)
U8 = torch.zeros(2, 4, 1, 16, dtype=torch.uint8)
WRONG = {  # name -> (release, tensors, what the message must have)
    "no scales": (FLOAT8, {"a.weight": F8}, ("a.weight has dtype F8_E4M3", "no a.weight_scale_inv")),
    "no scales of a stack": (FLOAT8, {"experts.w": F8}, ("experts.w has dtype", "no experts.w_scale_inv")),
    "no weight": (FLOAT8, {"a.weight_scale_inv": SCALE}, ("a.weight_scale_inv", "scales without a weight")),
    "a block that does not divide": (
        FLOAT8,
        {"a.weight": F8, "a.weight_scale_inv": torch.zeros(3, 2)},
        ("a.weight has shape (16, 8)", "(3, 2)", "weight_block_size=[8, 4]"),
    ),
    "scales of another stack": (
        FLOAT8,
        {"w": F8.reshape(2, 8, 8), "w_scale_inv": torch.zeros(3, 1, 2)},
        ("w has shape (2, 8, 8)", "(3, 1, 2)"),
    ),
    "a vector": (FLOAT8, {"a.weight": F8.reshape(-1), "a.weight_scale_inv": SCALE}, ("only matrices",)),
    "integers": (FLOAT8, {"a.weight": torch.zeros(4, 4, dtype=torch.int32), "a.scale": SCALE}, ("has dtype I32",)),
    "scales of integers": (FLOAT8, {"a.weight": F8, "a.scale": SCALE.int()}, ("a.scale has dtype I32",)),
    "no scales of blocks": (MXFP4, {"w_blocks": U8}, ("w_blocks has no scales", "no w_scales")),
    "no blocks": (MXFP4, {"w_scales": U8[..., 0]}, ("w_scales are scales without codes", "w_blocks")),
    "groups of 16": (
        MXFP4,
        {"w_blocks": U8[..., :8], "w_scales": U8[..., 0]},
        ("w_blocks has shape (2, 4, 1, 8)", "[E, R, C/32, 16]"),
    ),
    "scales of fewer rows": (MXFP4, {"w_blocks": U8, "w_scales": U8[:, :3, :, 0]}, ("(2, 3, 1)",)),
    "float blocks": (MXFP4, {"w_blocks": U8.float(), "w_scales": U8[..., 0]}, ("F32 and U8",)),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_belong_together_is_named_with_its_file(case):
    release, tensors, parts = WRONG[case]
    with pytest.raises(ValueError, match=r"/there/model\.safetensors: ") as caught:
        paired("/there", headers_of(tensors), release)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_what_is_stored_in_full_stays_and_scales_of_activations_go():
    whole = {"norm.weight": torch.zeros(8), "b.weight": torch.zeros(4, 4), "b.bias": torch.zeros(4)}
    held = {"a.weight": F8, "a.weight_scale_inv": SCALE, "a.activation_scale": torch.zeros(()), **whole}
    assert set(paired("", headers_of(held), FLOAT8)[FILE]) == {"a.weight", *whole}
    assert set(paired("", headers_of(whole), MXFP4)[FILE]) == set(whole)


def test_what_a_config_and_a_setting_say():
    from transformers import BitsAndBytesConfig, FineGrainedFP8Config, Mxfp4Config

    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 64], "modules_to_not_convert": ["lm_head"]}
    assert packed_as({}, "it") is None
    assert packed_as({"quantization_config": fp8}, "it") == PackedAs("fp8", (128, 64))
    assert packed_as({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, "it") == MXFP4
    assert packed_as({"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}, "it") == PackedAs(
        "fp8"
    )
    for found, part in (
        ({"quant_method": "gptq"}, "quant_method='gptq'"),
        ({"load_in_4bit": True}, "quant_method"),
        ({**fp8, "weight_block_size": [128]}, "weight_block_size"),
        ({**fp8, "weight_block_size": [0, 128]}, "weight_block_size"),
        ({**fp8, "modules_to_convert": ["embed_tokens"]}, "modules_to_convert"),
    ):
        with pytest.raises(ValueError, match=part):
            packed_as({"quantization_config": found}, "it")
    good = (Mxfp4Config(dequantize=True), {"quant_method": "mxfp4", "dequantize": True})
    for setting in good:
        refuse_settings({"quantization_config": setting})
        check_asked(setting, MXFP4, "it")
    check_asked(FineGrainedFP8Config(dequantize=True), PackedAs("mxfp8"), "it")
    check_asked(None, None, "it")
    for setting, part in ((Mxfp4Config(), "dequantize"), (BitsAndBytesConfig(load_in_4bit=True), "not supported")):
        with pytest.raises(ValueError, match=part):
            refuse_settings({"quantization_config": setting})
    for release in (FLOAT8, None):
        with pytest.raises(ValueError, match=r"Mxfp4Config\(dequantize=True\), but it is"):
            check_asked(good[0], release, "it")
