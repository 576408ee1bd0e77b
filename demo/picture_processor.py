"""A processor for tiny Qwen3-VL models: Transformers' own needs torchvision for videos, which are not used here."""

from __future__ import annotations

from typing import Any

from transformers import AutoProcessor, PreTrainedTokenizerFast, ProcessorMixin, Qwen3VLMoeConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

IMAGE, START, END, VIDEO = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"
PATCH = 8  # pixels; four patches make a token
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + START + IMAGE + END + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


class PictureProcessor(ProcessorMixin):
    """Image processor and tokenizer of Qwen3-VL: each image in a text becomes as many tokens as it has merged patches.

    Args:
        image_processor: of Qwen2-VL, which Qwen3-VL uses.
        tokenizer: with the tokens of :func:`add_tokens`.
        chat_template: Jinja.
    """

    return_mm_token_type_ids = True

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **kwargs: Any
    ) -> None:
        self.image_token, self.video_token = IMAGE, VIDEO
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE)
        self.video_token_id = tokenizer.convert_tokens_to_ids(VIDEO)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **kwargs: Any) -> str:
        """What stands in the text for one image."""
        return IMAGE * int(image_inputs["image_grid_thw"][image_idx].prod() // self.image_processor.merge_size**2)


def make_processor(tokenizer: PreTrainedTokenizerFast, largest: int = 64) -> PictureProcessor:
    """A processor round a tokenizer, which gets the image tokens; images have up to ``largest`` pixels a side."""
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE, START, END, VIDEO]})
    size = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": largest**2}
    images = Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, temporal_patch_size=2, size=size)
    return PictureProcessor(images, tokenizer, chat_template=TEMPLATE)


AutoProcessor.register(Qwen3VLMoeConfig, PictureProcessor, exist_ok=True)
