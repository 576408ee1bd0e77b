"""Images without ranks: what lies beside a text model, rows whose pictures are bad, samples cut from a batch."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pictures
from trl.data_utils import prepare_multimodal_messages

from hf_fsdpturbo.images import (
    ImageTokens,
    NamedRows,
    beside_text,
    check_pictures,
    images_of_first,
    may_have_images,
    note_images,
    undecoded,
    why_not,
)
from hf_fsdpturbo.images.decoding import decode
from tests.families.listing import families
from tests.families.tiny import tiny_config
from tests.support.tiny_models import tiny_tokenizer
from tests.support.tiny_pictures import IMAGE, make_processor, picture

MESSAGES = List({"role": Value("string"), "content": Value("string")})
TALK = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "red"}]


@functools.cache
def on_meta(name: str) -> Any:
    import transformers

    family = families()[name]
    with torch.device("meta"):
        return getattr(transformers, family.architecture)(
            tiny_config(transformers.CONFIG_MAPPING[family.model_type], name)
        )


@pytest.mark.parametrize(
    ("family", "towers"),
    [
        ("qwen3_vl_moe", ["model.visual"]),
        ("ernie4_5_vl_moe", ["model.vision_tower", "model.resampler_model"]),
        ("minimax_m3_vl", ["model.vision_tower", "model.multi_modal_projector"]),
        ("qwen3_moe", []),
        ("qwen3_5_moe_text", []),
    ],
)
def test_what_lies_beside_the_text_model(family: str, towers: list[str]):
    model = on_meta(family)
    found = beside_text(model)
    assert list(found.towers) == towers
    assert found.parameters == set(model.parameters()) - {*model.get_decoder().parameters(), model.lm_head.weight}


def test_an_encoder_is_no_tower():
    assert not beside_text(on_meta("switch_transformers")).parameters


def test_parameters_of_the_holder_count():
    model = on_meta("unlimited_ocr")
    assert model.model.image_newline in beside_text(model).parameters


def test_reasons_against_images():
    model = on_meta("qwen3_vl_moe")
    experts = ["model.language_model.layers.0.mlp.experts"]
    assert why_not(model, experts, 1, True) is None
    assert why_not(model, experts, 2, True) is None
    assert "cp_size=2" in why_not(on_meta("minimax_m3_vl"), [], 2, True)
    assert "column of images" in why_not(model, experts, 1, False)
    assert "model.visual" in why_not(model, ["model.visual.blocks.0.experts"], 1, True)
    assert "nothing that reads them" in why_not(on_meta("qwen3_moe"), [], 1, True)


def test_columns_say_whether_there_may_be_images():
    text = Dataset.from_dict({"text": ["a"]})
    pictures = Dataset.from_dict({"images": [["a.png"]], "messages": [TALK]})
    assert not may_have_images([text, None], None)
    assert not may_have_images([{"a": text}], None)
    assert may_have_images([text, {"a": text, "b": pictures}], None)
    assert may_have_images([text], lambda rows: rows)
    assert may_have_images([iter([{"pixel_values": 1}])], None)


def rows(images: list[Any], messages: Any = None) -> Dataset:
    """As users have them: paths or bytes in a column of images, not decoded."""
    features = Features({"images": List(Image()), "messages": MESSAGES})
    return Dataset.from_dict({"images": images, "messages": [messages or TALK] * len(images)}, features=features)


def png(path: Path) -> str:
    Pictures.new("RGB", (8, 8), (200, 0, 0)).save(path)
    return str(path)


def test_good_pictures_pass(tmp_path: Path):
    good = png(tmp_path / "good.png")
    data = rows([[good], [], None, [{"path": None, "bytes": Path(good).read_bytes()}]])
    check_pictures("train_dataset", data, 0, 1, prepare_multimodal_messages)
    check_pictures("train_dataset", Dataset.from_dict({"text": ["a"]}), 0, 1, None)
    check_pictures("train_dataset", iter([]), 0, 1, None)


@pytest.mark.parametrize("case", ["missing", "no picture", "null", "no bytes"])
def test_bad_pictures_are_named(tmp_path: Path, case: str):
    good, bad = png(tmp_path / "good.png"), str(tmp_path / "bad.png")
    if case == "no picture":
        Path(bad).write_text("hello")
    value = {"null": None, "no bytes": {"path": None, "bytes": b""}}.get(case, bad)
    data = rows([[good], [good, value]])
    with pytest.raises(ValueError, match=r"train_dataset: row 1, column 'images', image 1") as raised:
        check_pictures("train_dataset", data, 1, 2, prepare_multimodal_messages)
    if case in ("missing", "no picture"):
        assert bad in str(raised.value)
    check_pictures("train_dataset", data, 0, 2, None)  # the other rank's share


def test_numbers_of_images_that_differ_from_the_text(tmp_path: Path):
    good = png(tmp_path / "good.png")
    no_user = [{"role": "assistant", "content": "red"}]
    with pytest.raises(ValueError, match=r"row 0, column 'images' and column 'messages'.*\(1\)"):
        check_pictures("train_dataset", rows([[good]], no_user), 0, 1, prepare_multimodal_messages)


def test_a_column_of_one_image_may_not_be_null():
    features = Features({"image": Image(), "text": Value("string")})
    data = Dataset.from_dict({"image": [None], "text": ["a"]}, features=features)
    with pytest.raises(ValueError, match="column 'image'.*null.*'images' with an empty list"):
        check_pictures("eval_dataset", data, 0, 1, None)


def test_selected_rows_keep_their_own_numbers(tmp_path: Path):
    good, bad = png(tmp_path / "good.png"), str(tmp_path / "bad.png")
    data = rows([[bad], [good], [bad]]).select([1, 2])
    with pytest.raises(ValueError, match="row 1,"):
        check_pictures("train_dataset", data, 1, 2, None)


GRID = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 2]])


def test_images_of_the_first_samples():
    """Samples with 1, 0, 2 images, twice (chosen and rejected); patches 4, 8, 4."""
    pixels = torch.arange(16).repeat(2)[:, None]
    tensors = {"pixel_values": pixels, "image_grid_thw": GRID.repeat(2, 1)}
    found = images_of_first(tensors, torch.tensor([1, 0, 2]), 2)
    assert found["image_grid_thw"].tolist() == [[1, 2, 2]] * 2
    assert found["pixel_values"].flatten().tolist() == [0, 1, 2, 3] * 2
    whole = images_of_first(tensors, torch.tensor([1, 0, 2]), 3)
    assert torch.equal(whole["pixel_values"], pixels)
    assert images_of_first({**tensors, "pixel_values": pixels[1:]}, torch.tensor([1, 0, 2]), 2) is None
    assert images_of_first(tensors, None, 2) is None
    assert images_of_first({}, None, 2) == {}


def test_no_image_left_leaves_no_tensor():
    tensors = {"pixel_values": torch.zeros(16, 1), "image_grid_thw": GRID}
    assert images_of_first(tensors, torch.tensor([0, 3]), 1) == {}


def test_collated_samples_are_counted():
    batch: dict[str, Any] = {"pixel_values": torch.zeros(1)}
    note_images(batch, [{"images": [1, 2]}, {"images": []}])
    assert batch["images_per_sample"].tolist() == [2, 0]
    text: dict[str, Any] = {"input_ids": torch.zeros(1)}
    note_images(text, [{"images": []}])
    assert list(text) == ["input_ids"]


def test_bytes_are_read_as_files_are(tmp_path: Path):
    content = io.BytesIO()
    Pictures.new("RGB", (8, 8)).save(content, "PNG")
    check_pictures("train_dataset", rows([[{"path": "gone.png", "bytes": content.getvalue()}]]), 0, 1, None)


def test_pictures_are_decoded_as_the_data_set_would(tmp_path: Path):
    good = png(tmp_path / "good.png")
    data = rows([[good], []])
    stored, decoders = undecoded(data)
    samples = [stored[0], stored[1]]
    assert samples[0]["images"][0]["path"] == good
    decode(samples, decoders, "train_dataset")
    assert samples[0]["images"][0].tobytes() == data[0]["images"][0].tobytes()
    assert samples[1]["images"] == []
    with pytest.raises(ValueError, match=r"a row, column 'images', image 0: file .*gone.png cannot be read"):
        decode([{"images": [{"path": str(tmp_path / "gone.png"), "bytes": None}]}], decoders, "train_dataset")


def test_a_users_own_transform_gets_decoded_pictures(tmp_path: Path):
    data = rows([[png(tmp_path / "good.png")]]).with_transform(lambda batch: batch)
    stored, decoders = undecoded(data)
    assert not decoders
    sample = stored.__getitems__([0])[0]
    assert sample.row == 0
    assert sample["images"][0].size == (8, 8)


@functools.cache
def collators() -> dict[str, Any]:
    """TRL's own, by what they read, as its trainers make them."""
    from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    processor = make_processor(tiny_tokenizer())
    made = DataCollatorForVisionLanguageModeling(processor)
    cut = DataCollatorForVisionLanguageModeling(processor, max_length=12)
    return {
        "messages": made, "text": made, "completion": made, "chosen": DataCollatorForVisionPreference(processor),
        "messages, cut": cut, "completion, cut": cut,
    }  # fmt: skip


