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


def test_loader_calls_the_function_that_rank_0_stands_in_for():
    """``weights_from_rank0`` replaces it by name, takes its arguments by position, and returns its two results."""
    from transformers import PreTrainedModel
    from transformers.modeling_utils import LoadStateDictConfig

    loader = PreTrainedModel.__dict__["_load_pretrained_model"]
    assert isinstance(loader, staticmethod)
    assert arguments(loader) == ["model", "state_dict", "checkpoint_files", "load_config", "expected_keys"]
    text = source(PreTrainedModel.from_pretrained)
    assert "loading_info, disk_offload_index = cls._load_pretrained_model(" in text
    assert "weight_mapping" in LoadStateDictConfig.__dataclass_fields__


def test_fields_of_the_loading_report():
    """All six, in upstream's order: a seventh, or one renamed, would leave rank 0's report half filled."""
    from transformers.utils.loading_report import LoadStateDictInfo

    fields = {name: field.type for name, field in LoadStateDictInfo.__dataclass_fields__.items()}
    assert list(fields) == [
        "missing_keys",
        "unexpected_keys",
        "mismatched_keys",
        "error_msgs",
        "conversion_errors",
        "skipped_pp_keys",
    ]
    assert [str(getattr(kind, "__origin__", kind).__name__) for kind in fields.values()] == [
        "set", "set", "set", "list", "dict", "set",
    ]  # fmt: skip


def test_generate_asks_whether_fsdp_manages_the_model(monkeypatch):
    """Then all ranks generate until the last one is done; without it one rank leaves the others waiting."""
    from transformers.generation import utils

    model = tiny_model("qwen3_moe")
    assert not utils.is_fsdp_managed_module(model)
    model._is_fsdp_managed_module = True
    assert utils.is_fsdp_managed_module(model)
    asked = []
    monkeypatch.setattr(utils, "is_fsdp_managed_module", lambda module: asked.append(module))
    model.generate(torch.tensor([[3, 4]]), max_new_tokens=1, do_sample=False)
    assert asked == [model]


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


def test_loader_wraps_shards_in_one_function():
    """whole_sources.py puts another in its place, which leaves a shard on the host."""
    from transformers import core_model_loading

    assert arguments(core_model_loading._dtensor_from_local_like) == ["local_tensor", "ref"]
    assert "_dtensor_from_local_like(local_param, ref)" in source(core_model_loading.set_param_for_module)


def test_loader_converts_and_loads_in_one_function():
    """whole_sources.py wraps it in modeling_utils, and sets and converts as it does."""
    from transformers import core_model_loading, modeling_utils
    from transformers.utils.loading_report import LoadStateDictInfo

    load = modeling_utils.convert_and_load_state_dict_in_model
    assert load is core_model_loading.convert_and_load_state_dict_in_model
    assert arguments(load) == ["model", "state_dict", "load_config", "disk_offload_index"]
    text = source(modeling_utils.PreTrainedModel._load_pretrained_model)
    assert "loading_info, disk_offload_index = convert_and_load_state_dict_in_model(" in text
    assert arguments(core_model_loading.set_param_for_module) == [
        "model", "target_name", "param_value", "loading_info", "hf_quantizer",
    ]  # fmt: skip
    assert {"missing_keys", "unexpected_keys", "mismatched_keys"} <= set(LoadStateDictInfo.__dataclass_fields__)
    wanted = {"weight_mapping", "dtype_plan", "hf_quantizer"}
    assert wanted <= set(modeling_utils.LoadStateDictConfig.__dataclass_fields__)


def test_what_bitsandbytes_leaves_out():
    """choice.py asks the functions that Transformers' own 4-bit quantiser asks."""
    from transformers.quantizers import base, quantizer_bnb_4bit, quantizers_utils

    text = source(quantizer_bnb_4bit.Bnb4BitHfQuantizer._process_model_before_weight_loading)
    assert "self.quantization_config.llm_int8_skip_modules, model._keep_in_fp32_modules" in text
    assert "get_keys_to_not_convert(model)" in source(base.HfQuantizer.get_modules_to_not_convert)
    assert arguments(quantizers_utils.should_convert_module) == ["full_name", "patterns"]


