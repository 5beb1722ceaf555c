#!/usr/bin/env python3
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Write a tiny Kimi-K2.5-shaped target and its EAGLE-3 drafter, for engines that run on a CPU.

OUT/target   KimiK25ForConditionalGeneration: text (MLA and MoE) and vision, in several shards
OUT/draft    LlamaForCausalLMEagle3, the drafter made for that target

The mode says how often the drafter is right, so that whatever judges speculation can be tested
with a healthy, a middling and a useless drafter (acceptance length at 3 steps, top-k 1):

random   random weights; a drafted token is right by chance only                       about 1.0
echo     the target repeats its last token and the drafter knows it                          4.0
cycle    the target walks through the printable bytes; only the first draft is right         2.0

The same arguments give the same bytes, so a commit hash made from them can be written down.
"""

import argparse
import dataclasses
import pathlib

from tiny_k25 import config, drafter, target, tokenizer
from tiny_k25.transition import MODES


def make_checkpoint(out, mode, seed, sizes):
    """Write OUT/target and OUT/draft; files of the same name are replaced."""
    for part in ("target", "draft"):
        (out / part).mkdir(parents=True, exist_ok=True)
    token_ids = tokenizer.write(out / "target", sizes)
    config.write_target(out / "target", sizes, token_ids)
    config.write_drafter(out / "draft", sizes, token_ids)
    embedding = target.write(out / "target", sizes, mode, seed, token_ids)
    drafter.write(out / "draft", sizes, mode, seed, token_ids, embedding)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=pathlib.Path, metavar="OUT")
    parser.add_argument("--mode", choices=MODES, default="echo")
    parser.add_argument("--seed", type=int, default=0)
    group = parser.add_argument_group("sizes")
    for field in dataclasses.fields(config.Sizes):
        group.add_argument("--" + field.name.replace("_", "-"), type=int, default=field.default, metavar="N")
    args = vars(parser.parse_args())
    out, mode, seed = args.pop("out"), args.pop("mode"), args.pop("seed")
    make_checkpoint(out, mode, seed, config.Sizes(**args))


if __name__ == "__main__":
    main()