def samples_of(kind: str, images: list[Any]) -> tuple[Any, dict[str, Any]]:
    """Rows of a data set with these images as a data loader has them."""
    kind = kind.partition(",")[0]
    user, answer = TALK[:1], TALK[1:]
    columns: dict[str, Any] = {
        "messages": {"messages": TALK},
        "text": {"text": f"{IMAGE} what?"},
        "completion": {"prompt": user, "completion": answer},
        "chosen": {"prompt": user, "chosen": answer, "rejected": answer},
    }[kind]
    data = Dataset.from_dict({"images": images} | {name: [value] * len(images) for name, value in columns.items()})
    stored, decoders = undecoded(data.cast_column("images", List(Image())))
    return stored.__getitems__(list(range(len(images)))), decoders


TOKENS = ImageTokens(make_processor(tiny_tokenizer()).image_token_id, 4)


def refusal(kind: str, images: list[Any]) -> str:
    samples, decoders = samples_of(kind, images)
    with pytest.raises(ValueError, match="train_dataset: row 1, column 'images'") as raised:
        NamedRows(collators()[kind], decoders, "train_dataset", TOKENS)(samples)
    return str(raised.value)


@pytest.mark.parametrize("kind", ["messages", "completion", "chosen"])
@pytest.mark.parametrize("several", [False, True])
def test_rows_whose_picture_cannot_be_read_are_named_in_a_batch(tmp_path: Path, kind: str, several: bool):
    """Beyond the rows that set-up looks at, in SFT and DPO, alone and behind a good one."""
    good, bad = str(tmp_path / "good.png"), tmp_path / "bad.png"
    picture(0).save(good)
    before = [good] if several else []
    for content in (None, Path(good).read_bytes()[:200], b"hello"):
        bad.unlink(missing_ok=True)
        if content is not None:
            bad.write_bytes(content)
        text = refusal(kind, [[good], [*before, str(bad)], []])
        assert f"column 'images', image {len(before)}: file {bad} cannot be read" in text
    stored = [[{"path": None, "bytes": content}] for content in (Path(good).read_bytes(), b"hello")]
    assert "image 0: a picture of 5 bytes without a name cannot be read" in refusal(kind, stored)


