"""The check after a load by path: it passes what is right, and names what is not."""

from __future__ import annotations

import os

import pytest
import torch

from hf_fsdpturbo.loading.files import check_checkpoint_files
from hf_fsdpturbo.loading.loading_check import check_loaded, sample_regions
from hf_fsdpturbo.loading.open_files import OpenFiles
from hf_fsdpturbo.loading.source_map import SourceMap
from hf_fsdpturbo.loading.whole_sources import exact_conversions
from hf_fsdpturbo.shards import Box


def load(path: str, **keywords):
    """A whole model, and which tensors it was made of."""
    from transformers import AutoModelForCausalLM

    found = SourceMap()
    with exact_conversions(torch.device("cpu"), found):
        model = AutoModelForCausalLM.from_pretrained(path, **keywords)
    return model, found


@pytest.mark.parametrize("mode", ["sample", "full", "off"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_what_was_loaded_passes(tiny, family: str, mode: str):
    """Several files, another dtype than on disk."""
    path = tiny(family, max_shard_size="20KB")
    model, found = load(path, dtype=torch.bfloat16)
    assert found.conversions.keys() == model.state_dict().keys()
    check_loaded(model, found, OpenFiles(path, check_checkpoint_files(path)), mode)


WRONG = {  # name -> (mode that must see it, what is done to the parameter)
    "model.layers.0.mlp.experts.gate_up_proj": ("sample", lambda t: t.copy_(t.flip(0))),
    "model.layers.1.mlp.experts.down_proj": ("sample", lambda t: t.copy_(t.roll(1, dims=2))),
    "model.layers.0.self_attn.q_proj.weight": ("sample", lambda t: t.copy_(t.flip(0))),
    "model.layers.1.input_layernorm.weight": ("sample", lambda t: t.add_(1e-6)),
    "model.embed_tokens.weight": ("full", lambda t: t[17].neg_()),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_tensor_is_named_with_its_conversion_and_file(tiny, name: str):
    path = tiny("qwen3_moe", max_shard_size="20KB")
    model, found = load(path)
    mode, change = WRONG[name]
    with torch.no_grad():
        change(model.get_parameter(name))
    with pytest.raises(ValueError, match="init_on_rank0") as caught:
        check_loaded(model, found, OpenFiles(path, check_checkpoint_files(path)), mode)
    conversion = "MergeModulelist(dim=0)" if "experts" in name else "renaming"
    for part in (name, conversion, found.conversions[name].keys[0], os.path.join(path, "model-0000")):
        assert part in str(caught.value)
    check_loaded(model, found, OpenFiles(path, check_checkpoint_files(path)), "off")


def test_samples_lie_in_this_ranks_part():
    """First, middle and last rows, a few elements of the last dim; one where it is large, none where there is none."""
    box = Box((4, 0, 100), (4, 6, 200))
    assert sample_regions(frozenset({0, 2}), [box]) == [
        {0: (4, 5), 2: (100, 164)},
        {0: (5, 6), 2: (168, 232)},
        {0: (7, 8), 2: (236, 300)},
    ]
    assert sample_regions(frozenset(), [box]) == [{}]
    assert sample_regions(frozenset({0}), [Box((4, 0, 0), (4, 2048, 2048))]) == [{0: (4, 5)}]
    assert len(sample_regions(frozenset({0}), [Box((128, 0, 0), (128, 2, 2))])) == 3
    assert sample_regions(frozenset({0, 2}), [box, Box((0, 0, 100), (4, 6, 200))])[0] == {2: (100, 164)}
    assert sample_regions(frozenset({0}), [Box((5, 0), (0, 3))]) == []


def test_the_wrapped_function_is_put_back_even_after_an_error():
    from transformers import modeling_utils

    before = modeling_utils.convert_and_load_state_dict_in_model

    def fail_while_open() -> None:
        with exact_conversions(torch.device("cpu"), SourceMap()):
            assert modeling_utils.convert_and_load_state_dict_in_model is not before
            raise KeyError

    with pytest.raises(KeyError):
        fail_while_open()
    assert modeling_utils.convert_and_load_state_dict_in_model is before
