# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of the trial: three healthy ones, a drafter for another model, a truncated shard."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
GENERATOR = HERE / "generate.py"
# Heads, experts and widths divide by 8. MLA has its published latent size, which GPU kernels expect.
SIZES = {
    "layers": 8,
    "hidden": 256,
    "intermediate": 512,
    "moe-intermediate": 256,
    "experts": 8,
    "heads": 16,
    "q-lora": 128,
    "kv-lora": 512,
    "nope-dim": 128,
    "rope-dim": 64,
    "v-dim": 128,
    "vocab": 1024,
    "draft-vocab": 512,
    "draft-heads": 8,
    "draft-head-dim": 64,
}
MODES = ("echo", "cycle", "random")


def generate(out, mode, **changed):
    """Write out/target and out/draft."""
    sizes = dict(SIZES, **changed)
    words = [word for name, size in sizes.items() for word in ("--" + name, str(size))]
    subprocess.run([sys.executable, str(GENERATOR), str(out), "--mode", mode, *words], check=True)


def make_all(folder):
    """Write every checkpoint of the trial; return {name: folder with target and draft}."""
    made = {}
    for mode in MODES:
        made[mode] = folder / mode
        generate(made[mode], mode)
    made["other_drafter"] = folder / "other_drafter"
    generate(made["other_drafter"], "echo", hidden=2 * SIZES["hidden"])
    shutil.rmtree(made["other_drafter"] / "target")
    (made["other_drafter"] / "target").symlink_to(made["echo"] / "target")
    made["truncated"] = folder / "truncated"
    shutil.copytree(made["echo"], made["truncated"])
    shard = sorted((made["truncated"] / "target").glob("*.safetensors"))[1]
    with shard.open("r+b") as stream:
        stream.truncate(shard.stat().st_size // 2)
    return made
