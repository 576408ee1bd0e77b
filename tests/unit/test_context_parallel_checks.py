"""What context parallelism cannot do exactly is refused by name, before anything is changed."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_fsdpturbo.context_parallel.exactness import check_model, requested_attention
from hf_fsdpturbo.context_parallel.local_attention import KERNELS
from tests.support.tiny_models import tiny_config


def on_meta(kind, **overrides):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(kind, **overrides))


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("size", [2, 4])
def test_known_families_are_accepted(kind, size):
    check_model(on_meta(kind), size)


def test_gpt_oss_is_accepted_with_eager():
    check_model(on_meta("gpt_oss", attn_implementation="eager"), 2)


@pytest.mark.parametrize(
    ("kind", "overrides", "size", "words"),
    [
        ("qwen3_moe", {}, 3, ["num_attention_heads=4", "layers.0", "cp_size=3"]),
        ("qwen3_5_moe", {"num_attention_heads": 8, "num_key_value_heads": 4}, 8, ["linear_num_value_heads=4"]),
        ("qwen3_moe", {"attention_dropout": 0.1}, 2, ["attention_dropout=0.1"]),
        (
            "qwen3_moe",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            2,
            ["rope_type='dynamic'"],
        ),
    ],
)
def test_refused_by_name(kind, overrides, size, words):
    with pytest.raises(ValueError, match="cp_size") as error:
        check_model(on_meta(kind, **overrides), size)
    for word in words:
        assert word in str(error.value)


def refused(model, *words):
    before = copy.deepcopy(model.config)
    with pytest.raises(ValueError, match="cp_size=2") as error:
        check_model(model, 2)
    assert model.config._attn_implementation == before._attn_implementation
    for word in words:
        assert word in str(error.value)


def test_unknown_attention():
    model = on_meta("qwen3_moe")
    model.config._attn_implementation = "paged|sdpa"
    refused(model, "attn_implementation='paged|sdpa'", "sdpa", "flash_attention_2")


def test_unknown_layer_type():
    model = on_meta("qwen3_5_moe")
    model.config.layer_types[0] = "chunked_attention"
    refused(model, "layer_types[0]='chunked_attention'")


def test_layers_that_mix_positions_in_ways_of_their_own():
    model = on_meta("qwen3_moe")
    model.model.layers[1].mlp.mixer = nn.Conv1d(4, 4, 3, device="meta")
    refused(model, "model.layers.1.mlp.mixer", "Conv1d")
    model = on_meta("qwen3_moe")
    model.model.layers[1].self_attn = nn.Linear(4, 4, device="meta")
    refused(model, "model.layers.1", "neither attention nor")
    model = on_meta("qwen3_moe")
    model.model.layers[0].self_attn.indexer = nn.Linear(4, 4, device="meta")
    refused(model, "selects keys itself")


def test_a_stack_without_positions():
    class Odd(nn.Module):
        config = None

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2)])

        def forward(self, x):
            return x

    with pytest.raises(ValueError, match="no module with decoder layers"):
        check_model(Odd(), 2)


def test_registered_names_are_safe_and_reversible():
    config = tiny_config("qwen3_moe")
    for name, kernel in KERNELS.items():
        assert "flash" not in kernel.key  # Transformers would look for a hub kernel
        config._attn_implementation = kernel.key
        assert requested_attention(config) == name


def small_model(config_class, **overrides):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "intermediate_size": 32, "num_experts_per_tok": 2}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_class(**{**sizes, **more, **overrides}))


def test_windows_that_live_in_a_mask_only():
    from transformers import Qwen2MoeConfig

    experts = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    windowed = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    refused(small_model(Qwen2MoeConfig, **experts, **windowed), "sliding_window=4", "layers.0.self_attn")
    check_model(small_model(Qwen2MoeConfig, **experts), 2)
    check_model(small_model(Qwen2MoeConfig, **experts, **{**windowed, "max_window_layers": 0}), 2)  # no layer slides
    check_model(on_meta("mixtral", sliding_window=4), 2)  # its attention names its window


def test_routers_that_draw_random_numbers():
    from transformers import PhimoeConfig

    refused(on_meta("mixtral", router_jitter_noise=0.1), "router_jitter_noise=0.1")
    quiet = {"num_local_experts": 4, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0}
    refused(small_model(PhimoeConfig, **quiet), "model_type='phimoe'")
