"""The literal table of every upstream name that we override, replace, wrap, set or read privately.

``docs/upstream.md`` is this table for people; ``python -m tests.support.upstream_table`` writes it, and
``tests/unit/test_upstream_table.py`` compares table, page, our sources and the installed releases.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "upstream.md"


class Row(NamedTuple):
    """One name.

    Attributes:
        name: importable path; the last part may be an attribute that the object before it mentions in its source.
        kind: a key of :data:`KINDS`.
        files: where it stands in ``hf_fsdpturbo/``.
        why: what we need it for.
        test: ``file.py::function`` below ``tests/unit/`` that fails when it changes.
        until: when it can go.
    """

    name: str
    kind: str
    files: tuple[str, ...]
    why: str
    test: str
    until: str


KINDS = {
    "override": "Methods of the trainer that ours overrides",
    "replace": "Functions, methods and module globals that we replace or wrap",
    "set": "Attributes that we set on upstream's objects",
    "read": "Private names that we import, call or read",
    "fact": "Facts that are read from byte code or source",
}

STAYS = "stays"
MIXIN = ("trainer/mixin.py",)
HOOK = "test_trainer_contract.py::test_every_override_exists_upstream"
NO_HOOK = "Trainer has a callback or a public method for it"
CONTRACT = "test_upstream_contract.py"
ACCELERATE = "test_upstream_contract_accelerate.py"
TORCH = "test_upstream_contract_torch.py"
SEAMS = "test_preference_seams.py"
FACTS = "test_code_facts.py"
LOSS_LOG = "test_loss_log.py::test_the_log_is_trainers_and_it_asks_nothing"


def _override(name: str, why: str, until: str = NO_HOOK) -> Row:
    return Row(f"transformers.Trainer.{name}", "override", MIXIN, why, HOOK, until)


OVERRIDES = (
    _override("_clip_grad_norm", "the norm over dense and expert meshes"),
    _override("_get_dataloader", "an iterable data set is read whole by ranks that share a batch"),
    _override("_get_grad_norm", "the norm where nothing is clipped"),
    _override("_get_num_items_in_batch", "tokens of a batch that cp ranks share, or that has repeats"),
    _override("_get_output_dir", "while a checkpoint is written, its place is a staging folder"),
    _override("_init_training_state", "where a resumed run is in a stream", "Trainer counts passes over a stream"),
    _override("_load_best_model", "fills the sharded model in place"),
    _override("_load_from_checkpoint", "reads shards at any topology"),
    _override("_load_optimizer_and_scheduler", "reads shards at any topology"),
    _override("_load_rng_state", "a rank whose file is damaged fails on all ranks"),
    _override("_load_scaler", "a stray scaler.pt is refused by name"),
    _override("_move_model_to_device", "a sharded model is where it belongs"),
    _override("_prepare_inputs", "refuses image batches", "image batches are supported"),
    _override("_push_from_checkpoint", "pushes after the checkpoint has its final name"),
    _override("call_model_init", "what model_init makes in one process gets our kernels and expert block"),
    _override("init_hf_repo", "what rank 0 meets at the Hub is raised on every rank"),
    _override("_save_checkpoint", "stages, then renames"),
    _override("_save_optimizer_and_scheduler", "writes shards"),
    _override("_save_rng_state", "a rank that cannot write fails on all ranks"),
    _override("_save_scaler", "a rank that cannot write fails on all ranks"),
    _override("_track_num_input_tokens", "cp ranks hold the same tokens"),
    _override("training_step", "the loss for the log is filtered without waiting", "Trainer filters it on the device"),
    _override("compute_loss", "cuts TRL's fused LM head, which is made after our set-up", "TRL builds it in a hook"),
    _override("create_accelerator_and_postprocess", "gives the data loader its mesh, and puts gather in its place"),
    _override("create_optimizer", "reshards first: an optimizer over gathered parameters trains nothing"),
    _override("get_batch_samples", "how long a step's batches take to come"),
    _override("log", "a log line says what was measured"),
    _override("evaluation_loop", "each sample counts once", "accelerate and TRL drop repeats before they take means"),
    _override("get_tp_size", "ranks that hold the same batch", "Trainer asks for such ranks under another name"),
    _override("hyperparameter_search", "refused in sharded runs: it rebuilds the model", "it can be supported"),
    _override("prediction_step", "each sample counts once", "accelerate and TRL drop repeats before they take means"),
    _override("save_model", "writes Hub files from shards"),
    _override("train", "resumes from the newest whole checkpoint; no garbage collection in a step"),
)

REPLACED = (
    Row(
        "transformers.PreTrainedModel.maybe_distribute_model",
        "replace",
        ("loading/seam.py",),
        "from_pretrained calls it on meta, before weights are read: there the model is sharded; for one call",
        f"{CONTRACT}::test_loader_calls_our_seam_before_weights_load",
        "from_pretrained takes a function for it",
    ),
    Row(
        "transformers.PreTrainedModel._load_pretrained_model",
        "replace",
        ("loading/from_rank0.py", "loading/open_files.py"),
        "init_on_rank0: weights come from rank 0 instead of files; else only files of a rank's own slices are opened; "
        "for one call",
        f"{CONTRACT}::test_loader_calls_the_function_that_rank_0_stands_in_for",
        "from_pretrained takes a source of tensors, or init_on_rank0 goes",
    ),
    Row(
        "transformers.modeling_utils.convert_and_load_state_dict_in_model",
        "replace",
        ("loading/whole_sources.py",),
        "conversions that slices would scramble are kept from Transformers' loader and done here; for one call",
        f"{CONTRACT}::test_loader_converts_and_loads_in_one_function",
        "Transformers converts whole sources of sharded parameters itself",
    ),
    Row(
        "transformers.modeling_utils.get_hf_quantizer",
        "replace",
        ("loading/packed_release.py",),
        "packed releases are built as if stored in full, and read so, each rank its own part; for one call",
        f"{CONTRACT}::test_loader_chooses_a_quantizer_in_one_function",
        "Transformers dequantises parts of sharded parameters itself",
    ),
    Row(
        "transformers.core_model_loading._dtensor_from_local_like",
        "replace",
        ("loading/whole_sources.py",),
        "shards that stay on the host are not moved to the mesh's device (offload_params); for one call",
        f"{CONTRACT}::test_loader_wraps_shards_in_one_function",
        "DTensor.from_local leaves a local tensor where it is",
    ),
    Row(
        "transformers.core_model_loading.set_param_for_module",
        "replace",
        ("quantised/filling.py",),
        "a frozen weight is quantised as it is set, so that one of them is in memory in full; for one call",
        f"{CONTRACT}::test_loader_converts_and_loads_in_one_function",
        "Transformers quantises stacked experts, and shards what it quantises",
    ),
    Row(
        "transformers.PreTrainedModel._init_weights",
        "replace",
        ("loading/heads.py",),
        "on the instance, while it loads: a fresh head is drawn whole, so that it is that of one process",
        f"{SEAMS}::test_a_missing_head_is_drawn_through_the_instance",
        "Transformers draws sharded tensors as whole ones",
    ),
    Row(
        "transformers.PreTrainedModel._set_gradient_checkpointing",
        "replace",
        ("dispatch/recompute.py",),
        "on the instance: layers get a checkpoint function that replays routing",
        f"{CONTRACT}::test_checkpointing_is_switched_on_through_the_instance",
        "gradient_checkpointing_kwargs may hold functions",
    ),
    Row(
        "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS",
        "replace",
        ("context_parallel/ulysses.py", "dispatch/kept_attention.py"),
        "recompute=selective wraps the functions that models call now, for the life of the process; inert for others",
        "test_selective_recompute.py::test_attention_calls",
        "Transformers keeps what checkpointed layers compute by a policy",
    ),
    Row(
        "torch.topk",
        "replace",
        ("dispatch/recompute.py",),
        "inside routers, by a TorchFunctionMode: recompute takes the forward's indices",
        "test_recompute.py::test_every_recompute_sees_the_forwards_indices",
        STAYS,
    ),
    Row(
        "transformers.models.qwen3_moe.modeling_qwen3_moe.apply_rotary_pos_emb",
        "replace",
        ("kernels/rebinding.py",),
        "a faster one in the modeling file's globals, which all models of the file look up",
        f"{FACTS}::test_globals_of_linear_attention_and_rotary_embedding",
        "Transformers has a registry for it",
    ),
    Row(
        "transformers.models.qwen3_moe.modeling_qwen3_moe.load_balancing_loss_func",
        "replace",
        ("kernels/aux_loss.py",),
        "on CUDA: the aux loss in one pass, where it agrees, in the globals of the model's own file",
        "test_aux_loss.py::test_families_functions_agree_with_it",
        "Transformers computes it in one kernel a layer",
    ),
    Row(
        "transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func",
        "replace",
        ("kernels/aux_loss.py",),
        "the same in the file that TRL's fused LM head imports it from",
        "test_aux_loss.py::test_families_functions_agree_with_it",
        "TRL calls the model's own",
    ),
    Row(
        "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe.torch_chunk_gated_delta_rule",
        "replace",
        ("kernels/rebinding.py",),
        "the gated delta rule of packed documents and cut sequences, in the modeling file's globals",
        f"{FACTS}::test_globals_of_linear_attention_and_rotary_embedding",
        "Transformers has a registry for it",
    ),
    Row(
        "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe.torch_recurrent_gated_delta_rule",
        "replace",
        ("kernels/rebinding.py",),
        "the same, for generation",
        f"{FACTS}::test_globals_of_linear_attention_and_rotary_embedding",
        "Transformers has a registry for it",
    ),
    Row(
        "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe.causal_conv1d_fn",
        "replace",
        ("kernels/rebinding.py",),
        "its convolution, likewise",
        f"{FACTS}::test_globals_of_linear_attention_and_rotary_embedding",
        "Transformers has a registry for it",
    ),
    Row(
        "trl.trainer.dpo_trainer.hash_module",
        "replace",
        ("trainer/set_up.py",),
        "a reference is compared by its shards, on all ranks; while the trainer is made",
        f"{SEAMS}::test_the_reference_is_hashed_through_a_module_global",
        "TRL hashes DTensors",
    ),
    Row(
        "trl.trainer.sft_trainer.clone_chat_template",
        "replace",
        ("trainer/set_up.py",),
        "a template of another model without a resize of sharded embeddings; while the trainer is made",
        f"{SEAMS}::test_templates_are_cloned_through_a_module_global",
        "TRL leaves embeddings alone where no token is new",
    ),
    Row(
        "transformers.Trainer._tr_loss",
        "read",
        ("trainer/loss_log.py",),
        "what was added up for the log",
        LOSS_LOG,
        "Trainer filters it on the device",
    ),
    Row(
        "transformers.Trainer._globalstep_last_logged",
        "read",
        ("trainer/loss_log.py",),
        "since when",
        LOSS_LOG,
        "Trainer filters it on the device",
    ),
    Row(
        "trl.SFTTrainer._prepare_dataset",
        "read",
        ("trainer/data_columns.py",),
        "whether it is TRL's own, whose columns are known",
        f"{SEAMS}::test_data_sets_are_prepared_by_a_method_of_that_name",
        "TRL names the columns that it found",
    ),
    Row(
        "trl.trainer.sft_trainer.global_then_local_main_first",
        "replace",
        ("trainer/set_up.py",),
        "data that rank 0 cannot prepare fails on all ranks, which wait for it in a barrier",
        f"{SEAMS}::test_data_is_prepared_through_a_module_global",
        "TRL exchanges the failure",
    ),
    Row(
        "trl.trainer.dpo_trainer.get_peft_model",
        "replace",
        ("trainer/set_up.py",),
        "adapters are there already, made before sharding; while the trainer is made",
        f"{SEAMS}::test_adapters_are_made_through_a_module_global",
        "TRL takes a PEFT model together with peft_config",
    ),
    Row(
        "accelerate.Accelerator.gather",
        "replace",
        ("trainer/evaluation.py",),
        "on the instance: repeats of an uneven last batch leave",
        f"{ACCELERATE}::test_arguments_of_gather",
        "accelerate drops repeats from gather, too",
    ),
    Row(
        "accelerate.Accelerator.gather_for_metrics",
        "replace",
        ("trainer/evaluation.py",),
        "on the instance: rows of ranks that share a batch come once",
        f"{ACCELERATE}::test_gather_for_metrics_gathers_through_the_instance",
        "accelerate knows ranks that share a batch",
    ),
    *(
        Row(
            f"transformers.{'GenerationMixin' if name == 'generate' else 'PreTrainedModel'}.{name}",
            "replace",
            (file,),
            why,
            f"{CONTRACT}::test_what_is_announced_or_refused_on_models_and_trainers",
            until,
        )
        for name, file, why, until in (
            (
                "generate",
                "trainer/collective_calls.py",
                "on the instance: entered by all ranks together, or named",
                STAYS,
            ),
            (
                "save_pretrained",
                "trainer/collective_calls.py",
                "on the instance: writes what save_model writes",
                "save_pretrained takes sharded experts",
            ),
            (
                "resize_token_embeddings",
                "trainer/refusals.py",
                "on the instance: refused, embeddings are sharded",
                "sharded embeddings can be resized",
            ),
        )
    ),
    Row(
        "accelerate.Accelerator.get_state_dict",
        "replace",
        ("trainer/collective_calls.py",),
        "on the instance: whole tensors on rank 0",
        f"{ACCELERATE}::test_state_dicts_are_asked_of_the_instance",
        "accelerate gathers DTensors of any mesh",
    ),
    Row(
        "peft.PeftModel.set_adapter",
        "replace",
        ("lora/adapter.py",),
        "on the instance: a switch to the reference leaves alone what is trainable",
        f"{SEAMS}::test_trl_keeps_a_reference_adapter_in_a_peft_model",
        "TRL keeps the reference's log-probabilities another way",
    ),
    Row(
        "peft.PeftModel.add_adapter",
        "replace",
        ("trainer/set_up.py",),
        "on the instance, while the trainer is made: the reference is there, made before sharding",
        f"{SEAMS}::test_trl_keeps_a_reference_adapter_in_a_peft_model",
        "TRL takes a model that has a reference adapter",
    ),
    Row(
        "torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_reduce_scatter_copy_in",
        "replace",
        ("sharding/gradient_copy.py",),
        "large gradients enter the buffer by copies; for the process",
        "test_gradient_copy.py::test_fsdp_fills_its_buffer_through_the_name_we_replace",
        "torch makes the table on the device",
    ),
    *(
        Row(
            f"torch.distributed.{name}",
            "replace",
            ("sharding/fsdp_turbo.py",),
            "fsdp_turbo patches it, and we put torch's own back",
            "test_upstream_table.py::test_every_name_exists",
            "fsdp_turbo stops, or ep_backend fsdp_turbo goes",
        )
        for name in ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")
    ),
    Row(
        "torch.nn.Module.forward",
        "replace",
        (
            "context_parallel/boundary.py",
            "context_parallel/sharded_head.py",
            "dispatch/recompute.py",
            "expert_adapters/convention.py",
            "expert_stacks.py",
            "lm_head/fused_head.py",
        ),
        "on the instance: base models cut and gather the sequence, experts dispatch, routers keep a tape, heads take "
        "labels",
        f"{CONTRACT}::test_flags_of_experts_modules",
        STAYS,
    ),
)

SET = (
    Row(
        "trl.chat_template_utils.clone_chat_template.chat_template",
        "set",
        ("trainer/chat_template.py",),
        "the template, as clone_chat_template sets it",
        f"{SEAMS}::test_templates_are_cloned_through_a_module_global",
        "TRL leaves embeddings alone where no token is new",
    ),
    Row(
        "trl.chat_template_utils.clone_chat_template.eos_token",
        "set",
        ("trainer/chat_template.py",),
        "the tokenizer's end token, as clone_chat_template sets it",
        f"{SEAMS}::test_templates_are_cloned_through_a_module_global",
        "TRL leaves embeddings alone where no token is new",
    ),
    Row(
        "trl.chat_template_utils.clone_chat_template.eos_token_id",
        "set",
        ("trainer/chat_template.py",),
        "the model's end token, as clone_chat_template sets it",
        f"{SEAMS}::test_templates_are_cloned_through_a_module_global",
        "TRL leaves embeddings alone where no token is new",
    ),
    Row(
        "transformers.TrainingArguments.logging_nan_inf_filter",
        "set",
        ("trainer/loss_log.py",),
        "off while Trainer asks whether a loss is finite, which waits for the device; on again at once",
        LOSS_LOG,
        "Trainer filters it on the device",
    ),
    Row(
        "transformers.TrainingArguments.enable_jit_checkpoint",
        "set",
        ("trainer/set_up.py",),
        "hidden while the parent is made: Transformers' callback lets each rank save a step of its own",
        f"{CONTRACT}::test_what_is_announced_or_refused_on_models_and_trainers",
        "Transformers agrees on the step",
    ),
    Row(
        "accelerate.utils.DataLoaderConfiguration.non_blocking",
        "set",
        ("trainer/batches.py",),
        "on CUDA with pinned memory: the copy of a batch does not make the host wait for the step before",
        f"{ACCELERATE}::test_batches_are_copied_as_the_configuration_says",
        "Trainer sets it where memory is pinned",
    ),
    Row(
        "accelerate.utils.DataLoaderConfiguration.dispatch_batches",
        "set",
        ("trainer/batches.py",),
        "False where nothing is given: dispatching cannot join batches of different lengths",
        f"{ACCELERATE}::test_streams_are_dispatched_unless_the_configuration_says_no",
        "accelerate pads what it dispatches",
    ),
    Row(
        "transformers.Trainer.current_gradient_accumulation_steps",
        "set",
        ("trainer/evaluation.py",),
        "1 while it evaluates: TRL divides the aux loss of a batch that knows its items by it",
        f"{CONTRACT}::test_sft_scales_its_loss_by_processes",
        "TRL's prediction_step passes num_items_in_batch itself",
    ),
    Row(
        "accelerate.Accelerator._is_accelerate_prepared",
        "set",
        ("parallelize/adapter_of_load.py", "parallelize/order.py"),
        "on the model: accelerate and TRL pass it through untouched",
        f"{ACCELERATE}::test_prepared_models_pass_through",
        "accelerate has a public way to say so",
    ),
    Row(
        "transformers.distributed.fsdp._is_fsdp_managed_module",
        "set",
        ("parallelize/order.py",),
        "on the model: generate keeps all ranks in step until the last one is done",
        f"{CONTRACT}::test_generate_asks_whether_fsdp_manages_the_model",
        "generate asks for FSDPModule",
    ),
    Row(
        "transformers.PreTrainedModel._is_hf_initialized",
        "set",
        ("loading/heads.py", "quantised/packed_weight.py", "shards.py"),
        "on tensors: they are filled, do not draw them; read where a head may be fresh",
        f"{CONTRACT}::test_marks_of_filled_tensors",
        STAYS,
    ),
    Row(
        "transformers.core_model_loading._weight_conversions",
        "set",
        (
            "checkpoint/conversion_groups.py",
            "checkpoint/facts.py",
            "export.py",
            "loading/from_rank0.py",
            "merge/base_weights.py",
        ),
        "on the model: how names of the checkpoint became those of the model, for saving",
        f"{CONTRACT}::test_loaded_model_remembers_conversions_for_saving",
        "Transformers has a public name for it",
    ),
    Row(
        "transformers.PreTrainedConfig._attn_implementation",
        "set",
        (
            "context_parallel/exactness.py",
            "context_parallel/install.py",
            "dispatch/kept_attention.py",
            "packing/prepared_masks.py",
            "trainer/reference.py",
        ),
        "which attention runs; context parallelism sets its own",
        f"{CONTRACT}::test_private_records_of_models_and_configs",
        "set_attn_implementation takes registered names before the model is built",
    ),
    Row(
        "transformers.PreTrainedModel.from_pretrained.distributed_config",
        "set",
        ("loading/seam.py",),
        "taken off the config again: it would be saved",
        f"{CONTRACT}::test_loader_calls_our_seam_before_weights_load",
        "from_pretrained takes a function to shard with",
    ),
    Row(
        "transformers.modeling_utils.get_hf_quantizer.quantization_config",
        "set",
        ("loading/packed_release.py",),
        "taken off the config of a packed release, which is read as if stored in full",
        f"{CONTRACT}::test_loader_chooses_a_quantizer_in_one_function",
        "Transformers dequantises parts of sharded parameters itself",
    ),
    Row(
        "accelerate.Accelerator.prepare_data_loader.device_mesh",
        "set",
        ("trainer/batches.py",),
        "on accelerator.state: the data loader reads from its axis names who shares a batch",
        f"{ACCELERATE}::test_loader_reads_axis_names_of_the_state_mesh",
        "prepare_data_loader takes a mesh",
    ),
    Row(
        "transformers.TrainerState.num_input_tokens_seen",
        "set",
        ("trainer/mixin.py",),
        "cp ranks hold the same tokens",
        "test_upstream_table.py::test_every_name_exists",
        "Trainer divides it by get_tp_size",
    ),
    Row(
        "transformers.TrainerState.best_model_checkpoint",
        "set",
        ("trainer/staged_checkpoint.py",),
        "it names the folder after the rename, not staging",
        "test_upstream_table.py::test_every_name_exists",
        STAYS,
    ),
    Row(
        "transformers.trainer_pt_utils.AcceleratorConfig.dispatch_batches",
        "set",
        ("arguments/unsupported.py",),
        "accelerate slices dispatched batches by global rank",
        "test_upstream_table.py::test_every_name_exists",
        "accelerate slices them by data rank",
    ),
    Row(
        "transformers.TrainingArguments.liger_kernel_config",
        "set",
        ("arguments/unsupported.py",),
        "Liger's swiglu overwrites sharded experts",
        "test_upstream_table.py::test_every_name_exists",
        STAYS,
    ),
    Row(
        "trl.SFTConfig.model_init_kwargs",
        "set",
        ("trainer/set_up.py",),
        "hidden while the parent is made: it gets a model, not a path",
        "test_upstream_table.py::test_every_name_exists",
        STAYS,
    ),
    Row(
        "torch.distributed.fsdp.FSDPModule.__name__",
        "set",
        ("sharding/outer_fsdp.py",),
        "the class that fully_shard makes keeps the model's name, by which Transformers looks models up",
        "test_upstream_table.py::test_every_name_exists",
        "Transformers asks isinstance",
    ),
    Row(
        "torch.distributed.fsdp.FSDPModule.__module__",
        "set",
        ("sharding/outer_fsdp.py",),
        "the same: Transformers initialises classes from outside its package otherwise, which moves random draws",
        "test_upstream_table.py::test_every_name_exists",
        "Transformers asks isinstance",
    ),
    Row(
        "torch.distributed.fsdp.FSDPModule.__qualname__",
        "set",
        ("sharding/outer_fsdp.py",),
        "the same: what a model may record (router logits) is kept by the str of its class",
        "test_upstream_table.py::test_every_name_exists",
        "Transformers asks isinstance",
    ),
    Row(
        "torch.nn.Module.__class__",
        "set",
        ("kernels/elementwise.py",),
        "norms and SwiGLU modules change class, so that their forward is ours and their parameters stay",
        "test_upstream_table.py::test_every_name_exists",
        STAYS,
    ),
)

READ = (
    Row(
        "torch._C.DisableTorchFunctionSubclass",
        "read",
        ("trainer/loss_scale.py",),
        "a number that notes who computes with it",
        f"{TORCH}::test_a_tensor_can_note_what_is_done_with_it",
        STAYS,
    ),
    Row(
        "torch._C",
        "read",
        ("telemetry/real_tokens.py", "trainer/flight_recorder.py", "trainer/loss_scale.py"),
        "the module of names here",
        f"{TORCH}::test_a_tensor_can_note_what_is_done_with_it",
        STAYS,
    ),
    Row(
        "torch.utils._pytree.tree_leaves",
        "read",
        ("trainer/loss_scale.py",),
        "the tensor among nested arguments",
        f"{TORCH}::test_a_tensor_can_note_what_is_done_with_it",
        "it has a public name",
    ),
    Row(
        "transformers.Trainer._loss_shifts_labels",
        "read",
        ("trainer/loss_scale.py",),
        "which labels Trainer counts",
        f"{CONTRACT}::test_what_is_announced_or_refused_on_models_and_trainers",
        "it has a public name",
    ),
    Row(
        "torch.distributed.distributed_c10d._get_default_store",
        "read",
        ("watcher.py",),
        "the store through which ranks say what they call",
        f"{TORCH}::test_the_default_store_can_be_cloned",
        "it has a public name",
    ),
    Row(
        "torch.autograd.graph._engine_run_backward",
        "read",
        ("stacks.py",),
        "where a main thread waits for the thread that runs its backward",
        f"{TORCH}::test_what_a_hanging_rank_asks_torch",
        "torch says which thread that is",
    ),
    Row(
        "torch._C._distributed_c10d",
        "read",
        ("trainer/flight_recorder.py",),
        "where torch keeps its flight recorder",
        f"{TORCH}::test_what_a_hanging_rank_asks_torch",
        "it has a public name",
    ),
    Row(
        "torch._C._distributed_c10d._dump_fr_trace_json",
        "read",
        ("trainer/flight_recorder.py",),
        "collectives that a rank which hangs has called",
        f"{TORCH}::test_what_a_hanging_rank_asks_torch",
        "it has a public name",
    ),
    Row(
        "transformers.Trainer._save",
        "read",
        ("trainer/saving.py",),
        "tokenizer and arguments beside the weights",
        "test_trainer_contract.py::test_every_override_exists_upstream",
        "it has a public name",
    ),
    Row(
        "transformers.Trainer._get_dataloader.data_collator",
        "set",
        ("trainer/rows.py",),
        "while a data loader is made: its batches are looked at before the model sees them",
        f"{CONTRACT}::test_data_loaders_take_the_trainers_collator",
        "a collator can be given to the method",
    ),
    Row(
        "transformers.Trainer.create_accelerator_and_postprocess.gather_function",
        "read",
        ("trainer/evaluation.py",),
        "the bound gather that Trainer keeps: set again when gather is replaced",
        f"{ACCELERATE}::test_callers_look_gather_up_on_the_accelerator",
        "Trainer asks the accelerator at each call",
    ),
    Row(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "read",
        ("dispatch/kept_attention.py",),
        "sees the one operator that computes attention, while Transformers' attention function runs",
        "test_selective_recompute.py::test_attention_calls",
        "it has a public name",
    ),
    Row(
        "torch._C._current_graph_task_id",
        "read",
        ("telemetry/real_tokens.py",),
        "whether a forward is a recompute: then it runs inside a backward, with our tape or without one",
        f"{TORCH}::test_a_forward_inside_a_backward_is_told",
        "it has a public name",
    ),
    Row(
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoePreTrainedModel._can_record_outputs",
        "read",
        ("telemetry/router_entropy.py",),
        "which modules' outputs hold router logits, and where",
        f"{CONTRACT}::test_models_say_where_router_logits_are",
        "it has a public name",
    ),
    Row(
        "transformers.utils.loading_report.LoadStateDictInfo",
        "read",
        ("loading/from_rank0.py",),
        "what the replaced loader returns: six fields",
        f"{CONTRACT}::test_fields_of_the_loading_report",
        "init_on_rank0 goes",
    ),
    Row(
        "transformers.PreTrainedModel._get_dtype_plan",
        "read",
        ("loading/dtypes.py",),
        "what stays in float32",
        f"{CONTRACT}::test_dtype_plan_and_head_initialisation",
        "it has a public name",
    ),
    Row(
        "transformers.PreTrainedModel._keep_in_fp32_modules",
        "read",
        ("quantised/choice.py",),
        "modules that are not quantised, as Transformers' own quantiser leaves them out",
        f"{CONTRACT}::test_what_bitsandbytes_leaves_out",
        "Transformers has one function for what a quantiser leaves out",
    ),
    Row(
        "transformers.PreTrainedModel._no_split_modules",
        "read",
        ("sharding/outer_fsdp.py",),
        "the layers to shard one by one",
        f"{CONTRACT}::test_models_name_their_decoder_layers",
        "it has a public name",
    ),
    Row(
        "transformers.PreTrainedModel._keys_to_ignore_on_save",
        "read",
        ("checkpoint/hub.py",),
        "what save_pretrained leaves out",
        f"{CONTRACT}::test_private_records_of_models_and_configs",
        "it has a public name",
    ),
    Row(
        "transformers.distributed.mixin._device_mesh",
        "read",
        ("trainer/refusals.py",),
        "a model that Transformers has distributed is refused",
        f"{CONTRACT}::test_private_records_of_models_and_configs",
        "Transformers has a public way to ask",
    ),
    Row(
        "transformers.PreTrainedConfig._name_or_path",
        "read",
        ("trainer/reference.py", "trainer/chat_template.py"),
        "where a policy came from, so that its reference and its tokenizer are read from there",
        f"{CONTRACT}::test_private_records_of_models_and_configs",
        "name_or_path is public everywhere",
    ),
    Row(
        "transformers.TrainingArguments._n_gpu",
        "read",
        ("arguments/turbo_arguments.py",),
        "DataParallel over several GPUs of one process is refused",
        f"{CONTRACT}::test_private_records_of_models_and_configs",
        "DataParallel leaves Trainer",
    ),
    *(
        Row(
            f"transformers.core_model_loading.WeightTransform.{name}",
            "read",
            ("checkpoint/facts.py",),
            "which conversions a checkpoint was loaded by",
            f"{CONTRACT}::test_conversions_keep_their_original_patterns",
            "conversions can be compared",
        )
        for name in ("_original_source_patterns", "_original_target_patterns")
    ),
    *(
        Row(
            f"transformers.utils.hub.cached_files._raise_exceptions_for_{kind}",
            "read",
            ("loading/files.py",),
            "a file that is not there is an answer, not an error",
            f"{CONTRACT}::test_a_missing_file_can_be_asked_for_quietly",
            "cached_file has a public way",
        )
        for kind in ("gated_repo", "missing_entries", "connection_errors")
    ),
    Row(
        "transformers.integrations.moe._default_apply_gate",
        "read",
        ("sharding/expert_parallel.py",),
        "experts with the usual gate may run as one fused block",
        f"{CONTRACT}::test_gate_rows_come_first_in_qwen3_moe",
        STAYS,
    ),
    Row(
        "transformers.integrations.moe.use_experts_implementation._is_expert_parallel",
        "read",
        ("parallelize/fused_experts.py",),
        "experts that Transformers spread over ranks keep their own forward",
        "test_fused_experts.py::test_experts_that_transformers_spreads_keep_their_own_forward",
        STAYS,
    ),
    Row(
        "accelerate.hooks.add_hook_to_module._hf_hook",
        "read",
        ("parallelize/fused_experts.py",),
        "experts whose weights accelerate moves keep their own forward",
        "test_fused_experts.py::test_weights_that_accelerate_moves_keep_their_own_forward",
        STAYS,
    ),
    Row(
        "torch.Tensor._version",
        "read",
        ("ops/weight_copies.py",),
        "a converted weight is as old as the weight's version",
        "test_weight_copies.py::test_versions_alone_would_be_stale",
        STAYS,
    ),
    Row(
        "transformers.integrations.moe._apply_gate",
        "replace",
        ("sharding/expert_parallel.py", "sharding/expert_gate.py"),
        "the gate of experts of one family; in float32 where only the matmuls are in half precision",
        f"{CONTRACT}::test_experts_ask_for_their_gate",
        STAYS,
    ),
    Row(
        "transformers.integrations.moe._is_expert_parallel",
        "read",
        ("expert_adapters/convention.py",),
        "grouped experts of adapted families: no rows of other ranks among theirs",
        "test_expert_adapters.py::test_grouped_swiglu_is_a_loop_over_experts",
        STAYS,
    ),
    Row(
        "transformers.modeling_flash_attention_utils._flash_attention_forward",
        "read",
        ("context_parallel/local_attention.py",),
        "flash attention with lengths that are known once a step",
        f"{CONTRACT}::test_arguments_of_flash_attention",
        "it has a public name",
    ),
    Row(
        "trl.trainer.utils.create_model_from_path",
        "read",
        ("parallelize/trainer_family.py",),
        "models are loaded as TRL loads them",
        f"{CONTRACT}::test_trl_loads_models_through_one_function",
        STAYS,
    ),
    Row(
        "trl.trainer.utils._ChunkedLogProbFunction",
        "read",
        ("lm_head/fused_head.py",),
        "the global that TRL's fused LM head calls: ours stands in its place in a copy of that forward",
        f"{CONTRACT}::test_the_fused_head_calls_globals_that_a_copy_may_have_otherwise",
        "TRL computes the head's gradients in its forward",
    ),
    Row(
        "trl.trainer.utils._use_triton",
        "read",
        ("lm_head/fused_head.py",),
        "the global by which it leaves out positions without a label: in that copy it always does",
        f"{CONTRACT}::test_the_fused_head_calls_globals_that_a_copy_may_have_otherwise",
        "TRL computes the head's gradients in its forward",
    ),
    Row(
        "accelerate.state.GradientState.end_of_dataloader",
        "read",
        ("trainer/evaluation.py",),
        "whether this batch may hold repeats",
        f"{ACCELERATE}::test_gradient_state_knows_the_repeats_of_the_last_batch",
        "accelerate drops repeats from gather, too",
    ),
    Row(
        "accelerate.state.GradientState.remainder",
        "read",
        ("trainer/evaluation.py",),
        "how many real samples are in it",
        f"{ACCELERATE}::test_gradient_state_knows_the_repeats_of_the_last_batch",
        "accelerate drops repeats from gather, too",
    ),
    Row(
        "accelerate.state.GradientState.active_dataloader",
        "read",
        ("trainer/evaluation.py",),
        "whose batch it is",
        f"{ACCELERATE}::test_gradient_state_knows_the_repeats_of_the_last_batch",
        "accelerate drops repeats from gather, too",
    ),
    Row(
        "accelerate.data_loader.DataLoaderShard.total_batch_size",
        "read",
        ("trainer/evaluation.py",),
        "samples of a batch over all data ranks",
        f"{ACCELERATE}::test_the_batch_size_of_a_loader_counts_all_ranks",
        "accelerate drops repeats from gather, too",
    ),
    Row(
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
        "read",
        ("sharding/outer_fsdp.py",),
        "which unit manages a parameter",
        f"{TORCH}::test_fsdp_records_what_it_manages",
        "torch has a public way to ask",
    ),
    *(
        Row(
            f"torch.distributed.fsdp._fully_shard._fsdp_state.{name}",
            "read",
            ("sharding/outer_fsdp.py",),
            "the parameters of a unit; the list since torch 2.11, one group before",
            f"{TORCH}::test_fsdp_records_what_it_manages",
            until,
        )
        for name, until in (
            ("_fsdp_param_groups", "torch has a public way to ask"),
            ("_fsdp_param_group", "the floor is torch 2.11"),
        )
    ),
    Row(
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._module_info",
        "read",
        ("sharding/outer_fsdp.py",),
        "module and name of a managed parameter",
        f"{TORCH}::test_fsdp_records_what_it_manages",
        "torch has a public way to ask",
    ),
    *(
        Row(
            f"torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.{name}",
            "read",
            ("images/tower_use.py",),
            why,
            f"{TORCH}::test_fsdp_records_what_it_manages",
            "the floor is torch 2.13, whose set_reduce_scatter_unused_params reduces zeros for a whole unit",
        )
        for name, why in (
            ("unsharded_param", "zeros as the gradient of a tower that a rank has not run"),
            ("sharded_param", "whether it trains"),
        )
    ),
    Row(
        "torch.distributed.fsdp._fully_shard._fsdp_collectives",
        "read",
        ("sharding/gradient_copy.py",),
        "the module whose function is replaced",
        "test_gradient_copy.py::test_fsdp_fills_its_buffer_through_the_name_we_replace",
        "torch makes the table on the device",
    ),
    Row(
        "torch.distributed.device_mesh.DeviceMesh._flatten",
        "read",
        ("parallel_state.py",),
        "one shard axis of efsdp and expert_cp",
        f"{TORCH}::test_mesh_and_dtensor_names",
        "it has a public name",
    ),
    Row(
        "torch.distributed.device_mesh.DeviceMesh._concatenate",
        "read",
        ("parallel_state.py",),
        "edp before a flattened axis",
        f"{TORCH}::test_mesh_and_dtensor_names",
        "it has a public name",
    ),
    Row(
        "torch.distributed.tensor._redistribute._get_flattened_mesh_by_layout",
        "replace",
        ("compat.py",),
        "on torch 2.11 only, which raises for axes that no mesh can merge",
        "test_compat.py::test_axes_out_of_order_are_not_merged_on_torch_2_11",
        "the floor is torch 2.12",
    ),
    Row(
        "torch.distributed.distributed_c10d._set_pg_timeout",
        "read",
        ("parallel_state.py",),
        "groups of a mesh have the run's timeout",
        f"{TORCH}::test_group_timeout_setter",
        "meshes take a timeout",
    ),
    Row(
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "read",
        ("checkpoint/dcp_index.py",),
        "where a chunk lies, as DCP's own readers look for it in .metadata",
        f"{TORCH}::test_what_dcp_writes_of_a_chunk",
        "it has a public name",
    ),
    Row(
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "read",
        ("checkpoint/dcp_index.py",),
        "a name in .metadata, which is read without calling what it names",
        f"{TORCH}::test_what_dcp_writes_of_a_chunk",
        "DCP's index is no pickle",
    ),
    Row(
        "torch.serialization._get_layout",
        "read",
        ("checkpoint/dcp_index.py",),
        "a name in .metadata, which is read without calling what it names",
        f"{TORCH}::test_what_dcp_writes_of_a_chunk",
        "DCP's index is no pickle",
    ),
    Row(
        "torch.distributed.distributed_c10d._get_default_store",
        "read",
        ("checkpoint/background.py",),
        "ranks say in it that they have written; a thread may use it, and it has no group",
        f"{TORCH}::test_the_store_that_ranks_met_in",
        "it has a public name",
    ),
    Row(
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        "read",
        ("shards.py",),
        "which part of a tensor this rank holds",
        f"{TORCH}::test_mesh_and_dtensor_names",
        "it has a public name",
    ),
    Row(
        "torch.distributed.ProcessGroup._get_backend",
        "read",
        ("ops/npu.py",),
        "the HCCL name of a group, which MC2 wants",
        f"{TORCH}::test_private_functions_of_tensors_and_groups",
        "torch_npu gives it",
    ),
    *(
        Row(
            f"torch.{name}",
            "read",
            files,
            why,
            f"{TORCH}::test_private_functions_of_tensors_and_groups",
            "it has a public name",
        )
        for name, files, why in (
            ("_foreach_mul_", ("ops/torch.py",), "gradients scaled in one launch"),
            ("_foreach_norm", ("grad_norm.py", "ops/adamw.py"), "norms in one launch"),
        )
    ),
    *(
        Row(
            f"torch.nn.Module.{name}",
            "read",
            files,
            why,
            f"{TORCH}::test_private_records_of_modules",
            STAYS,
        )
        for name, files, why in (
            (
                "_parameters",
                (
                    "loading/heads.py",
                    "parallelize/adapter_of_load.py",
                    "quantised/packed_weight.py",
                    "quantised/released_weight.py",
                    "sharding/expert_parallel.py",
                    "shards.py",
                ),
                "another tensor in a parameter's place, without registration",
            ),
            ("_buffers", ("parallelize/build.py", "quantised/packed_weight.py", "shards.py"), "the same for buffers"),
            ("_modules", ("lora/adapter.py",), "the wrapped module in its wrapper's place while it loads"),
            ("_non_persistent_buffers_set", ("shards.py",), "buffers that no checkpoint has"),
        )
    ),
    *(
        Row(
            f"torch.optim.lr_scheduler.SequentialLR.{name}",
            "read",
            ("checkpoint/scheduler.py",),
            "state of a chain of schedulers, followed to other optimizer groups",
            f"{TORCH}::test_state_of_a_chain_of_schedulers",
            STAYS,
        )
        for name in ("_schedulers", "_milestones")
    ),
    Row(
        "peft.tuners.tuners_utils.BaseTunerLayer",
        "read",
        ("lora/adapter.py",),
        "which modules PEFT put in place of others",
        f"{SEAMS}::test_names_of_peft_that_lora_reads",
        STAYS,
    ),
    Row(
        "peft.utils.other.AuxiliaryTrainingWrapper",
        "read",
        ("lora/adapter.py",),
        "the same, for modules that are trained whole",
        f"{SEAMS}::test_names_of_peft_that_lora_reads",
        STAYS,
    ),
    Row(
        "peft.tuners.lora.layer.LoraLayer.reset_lora_parameters",
        "read",
        ("lora/adapter.py",),
        "draws the factors as PEFT does",
        f"{SEAMS}::test_peft_keeps_what_expert_lora_reads",
        STAYS,
    ),
)


def _fact(name: str, how: str, file: str, why: str, test: str) -> Row:
    return Row(name, "fact", (file,), f"{why} (``{how}``)", f"{FACTS}::{test}", "the model class or config says it")


QWEN3 = "transformers.models.qwen3_moe.modeling_qwen3_moe"
FACT_ROWS = (
    _fact(
        "torch.sigmoid",
        "co_names",
        "telemetry/router_entropy.py",
        "whether a router scores by sigmoid",
        "test_routers_that_score_by_sigmoid",
    ),
    _fact(
        f"{QWEN3}.ALL_ATTENTION_FUNCTIONS",
        "co_names",
        "context_parallel/exactness.py",
        "a module whose forward asks this registry is softmax attention",
        "test_facts_of_a_family",
    ),
    _fact(
        f"{QWEN3}.Qwen3MoeAttention.forward.sliding_window",
        "co_consts",
        "context_parallel/exactness.py",
        "a forward that passes it on by name does not leave its window to a mask",
        "test_facts_of_a_family",
    ),
    _fact(
        f"{QWEN3}.create_sliding_window_causal_mask",
        "__globals__",
        "context_parallel/exactness.py",
        "a file that has it makes window masks",
        "test_facts_of_a_family",
    ),
    _fact(
        f"{QWEN3}.eager_attention_forward",
        "__globals__",
        "context_parallel/local_attention.py",
        "the file's own eager attention",
        "test_eager_attention_of_a_family",
    ),
    _fact(
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter.forward.topk",
        "co_names",
        "dispatch/recompute.py",
        "a module beside experts that calls it is their router",
        "test_facts_of_a_family",
    ),
    _fact(
        "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe.torch_chunk_gated_delta_rule",
        "co_names",
        "kernels/rebinding.py",
        "a module whose forward calls it is linear attention",
        "test_facts_of_a_family",
    ),
    _fact(
        "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe.causal_conv1d_fn",
        "__globals__",
        "kernels/rebinding.py",
        "replaced where the file has it",
        "test_globals_of_linear_attention_and_rotary_embedding",
    ),
    _fact(
        "trl.trainer.utils._ChunkedLogProbFunction",
        "co_names",
        "lm_head/fused_head.py",
        "a forward that calls it is the one with TRL's fused LM head",
        "test_a_forward_without_the_fused_head_is_left_alone",
    ),
    _fact(
        "trl.trainer.utils._use_triton",
        "__globals__",
        "lm_head/fused_head.py",
        "copied, with two names of ours",
        "test_a_forward_without_the_fused_head_is_left_alone",
    ),
    _fact(
        "trl.trainer.utils.add_fused_lm_head.fused_lm_head",
        "co_varnames",
        "context_parallel/sharded_head.py",
        "a forward with this argument has TRL's fused LM head",
        "test_the_fused_head_behind_a_decorator",
    ),
    _fact(
        "transformers.models.gpt_oss.modeling_gpt_oss.GptOssModel.forward.inputs_embeds",
        "getsource",
        "packing/prepared_masks.py",
        "a forward whose calls with config, inputs_embeds and attention_mask have no position_ids makes masks that "
        "ignore packed documents",
        "test_masks_are_made_in_the_forward_we_read",
    ),
)

TABLE: tuple[Row, ...] = (*OVERRIDES, *REPLACED, *SET, *READ, *FACT_ROWS)

INTRODUCTION = """\
# Upstream names we lean on