def test_loader_names_sources_as_source_map_does():
    """source_map.py repeats these lines: order, two tries at a name, one converter a target, dtype of sources."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model

    text = source(convert_and_load_state_dict_in_model)
    for line in (
        "pattern_to_converter = {k: converter for converter in converters for k in converter.source_patterns}",
        "state_dict = sorted(state_dict.items(), key=lambda kv: dot_natural_key(kv[0]))",
        "if renamed_key not in meta_model_state_dict and original_key in meta_model_state_dict:",
        "new_converter = deepcopy(pattern_to_converter[source_pattern])",
        "_dtype = dtype_plan[dtype_policy_by_group_name[matched_dtype_pattern.lastgroup]]",
        "_dtype = empty_param.dtype",
        "renamed_key.replace(mapping.target_patterns[0], k)",
    ):
        assert line in text, line


def test_converters_take_sources_that_are_read_late():
    """whole_sources.py gives them callables, a model that shows other shapes, and a config."""
    from transformers.core_model_loading import Split, WeightConverter

    assert arguments(WeightConverter.add_tensor) == ["self", "target_key", "source_key", "source_pattern", "future"]
    assert arguments(WeightConverter.convert)[:4] == ["self", "layer_name", "model", "config"]
    converter = WeightConverter("qk", ["q", "k"], operations=[Split(0)])
    converter.add_tensor("a.q", "a.qk", "qk", lambda: torch.arange(3))

    class Shown:
        def get_parameter(self, name: str) -> torch.Tensor:
            return {"a.q": torch.empty(2), "a.k": torch.empty(1)}[name]

    made = converter.convert("a.q", model=Shown(), config=None)
    assert {name: value.tolist() for name, value in made.items()} == {"a.q": [0, 1], "a.k": [2]}


def test_operations_hold_the_dims_that_the_list_of_conversions_names():
    from transformers import core_model_loading

    from hf_fsdpturbo.loading.conversions import STACKS, TOUCHED

    for name, places in TOUCHED.items():
        kind = getattr(core_model_loading, name)
        attributes = [place for place in (*places, STACKS.get(name)) if isinstance(place, str)]
        assert all(isinstance(getattr(kind(), attribute), int) for attribute in attributes), name


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


def test_a_missing_file_can_be_asked_for_quietly(tmp_path):
    """loading/files.py: None instead of an error."""
    from transformers.utils import cached_file

    quiet = {
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    assert cached_file(str(tmp_path), "nothing.json", local_files_only=True, **quiet) is None
    with pytest.raises(OSError, match="nothing.json"):
        cached_file(str(tmp_path), "nothing.json", local_files_only=True)
    from transformers.utils.hub import cached_files

    assert set(quiet) <= set(arguments(cached_files))


def test_marks_of_filled_tensors():
    """``_is_hf_initialized`` on a tensor keeps it from being drawn; on others it says that a checkpoint had them."""
    model = tiny_model("qwen3_moe")
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = nn.Parameter(torch.full_like(layer.weight, 7.0))
    layer._is_hf_initialized = False
    layer.weight._is_hf_initialized = True
    model._initialize_weights(layer)
    assert (layer.weight == 7.0).all()
    layer._is_hf_initialized = layer.weight._is_hf_initialized = False
    model._initialize_weights(layer)
    assert not (layer.weight == 7.0).any()


def test_private_records_of_models_and_configs(tiny):
    from transformers import AutoConfig, PreTrainedModel, TrainingArguments
    from transformers.distributed import mixin

    path = tiny("qwen3_moe")
    config = AutoConfig.from_pretrained(path, attn_implementation="eager")
    assert config._name_or_path == str(path)
    assert config._attn_implementation == "eager"
    assert PreTrainedModel._keys_to_ignore_on_save is None
    assert "_keys_to_ignore_on_save" in source(PreTrainedModel.save_pretrained)
    assert "model._device_mesh = " in source(mixin)
    assert "self._n_gpu = " in source(TrainingArguments)


def test_conversions_keep_their_original_patterns():
    from transformers.conversion_mapping import get_model_conversion_mapping

    for conversion in get_model_conversion_mapping(tiny_model("qwen3_moe")):
        assert conversion._original_source_patterns
        assert conversion._original_target_patterns


def test_checkpointing_is_switched_on_through_the_instance():
    """dispatch/recompute.py puts its own method on the instance, and wraps the function that it is given."""
    model = tiny_model("qwen3_moe")
    found = arguments(model._set_gradient_checkpointing)
    assert found == ["enable", "gradient_checkpointing_func", "every_n_layers"]
    seen = []
    model._set_gradient_checkpointing = lambda enable=True, **kwargs: seen.append(enable)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.gradient_checkpointing_disable()
    assert seen == [True, False]


def test_arguments_of_flash_attention():
    """context_parallel/local_attention.py calls it with these; flash kernels do not run here."""
    from transformers.integrations.flash_attention import get_target_dtype
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    found = inspect.signature(_flash_attention_forward).parameters
    assert list(found)[:4] == ["query_states", "key_states", "value_states", "attention_mask"]
    by_name = {"query_length", "is_causal", "dropout", "softmax_scale", "sliding_window", "softcap"}
    by_name |= {"use_top_left_mask", "target_dtype", "attn_implementation", "s_aux"}
    by_name |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    rest = {name for name, parameter in found.items() if parameter.kind is parameter.VAR_KEYWORD}
    assert by_name - set(found) <= ({"s_aux"} if rest else set())
    assert arguments(get_target_dtype) == ["query", "module"]


# Transformers: the trainer (trainer/); its overrides are in test_trainer_contract.py


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


def test_the_fused_head_calls_globals_that_a_copy_may_have_otherwise():
    """lm_head/fused_head.py: the forward's globals, what is called with which arguments, what comes back."""
    from trl.trainer import utils

    from hf_fsdpturbo.lm_head.fused_head import HEAD, VALID_ONLY, LinearCrossEntropy

    model = tiny_model("qwen3_moe")
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    code = model.forward.__func__.__code__
    assert (HEAD, VALID_ONLY) == ("_ChunkedLogProbFunction", "_use_triton")
    assert {HEAD, VALID_ONLY} <= set(code.co_names)
    assert {HEAD, VALID_ONLY} <= model.forward.__func__.__globals__.keys()
    names = arguments(utils._ChunkedLogProbFunction.forward)[1:]  # without ctx
    assert [name.partition("_")[0] for name in names] == [
        name.partition("_")[0] for name in arguments(LinearCrossEntropy.apply)[1:]
    ]
    text = source(utils.add_fused_lm_head)
    assert "log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1 = per_token" in text
    assert "self.get_output_embeddings()" in text
    assert "weight, bias = lm_head.weight, lm_head.bias" in text


