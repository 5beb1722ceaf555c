# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The lab's generator of checkpoints, with as many heads in the vision tower as eight GPUs need."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "kit" / "lab" / "checkpoint"))

from tiny_k25 import config

# Before anything else takes them over; a head keeps its 16 channels.
config.VISION_HIDDEN, config.VISION_HEADS = 128, 8

if __name__ == "__main__":
    import make_checkpoint

    make_checkpoint.main()
