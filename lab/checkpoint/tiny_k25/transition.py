# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What a "quiet" target says: which token follows which, and the head that makes it so.

In the modes `echo` and `cycle` every block's output projection is zero, so the hidden state after
all layers is the embedding of the last token, and the head alone decides what follows.
"""

import numpy as np

from .tokenizer import SPECIAL_TOKENS

MODES = ("random", "echo", "cycle")


def special_ids(token_ids):
    return [token_ids[token] for token in SPECIAL_TOKENS]


def following(mode, vocab, token_ids):
    """Return, for every token id, the id of the token that follows it: int array [vocab]."""
    follower = np.arange(vocab)
    printable = [token_ids[chr(code)] for code in range(33, 127)]
    if mode == "cycle":
        follower[printable] = np.roll(printable, -1)
    # Whatever special token ends the prompt, the answer starts with "!".
    follower[special_ids(token_ids)] = printable[0]
    return follower


def head(embedding, follower, token_ids):
    """Return the head [vocab, hidden] for which `follower` is what the model says.

    Row v is the sum of the embeddings of the tokens that v follows. All special tokens share one
    embedding, so they count once.
    """
    special = special_ids(token_ids)
    weight = np.zeros_like(embedding)
    for token, follows in enumerate(follower):
        if token not in special:
            weight[follows] += embedding[token]
    for follows in sorted(set(follower[special])):
        weight[follows] += embedding[special[0]]
    return weight