def test_sft_weighs_all_positions_alike():
    """By one number, but for dft; what takes whole logits asks for the fused outputs without gradients."""
    from trl import SFTTrainer

    text = source(SFTTrainer.compute_loss)
    assert "per_token_loss = -outputs.log_probs" in text
    assert "loss = per_token_loss.sum() / torch.as_tensor(num_tokens).clamp(min=1)" in text
    assert text.count("per_token_loss *") == 1, "only dft weighs positions"
    assert 'self.args.loss_type == "dft"' in text
    assert "outputs.entropy.detach()" in text


def test_sft_scales_its_loss_by_processes():
    from trl import SFTTrainer

    text = source(SFTTrainer.compute_loss)
    assert "self.accelerator.num_processes // self.get_tp_size()" in text
    assert "weighted_aux_loss / steps" in text
    assert "steps = self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1" in text


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


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_ask_for_their_gate(family: str):
    """Their forward calls ``self._apply_gate`` with all rows of gate and up, so that an instance may have another."""
    experts = tiny_model(family).model.layers[0].mlp.experts
    shapes = []
    own = experts._apply_gate
    experts._apply_gate = lambda rows: shapes.append(tuple(rows.shape)) or own(rows)
    experts(torch.randn(5, 32), torch.full((5, 1), 3), torch.ones(5, 1))
    assert shapes == [(5, 2 * 16)]


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


def test_data_loaders_take_the_trainers_collator():
    """``rows.checked_batches`` replaces it for the length of the call."""
    from transformers import Trainer

    source = inspect.getsource(Trainer._get_dataloader)
    assert "data_collator = self.data_collator" in source
    assert '"collate_fn": data_collator' in source


def test_what_is_announced_or_refused_on_models_and_trainers():
    """Methods that stand on instances, and what Trainer reads where a loss is scaled or SIGTERM saves."""
    from transformers import GenerationMixin, PreTrainedModel, Trainer, TrainingArguments

    first = arguments(PreTrainedModel.save_pretrained)[1:4]
    assert first == ["save_directory", "is_main_process", "state_dict"]
    assert arguments(PreTrainedModel.resize_token_embeddings)[:2] == ["self", "new_num_tokens"]
    assert callable(GenerationMixin.generate)
    assert "enable_jit_checkpoint" in TrainingArguments.__dataclass_fields__
    assert "self._loss_shifts_labels" in inspect.getsource(Trainer._get_num_items_in_batch)
    scaled = inspect.getsource(Trainer.compute_loss)
    assert "self.accelerator.num_processes // self.get_tp_size()" in scaled
    assert scaled.index("model(**inputs)") < scaled.index("get_tp_size"), "the loss is there when it is asked"


def test_models_say_where_router_logits_are():
    from transformers.models.llama4.modeling_llama4 import Llama4Router, Llama4TextModel
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoePreTrainedModel, Qwen3MoeTopKRouter

    for model, router, index in ((Qwen3MoePreTrainedModel, Qwen3MoeTopKRouter, 0), (Llama4TextModel, Llama4Router, 1)):
        recorder = model._can_record_outputs["router_logits"]
        assert (recorder.target_class, recorder.index) == (router, index)
