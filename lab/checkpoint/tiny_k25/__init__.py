# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The pieces of the tiny checkpoint: sizes and configs, tokenizer, weights of target and drafter."""

import pathlib

FILES = pathlib.Path(__file__).resolve().parent.parent / "files"
