# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Weights of the target, under the tensor names of the published checkpoints."""

import itertools

import numpy as np

from .config import (
    VISION_GRID,
    VISION_HIDDEN,
    VISION_INTERMEDIATE,
    VISION_LAYERS,
    VISION_MERGE,
    VISION_PATCH,
    write_json,
)
from .tensors import Source, save
from .transition import following, head, special_ids


def ones(*shape):
    return np.ones(shape, np.float32)


def zeros(*shape):
    return np.zeros(shape, np.float32)


def output_projection(source, mode):
    """Return what draws the projections that write to the residual stream (see transition)."""
    return source.normal if mode == "random" else zeros


def mlp(prefix, width, sizes, source, output):
    yield prefix + "gate_proj.weight", source.normal(width, sizes.hidden)
    yield prefix + "up_proj.weight", source.normal(width, sizes.hidden)
    yield prefix + "down_proj.weight", output(sizes.hidden, width)


def attention(prefix, sizes, source, output):
    query = sizes.heads * (sizes.nope_dim + sizes.rope_dim)
    key_value = sizes.heads * (sizes.nope_dim + sizes.v_dim)
    yield prefix + "q_a_proj.weight", source.normal(sizes.q_lora, sizes.hidden)
    yield prefix + "q_a_layernorm.weight", ones(sizes.q_lora)
    yield prefix + "q_b_proj.weight", source.normal(query, sizes.q_lora)
    yield prefix + "kv_a_proj_with_mqa.weight", source.normal(sizes.kv_lora + sizes.rope_dim, sizes.hidden)
    yield prefix + "kv_a_layernorm.weight", ones(sizes.kv_lora)
    yield prefix + "kv_b_proj.weight", source.normal(key_value, sizes.kv_lora)
    yield prefix + "o_proj.weight", output(sizes.hidden, sizes.heads * sizes.v_dim)


def mixture(prefix, sizes, source, output):
    yield prefix + "gate.weight", source.normal(sizes.experts, sizes.hidden)
    # The published bias is float32 too.
    bias = source.normal(sizes.experts, std=0.01).astype(np.float64)
    yield prefix + "gate.e_score_correction_bias", bias
    for expert in range(sizes.experts):
        yield from mlp(f"{prefix}experts.{expert}.", sizes.moe_intermediate, sizes, source, output)
    yield from mlp(prefix + "shared_experts.", sizes.moe_intermediate, sizes, source, output)


def text(sizes, mode, source, token_ids):
    """Yield (name, tensor) of the language model, the embedding first."""
    output = output_projection(source, mode)
    embedding = source.normal(sizes.vocab, sizes.hidden, std=1.0)
    if mode != "random":
        special = special_ids(token_ids)
        embedding[special] = embedding[special[0]]
    prefix = "language_model.model."
    yield prefix + "embed_tokens.weight", embedding
    for number in range(sizes.layers):
        layer = f"{prefix}layers.{number}."
        yield layer + "input_layernorm.weight", ones(sizes.hidden)
        yield layer + "post_attention_layernorm.weight", ones(sizes.hidden)
        yield from attention(layer + "self_attn.", sizes, source, output)
        if number < sizes.dense_layers:
            yield from mlp(layer + "mlp.", sizes.intermediate, sizes, source, output)
        else:
            yield from mixture(layer + "mlp.", sizes, source, output)
    yield prefix + "norm.weight", ones(sizes.hidden)
    if mode == "random":
        weight = source.normal(sizes.vocab, sizes.hidden, std=1.0)
    else:
        weight = head(embedding, following(mode, sizes.vocab, token_ids), token_ids)
    yield "language_model.lm_head.weight", weight


def vision(sizes, source):
    width, inner = VISION_HIDDEN, VISION_INTERMEDIATE
    merged = width * VISION_MERGE**2

    def linear(name, rows, columns):
        yield name + ".weight", source.normal(rows, columns)
        yield name + ".bias", zeros(rows)

    def norm(name):
        yield name + ".weight", ones(width)
        yield name + ".bias", zeros(width)

    prefix = "vision_tower."
    yield prefix + "patch_embed.proj.weight", source.normal(width, 3, VISION_PATCH, VISION_PATCH, std=0.05)
    yield prefix + "patch_embed.proj.bias", zeros(width)
    yield prefix + "patch_embed.pos_emb.weight", source.normal(VISION_GRID, VISION_GRID, width, std=0.02)
    for number in range(VISION_LAYERS):
        block = f"{prefix}encoder.blocks.{number}."
        yield from norm(block + "norm0")
        yield from norm(block + "norm1")
        yield from linear(block + "wqkv", 3 * width, width)
        yield from linear(block + "wo", width, width)
        yield from linear(block + "mlp.fc0", inner, width)
        yield from linear(block + "mlp.fc1", width, inner)
    yield from norm(prefix + "encoder.final_layernorm")
    yield from norm("mm_projector.pre_norm")
    yield from linear("mm_projector.proj.0", merged, merged)
    yield from linear("mm_projector.proj.2", sizes.hidden, merged)


def write(folder, sizes, mode, seed, token_ids):
    """Write the shards and their index; return the embedding [vocab, hidden]."""
    source = Source(seed)
    weights = dict(itertools.chain(text(sizes, mode, source, token_ids), vision(sizes, source)))
    names = list(weights)
    per_shard = -(-len(names) // sizes.shards)
    weight_map, total = {}, 0
    for number in range(sizes.shards):
        part = names[number * per_shard : (number + 1) * per_shard]
        shard = f"model-{number + 1:05d}-of-{sizes.shards:06d}.safetensors"
        total += save({name: weights[name] for name in part}, folder / shard)
        weight_map.update(dict.fromkeys(part, shard))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)
    return weights["language_model.model.embed_tokens.weight"]
