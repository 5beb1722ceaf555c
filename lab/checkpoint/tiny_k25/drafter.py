# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Weights of the EAGLE-3 drafter."""

import numpy as np

from .target import mlp, ones, output_projection
from .tensors import Source, save
from .tokenizer import BYTES
from .transition import following, head, special_ids


def kept_tokens(sizes, token_ids):
    """Return the target's ids in the draft vocabulary, ascending: bytes, special tokens, filler."""
    wanted = list(range(BYTES)) + sorted(special_ids(token_ids))
    filler = sorted(set(range(sizes.vocab)) - set(wanted))
    return np.array(sorted((wanted + filler)[: sizes.draft_vocab]))


def write(folder, sizes, mode, seed, token_ids, embedding):
    """Write model.safetensors; `embedding` [vocab, hidden] is the target's, which drafters share."""
    # Not the target's seed, or both would start with the same numbers.
    source = Source(seed + 1)
    kept = kept_tokens(sizes, token_ids)
    in_draft = np.zeros(sizes.vocab, bool)
    in_draft[kept] = True
    # d2t holds offsets: target id = draft id + d2t[draft id].
    weights = {"d2t": kept - np.arange(len(kept)), "t2d": in_draft}
    if mode == "random":
        weights["fc.weight"] = source.normal(sizes.hidden, 3 * sizes.hidden)
        weights["lm_head.weight"] = source.normal(len(kept), sizes.hidden, std=1.0)
    else:
        # The captured states are three copies of the last token's embedding; fc takes their mean.
        weights["fc.weight"] = np.tile(np.eye(sizes.hidden, dtype=np.float32) / 3, 3)
        # The first draft is for the token after the next, so the head looks two steps ahead.
        follower = following(mode, sizes.vocab, token_ids)
        weights["lm_head.weight"] = head(embedding, follower[follower], token_ids)[kept]

    output = output_projection(source, mode)
    layer = "midlayer."
    width = sizes.draft_heads * sizes.draft_head_dim
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        weights[f"{layer}{name}.weight"] = ones(sizes.hidden)
    for name in ("q_proj", "k_proj", "v_proj"):
        weights[f"{layer}self_attn.{name}.weight"] = source.normal(width, 2 * sizes.hidden)
    weights[layer + "self_attn.o_proj.weight"] = output(sizes.hidden, width)
    weights.update(mlp(layer + "mlp.", sizes.intermediate, sizes, source, output))
    weights["norm.weight"] = ones(sizes.hidden)
    save(weights, folder / "model.safetensors")
