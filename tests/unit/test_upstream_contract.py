"""Every upstream name we lean on, with its arguments: a new release fails here, by name, not in a training run.

Each test says which file of ours needs it. Attributes that only exist on instances are read off small instances.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from tests.support.tiny_models import tiny_config, tiny_model


def arguments(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def source(function) -> str:
    return inspect.getsource(function)


# Transformers: loading (loading/)


def test_loader_calls_our_seam_before_weights_load():
    from transformers import PreTrainedModel

    seam = PreTrainedModel.maybe_distribute_model.__func__
    assert arguments(seam) == ["cls", "model", "distributed_config", "mesh_manager"]
    text = source(PreTrainedModel.from_pretrained)
    call = text.index("maybe_distribute_model(model, distributed_config")
    assert text.index("get_model_conversion_mapping(") < call < text.index("_load_pretrained_model(")
    assert "if distributed_config is not None:" in text[:call]


def test_an_empty_distributed_config_distributes_nothing():
    from transformers.distributed import DistributedConfig

    sizes = {name: value for name, value in vars(DistributedConfig()).items() if name.endswith("_size")}
    assert sizes
    assert set(sizes.values()) <= {1, None}


def test_loader_reads_slices_of_dtensors():
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.distributed.sharding_utils import DtensorShardOperation

    assert arguments(DtensorShardOperation.shard_tensor) == ["self", "source", "tensor_idx", "device", "dtype"]
    assert "DtensorShardOperation(empty_param)" in source(convert_and_load_state_dict_in_model)


def test_loading_report_keys(tiny):
    """``output_loading_info`` gives the four lists that check_loading_info turns into errors."""
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(tiny("qwen3_moe"), output_loading_info=True)
    assert {"missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"} <= set(info)
    assert not any(info.values())


def test_renaming_and_conversion_rules():
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        Concatenate,
        MergeModulelist,
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    model = tiny_model("qwen3_moe")
    assert arguments(get_model_conversion_mapping)[:2] == ["model", "key_mapping"]
    assert arguments(rename_source_key)[:5] == [
        "source_key",
        "weight_renamings",
        "weight_converters",
        "base_model_prefix",
        "meta_state_dict",
    ]
    transforms = get_model_conversion_mapping(model)
    assert all(isinstance(t, (WeightConverter, WeightRenaming)) for t in transforms)
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    key = "model.layers.0.mlp.experts.3.up_proj.weight"
    name, pattern = rename_source_key(key, [], converters, "model", model.state_dict())
    assert name == "model.layers.0.mlp.experts.gate_up_proj"
    (converter,) = [c for c in converters if pattern in c.source_patterns]
    assert pattern.endswith("up_proj.weight")
    assert [type(step) for step in converter.operations] == [MergeModulelist, Concatenate]
    assert len(converter.target_patterns) == 1


def test_loaded_model_remembers_conversions_for_saving(tiny):
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    model = AutoModelForCausalLM.from_pretrained(tiny("qwen3_moe"))
    assert model._weight_conversions
    assert arguments(revert_weight_conversion) == ["model", "state_dict"]
    assert "model.layers.0.mlp.experts.7.down_proj.weight" in revert_weight_conversion(model, model.state_dict())


def test_what_finds_the_conversions_of_an_export(tiny):
    """conversion_groups: the rules that ``revert_weight_conversion`` takes, reversed, name what belongs together."""
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, dot_natural_key

    model = AutoModelForCausalLM.from_pretrained(tiny("qwen3_moe"))
    assert "add_legacy" in arguments(get_model_conversion_mapping)
    assert issubclass(PrefixChange, WeightRenaming)
    assert sorted(["a.10", "a.9"], key=dot_natural_key) == ["a.9", "a.10"]
    (down,) = [
        rule.reverse_transform()
        for rule in model._weight_conversions
        if isinstance(rule, WeightConverter) and "down_proj" in rule.target_patterns[0]
    ]
    renamed, pattern = down.rename_source_key("model.layers.3.mlp.experts.down_proj")
    assert pattern is not None
    assert renamed.startswith("model.layers.3.mlp.experts.")
    assert down.rename_source_key("model.norm.weight") == ("model.norm.weight", None)


def test_dtype_plan_and_head_initialisation():
    """keep_float32 and draw_heads_whole."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import build_glob_alternation

    assert arguments(PreTrainedModel._get_dtype_plan) == ["self", "dtype"]
    assert isinstance(tiny_model("qwen3_moe")._get_dtype_plan(torch.float32), dict)
    pattern, groups, _ = build_glob_alternation(["a.b", "c"])
    match = pattern.search("a.b")
    assert groups[match.lastgroup] == "a.b"
    assert arguments(PreTrainedModel._init_weights) == ["self", "module"]


# Transformers: the trainer (trainer/)