Public functions that are called as documented are not here. What is here may change in any release of torch,
Transformers, accelerate, TRL or PEFT without a word, so each name has a test that then fails and names it.

A new release: run `pytest tests/unit` with it. A test that fails says which name changed; the row here says what we
need it for, in which files, and when it could go.

To change this page change `tests/support/upstream_table.py`, then run `python -m tests.support.upstream_table`. A test
compares both, asks the installed releases for every name, and reads our sources: a private name, a set attribute or a
fact read from code that has no row here fails it.
"""


def cells(row: Row) -> tuple[str, ...]:
    """A row as the page has it."""
    files = ", ".join(f"`{file}`" for file in row.files)
    return f"`{row.name}`", files, row.why.replace("``", "`"), f"`{row.test}`", row.until


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for kind, title in KINDS.items():
        parts += [f"## {title}\n", "| name | where | what for | test | when it can go |", "|---|---|---|---|---|"]
        parts += [f"| {' | '.join(cells(row))} |" for row in TABLE if row.kind == kind]
        parts.append("")
    return "\n".join(parts)


def find(name: str) -> tuple[object, list[str]]:
    """The object of the longest importable or readable start of a path, and the parts after it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        break
    else:
        raise ModuleNotFoundError(name)
    rest = parts[length:]
    while rest and hasattr(found, rest[0]):
        found = getattr(found, rest.pop(0))
    return found, rest


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
