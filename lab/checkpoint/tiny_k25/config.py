# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Sizes of the tiny models and the config files that follow from them."""

import dataclasses
import json
import shutil

from . import FILES


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of target and drafter, in the model's own units (layers, channels, tokens)."""

    layers: int = 6
    dense_layers: int = 1
    hidden: int = 128
    intermediate: int = 128
    moe_intermediate: int = 32
    experts: int = 4
    experts_per_token: int = 2
    heads: int = 2
    q_lora: int = 32
    kv_lora: int = 64
    nope_dim: int = 32
    rope_dim: int = 16
    v_dim: int = 32
    vocab: int = 512
    max_positions: int = 4096
    shards: int = 4
    draft_vocab: int = 300
    draft_heads: int = 2
    draft_head_dim: int = 32

    @property
    def aux_layers(self):
        """Layers that the drafter reads: an early, a middle and a late one, as EAGLE-3 does."""
        return [1, self.layers // 2, self.layers - 2]


# The vision tower serves only to be loaded; a head of 16 suits its two-dimensional rope.
VISION_HIDDEN, VISION_INTERMEDIATE, VISION_LAYERS, VISION_HEADS = 64, 128, 2, 4
VISION_PATCH, VISION_GRID, VISION_MERGE = 14, 16, 2

DTYPE = "bfloat16"


def text_config(sizes, token_ids):
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "moe_intermediate_size": sizes.moe_intermediate,
        "num_hidden_layers": sizes.layers,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "n_shared_experts": 1,
        "n_routed_experts": sizes.experts,
        "ep_size": 1,
        "routed_scaling_factor": 2.827,
        "kv_lora_rank": sizes.kv_lora,
        "q_lora_rank": sizes.q_lora,
        "qk_rope_head_dim": sizes.rope_dim,
        "v_head_dim": sizes.v_dim,
        "qk_nope_head_dim": sizes.nope_dim,
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": sizes.experts_per_token,
        "moe_layer_freq": 1,
        "first_k_dense_replace": sizes.dense_layers,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "hidden_act": "silu",
        "max_position_embeddings": sizes.max_positions,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "use_cache": True,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": max(1.0, sizes.max_positions / 4096),
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": token_ids["[BOS]"],
        "eos_token_id": token_ids["[EOS]"],
        "pad_token_id": token_ids["[PAD]"],
        "torch_dtype": DTYPE,
        "dtype": DTYPE,
    }


def vision_config(sizes):
    shape = {
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": VISION_INTERMEDIATE,
        "num_attention_heads": VISION_HEADS,
        "num_hidden_layers": VISION_LAYERS,
    }
    return {
        "model_type": "kimi_k25",
        "patch_size": VISION_PATCH,
        "init_pos_emb_height": VISION_GRID,
        "init_pos_emb_width": VISION_GRID,
        "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "merge_kernel_size": [VISION_MERGE, VISION_MERGE],
        "merge_type": "sd2_tpool",
        "video_attn_type": "spatial_temporal",
        "mm_projector_type": "patchmerger",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "text_hidden_size": sizes.hidden,
        "mm_hidden_size": VISION_HIDDEN,
        # Published checkpoints carry vt_*; SGLang's tower reads the plain names.
        **{"vt_" + name: value for name, value in shape.items()},
        **shape,
    }


def target_config(sizes, token_ids):
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "bos_token_id": token_ids["[BOS]"],
        "eos_token_id": token_ids["[EOS]"],
        "pad_token_id": token_ids["[PAD]"],
        "ignore_index": -100,
        "media_placeholder_token_id": token_ids["<|media_pad|>"],
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "use_unified_vision_chunk": True,
        "tie_word_embeddings": False,
        "dtype": DTYPE,
        "torch_dtype": DTYPE,
        "text_config": text_config(sizes, token_ids),
        "vision_config": vision_config(sizes),
    }


def drafter_config(sizes, token_ids):
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "target_hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.draft_heads,
        "num_key_value_heads": sizes.draft_heads,
        "head_dim": sizes.draft_head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": sizes.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": sizes.vocab,
        "draft_vocab_size": sizes.draft_vocab,
        "tie_word_embeddings": False,
        "bos_token_id": token_ids["[BOS]"],
        "eos_token_id": token_ids["<|im_end|>"],
        "pad_token_id": token_ids["[PAD]"],
        "dtype": DTYPE,
        "torch_dtype": DTYPE,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": sizes.aux_layers,
        },
    }


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_target(folder, sizes, token_ids):
    """Write config, generation config and the processor (code that travels with the model)."""
    write_json(folder / "config.json", target_config(sizes, token_ids))
    write_json(
        folder / "generation_config.json",
        {"max_length": sizes.max_positions, "eos_token_id": token_ids["<|im_end|>"]},
    )
    processor = "tiny_kimi_processor"
    auto_map = {
        "AutoProcessor": processor + ".TinyKimiProcessor",
        "AutoImageProcessor": processor + ".TinyKimiImageProcessor",
    }
    write_json(
        folder / "preprocessor_config.json",
        {
            "auto_map": auto_map,
            "image_processor_type": "TinyKimiImageProcessor",
            "processor_class": "TinyKimiProcessor",
        },
    )
    write_json(
        folder / "processor_config.json", {"auto_map": auto_map, "processor_class": "TinyKimiProcessor"}
    )
    shutil.copyfile(FILES / (processor + ".py"), folder / (processor + ".py"))


def write_drafter(folder, sizes, token_ids):
    write_json(folder / "config.json", drafter_config(sizes, token_ids))
