"""What the general rules of ``tiny.py`` cannot know: fields that a family forces to other numbers, layers it hides.

A dotted key reaches into a sub-config. ``...`` drops what a rule would have given.
"""

from __future__ import annotations

from typing import Any

_DOTS3_SLIDING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
    "head_dim": 16,
}
_QWEN4 = {  # n-gram embeddings and the token indexer are off by default, the released model has both
    "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
    "num_hidden_layers": 3,
    "ple_layer_ids": [1],
    "ple_embed_dim": 32,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 61,
    "make_ngram_vocab_size_divisible_by": 16,
    "split_ngram_parts": 4,
    "eos_token_id": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
_GEMMA4 = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
}
_MINIMAX_M3 = {
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_hidden_layers": 3,
    "index_block_size": 8,
    "index_topk_blocks": 2,
}
_OCR_VISION = {
    "sam_config.num_hidden_layers": 2,
    "sam_config.global_attn_indexes": [1],
    "sam_config.image_size": 64,
    "sam_config.output_channels": 16,
    "sam_config.window_size": 2,
    "sam_config.downsample_channels": [24, 32],
}
_LOOP = {
    "num_hidden_layers": 3,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 2,
    "loop_num_passes": 2,
}
_PADDED = {  # the released embeddings have more rows than the vocabulary
    "unpadded_vocab_size": 381,
    "n_layers_per_attn_res_block": 1,
}


def _below(prefix: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for name, value in fields.items()}


OVERRIDES: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config.rope_theta": 10000.0,
        "attn_config.kv_n_heads": 2,
        "attn_config.clip_qkv": 8.0,
        "ffn_config.ffn_hidden_size": 16,
        "ffn_config.moe_num_experts": 8,
        "ffn_config.moe_top_k": 2,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 512,
    },
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2,
        **_below("vision_config", _OCR_VISION),
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "diffusion_gemma": {
        "text_config.num_experts": 8,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 16,
        "text_config.global_head_dim": 16,
        "vision_config.position_embedding_size": 64,
    },
    "doge": {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "layer_types": ["full_attention", "sliding_attention"],
        "max_window_layers": 1,
    },
    "dots3_note": {
        **_below("text_config", _DOTS3_SLIDING),
        "vision_config.mlp_layer_types": ["dense", "sparse"],
        "vision_config.adapter_in_dim": 32,
        "vision_config.adapter_out_dim": 32,
        "audio_config.adapter_out_dim": 32,
        "audio_config.adapter_input_size": 32,
        "audio_config.downsample_hidden_size": 8,
    },
    "dots3_note_text": _DOTS3_SLIDING,
    "ernie4_5_vl_moe": {
        "text_config.moe_intermediate_size": [16, 8],
        "text_config.head_dim": 16,
        "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [3, 3, 2]},
        "vision_config.intermediate_size": 32,
    },
    "flint": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_only_layers": [0],
    },
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2},
    "gemma4": _below("text_config", _GEMMA4),
    "gemma4_text": _GEMMA4,
    "glm4v_moe": {
        "text_config.head_dim": 16,
        "text_config.rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        },
    },  # fmt: skip
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2, "num_local_experts": 8},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "head_dim": 8},
    "hy_v4_vl": {
        "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        "vision_config.max_image_size": 64,
    },
    "inkling2": _below("text_config", _PADDED),
    "inkling2_loop": _below("text_config", _PADDED | _LOOP),
    "inkling2_loop_text": _PADDED | _LOOP,
    "inkling2_text": _PADDED,
    "inkling_mm_model": {
        "vision_config.num_hidden_layers": 6,
        "vision_config.patch_size": 4,
        "audio_config.mel_vocab_size": 8,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 0,
        "num_experts": 8,
        "use_mamba_kernels": False,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_hidden_layers": 3,
        "num_dense_layers": 1,
    },
    "llama4": {
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 16,
        "intermediate_size": 16,
        "intermediate_size_mlp": 24,
        "num_experts_per_tok": 1,
    },
    "longcat_flash": {"num_layers": 2, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "zero_expert_num": 2},
    "minimax_m3_vl": _below("text_config", _MINIMAX_M3),
    "minimax_m3_vl_text": _MINIMAX_M3,
    "mistral4": {"head_dim": 16},
    "muse_spark": {"audio_config.hidden_sizes": [8, 16], "audio_config.patch_sizes": [4, 3]},
    "openai_privacy_filter": {"num_labels": 384},
    "qwen3_omni_moe_thinker": {"audio_config.downsample_hidden_size": 8},
    "qwen4_exp": _below("text_config", _QWEN4),
    "qwen4_exp_text": _QWEN4,
    "step3p7": {"text_config.sliding_window": 16},
    "nllb_moe": {"encoder_layers": 4, "decoder_layers": 4, "decoder_ffn_dim": 32, "decoder_attention_heads": 4},
    "switch_transformers": {
        "decoder_start_token_id": 0,
        "d_ff": 32,
        "d_kv": 8,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "encoder_sparse_step": 2,
        "decoder_sparse_step": 2,
    },
    "unlimited_ocr": _below("vision_config", _OCR_VISION),
    "zaya": {"num_experts_per_tok": 1, "sliding_window": 16, "layer_types": ["hybrid", "hybrid_sliding"]},
}
