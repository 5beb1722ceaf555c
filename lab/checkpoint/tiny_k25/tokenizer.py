# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of single bytes with Kimi's special tokens, and the chat template."""

import shutil

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from . import FILES
from .config import write_json

BYTES = 256

SPECIAL_TOKENS = [
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "[EOT]",
    "<|im_system|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<think>",
    "</think>",
    "<|kimi_k25_video_placeholder|>",
    "[UNK]",
    "[PAD]",
]


def build(vocab_size):
    """Make the tokenizer: 256 bytes, filler that no text encodes to, then the special tokens.

    The byte alphabet is sorted, so the printable ASCII characters have consecutive ids.
    """
    fillers = vocab_size - BYTES - len(SPECIAL_TOKENS)
    if fillers < 0:
        raise SystemExit(f"vocab is {vocab_size}; the bytes and special tokens need {vocab_size - fillers}")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [f"~w{number}" for number in range(fillers)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={word: token_id for token_id, word in enumerate(words)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def write(folder, sizes):
    """Write the tokenizer's files; return the id of every special token and ASCII character."""
    tokenizer = build(sizes.vocab)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = FILES / "chat_template.jinja"
    shutil.copyfile(template, folder / template.name)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "unk_token": "[UNK]",
            "pad_token": "[PAD]",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1000000,
            "chat_template": template.read_text(encoding="utf-8"),
        },
    )
    names = SPECIAL_TOKENS + [chr(code) for code in range(33, 127)]
    return {name: tokenizer.token_to_id(name) for name in names}