HOOKS = {
    "create_accelerator_and_postprocess": ["self"],
    "_move_model_to_device": ["self", "model", "device"],
    "create_optimizer": ["self", "model"],
    "_clip_grad_norm": ["self", "model"],
    "_get_grad_norm": ["self", "model", "grad_norm"],
    "get_tp_size": ["self"],
    "get_cp_size": ["self"],
    "save_model": ["self", "output_dir", "_internal_call"],
    "_save": ["self", "output_dir", "state_dict"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_save_optimizer_and_scheduler": ["self", "output_dir"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "_load_best_model": ["self"],
    "_get_output_dir": ["self", "trial"],
    "_get_num_items_in_batch": ["self", "batch_samples", "device"],
    "hyperparameter_search": None,
}


@pytest.mark.parametrize("hook", HOOKS)
def test_trainer_hooks(hook: str):
    from transformers import Trainer

    found = arguments(getattr(Trainer, hook))
    assert HOOKS[hook] is None or found == HOOKS[hook]


def test_everything_our_trainer_overrides_exists_upstream():
    """A hook that upstream renames would be dead code here; ours keep upstream's arguments."""
    from transformers import Trainer

    import hf_fsdpturbo

    own = {"__init__"}
    for ours in inspect.getmro(hf_fsdpturbo.FSDPTurboTrainer):
        if not ours.__module__.startswith("hf_fsdpturbo"):
            continue
        for name, function in vars(ours).items():
            theirs = getattr(Trainer, name, None)
            if not inspect.isfunction(function) or theirs is None or name in own:
                continue
            variadic = {"args", "kwargs"} & set(arguments(function))
            assert variadic or set(arguments(function)) <= set(arguments(theirs)), f"{ours.__name__}.{name}"


def test_trainer_decides_by_these_attributes():
    from transformers import Trainer

    text = source(Trainer)
    for name in ("is_fsdp_enabled", "is_distributed_loading_by_transformers", "model_wrapped", "callback_handler"):
        assert name in text
    assert "get_tp_size()" in source(Trainer.compute_loss)
    order = source(Trainer._prepare_for_training)
    assert order.index("self.create_optimizer()") < order.index("self._wrap_model(")


def test_norm_is_asked_for_once_a_step():
    """``_clip_grad_norm`` when clipping, then ``_get_grad_norm`` with what it returned, or None."""
    from transformers import Trainer

    text = source(Trainer._run_epoch)
    assert "self._clip_grad_norm(model)" in text
    assert "self._get_grad_norm(model" in text


# accelerate (trainer/mixin.py, parallel_state.py)


def test_prepared_models_pass_through():
    from accelerate import Accelerator

    text = source(Accelerator.prepare_model)
    assert "evaluation_mode" in arguments(Accelerator.prepare_model)
    assert "_is_accelerate_prepared" in source(Accelerator.prepare) + text + source(Accelerator._prepare_one)


def test_loader_reads_axis_names_of_the_state_mesh():
    from accelerate import Accelerator, data_loader

    text = source(data_loader.prepare_data_loader)
    assert "torch_device_mesh" in arguments(data_loader.prepare_data_loader)
    for axis in ('"dp_shard"', '"cp"', '"tp"'):
        assert axis in text or axis.replace('"', "'") in text, axis
    assert "state.device_mesh" in source(Accelerator.prepare_data_loader) or "torch_device_mesh" in source(Accelerator)


def test_distributed_type_names():
    from accelerate.utils import DistributedType

    names = {member.name for member in DistributedType}
    assert {"FSDP", "DEEPSPEED", "MEGATRON_LM", "MULTI_GPU", "MULTI_CPU", "MULTI_NPU"} <= names


# TRL (parallelize/build.py, trl.py)


def test_trl_loads_models_through_one_function():
    from trl.trainer import sft_trainer
    from trl.trainer.utils import create_model_from_path

    found = arguments(create_model_from_path)
    assert found[:2] == ["model_id", "architecture"]
    assert inspect.signature(create_model_from_path).parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD
    assert "create_model_from_path" in source(sft_trainer.SFTTrainer.__init__)
    text = source(create_model_from_path)
    assert "float32" in text, "TRL's default dtype is a master copy in float32"
    assert "from_pretrained(model_id, **kwargs)" in text, "loading info passes through"


def test_fused_head_reads_lm_head_directly():
    """Why embedding, norm and lm_head stay in the root unit."""
    from trl.trainer import utils

    assert "lm_head" in source(utils)
    assert hasattr(utils, "add_fused_lm_head")


def test_sft_scales_its_loss_by_processes():
    from trl import SFTTrainer

    text = source(SFTTrainer.compute_loss)
    assert "self.accelerator.num_processes // self.get_tp_size()" in text
    assert "weighted_aux_loss / steps" in text


# Experts modules (sharding/expert_parallel.py, sharding/expert_fsdp.py)

FLAGS = {
    "qwen3_moe": {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True},
    "gpt_oss": {"has_gate": True, "has_bias": True, "is_transposed": True, "is_concatenated": False},
}


@pytest.mark.parametrize("family", FLAGS)
def test_flags_of_experts_modules(family: str):
    experts = tiny_model(family).model.layers[0].mlp.experts
    assert {flag: getattr(experts, flag) for flag in FLAGS[family]} == FLAGS[family]
    assert arguments(type(experts).forward)[:2] == ["self", "hidden_states"]
    assert len(arguments(type(experts).forward)) == 4  # then expert index and weight, called by position
    assert experts.num_experts == 8


def test_gate_rows_come_first_in_qwen3_moe():
    """``down(silu(gate(x)) * up(x))`` with gate in the first half of gate_up_proj."""
    from transformers.integrations.moe import _default_apply_gate

    experts = tiny_model("qwen3_moe").model.layers[0].mlp.experts
    assert type(experts)._apply_gate is _default_apply_gate
    rows = torch.randn(5, 32)
    index = torch.full((5, 1), 3)
    gate, up = experts.gate_up_proj[3].chunk(2)
    expected = (nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ experts.down_proj[3].T
    torch.testing.assert_close(experts(rows, index, torch.ones(5, 1)), expected, rtol=1e-5, atol=1e-7)


def test_expert_plans_name_the_experts():
    config = tiny_config("mixtral")
    assert config.base_model_ep_plan["layers.*.mlp.experts"] == "ep_dispatch_experts"


def test_models_name_their_decoder_layers():
    for family in FLAGS:
        model = tiny_model(family)
        assert [type(layer).__name__ for layer in model.model.layers][0] in model._no_split_modules