@pytest.mark.parametrize("kind", ["text", "messages, cut", "completion, cut"])
def test_rows_with_other_places_than_images_are_named_in_a_batch(tmp_path: Path, kind: str):
    """Places in plain text, which set-up does not read; and those that truncation takes."""
    good = png(tmp_path / "good.png")
    large = str(tmp_path / "large.png")
    Pictures.new("RGB", (64, 64)).save(large)
    images = [[good], [good, good]] if kind == "text" else [[], [good, large]]
    text = refusal(kind, images)
    assert f"(file {good}, file {images[1][1]})" in text


@pytest.mark.parametrize("kind", ["messages", "text", "completion", "chosen"])
def test_good_rows_make_the_batch_that_they_made(tmp_path: Path, kind: str):
    good = png(tmp_path / "good.png")
    images = [[good], [good]] if kind == "text" else [[good, good], [], [good]]
    samples, decoders = samples_of(kind, [value or None for value in images])  # null: none, as an empty list
    batch = NamedRows(collators()[kind], decoders, "train_dataset", TOKENS)(samples)
    again, _ = samples_of(kind, images)
    decode(again, decoders, "")
    plain = collators()[kind](again)
    assert batch.keys() == plain.keys()
    assert all(torch.equal(batch[name], plain[name]) for name in plain)


def test_an_error_of_all_rows_is_not_one_rows():
    def collate(samples: Any) -> Any:
        raise ValueError("not supported")

    with pytest.raises(ValueError, match=r"^not supported$"):
        NamedRows(collate, {}, "train_dataset", None)([{"images": []}, {"images": []}])
