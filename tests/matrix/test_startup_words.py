# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The words that the reader of the start-up log leans on, held against the sources of every release."""

from __future__ import annotations

import re

import pytest
from ansible.module_utils.sglang_kit.startup_log import StartupLog

# What stands in the sources, of which one at least must, and lines as they come out: (line, phase then).
PHASES = {
    "distributed": [
        (r"Init torch distributed begin", "Init torch distributed begin."),
        (r"Init parallel begin", "Init parallel begin."),
    ],
    "loading_weights": [(r"Load weight begin", "Load weight begin. avail mem=1.00 GB")],
    "weights_loaded": [(r"Load weight end\.", "Load weight end. elapsed=1 s, type=KimiK25, dtype=x")],
    "kv_cache": [
        (r"Using KV cache dtype:", "Using KV cache dtype: torch.bfloat16"),
        (r"is allocated\. ", "KV Cache is allocated. #tokens: 1, KV size: 1.00 GB"),
        (r"Memory pool end\.", "Memory pool end. avail mem=1.00 GB"),
    ],
    "autotune": [(r"Running FlashInfer autotune", "Running FlashInfer autotune...")],
    "graph_capture": [
        (r"[Cc]apture .*graph.* begin", "Capture cuda graph begin. This can take up to minutes.")
    ],
    "warm_up": [(r"The server is fired up", "The server is fired up and ready to roll!")],
    "draining": [
        (
            r"SIGTERM received\.",
            "SIGTERM received. signum=None frame=None. Draining requests and shutting down...",
        ),
        (r"Gracefully [Ee]xiting", "Gracefully exiting... Remaining number of requests 0."),
    ],
}
LOST = {
    "an exception": [(r"Scheduler hit an exception", "Scheduler hit an exception: Traceback (most recent")],
    "a signal at the start": [
        (r"Received sigquit from a child", "Received sigquit from a child process. It usually means"),
    ],
    "a signal": [(r"SIGQUIT received\.", "SIGQUIT received. signum=None, frame=None. It usually means")],
    "a death at the start": [
        (r"scheduler is dead", "Rank 0 scheduler is dead. Please check if there are relevant logs."),
        (
            r"scheduler died during",
            "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9).",
        ),
    ],
    "a warm-up": [
        (
            r"Initialization failed\. warmup error",
            "Initialization failed. warmup error: Traceback (most recent",
        ),
    ],
}


def test_each_phase_is_told_in_words_that_are_known(served, sources):
    text = sources(served)
    assert not [
        phase for phase, words in PHASES.items() if not any(re.search(word, text) for word, _line in words)
    ]


def test_each_loss_is_told_in_words_that_are_known(served, sources):
    text = sources(served)
    assert not [
        what for what, words in LOST.items() if not any(re.search(word, text) for word, _line in words)
    ]


def test_both_names_of_the_shards_bar_are_known(served, sources):
    assert re.search(r"[Ll]oading safetensors checkpoint shards|loading shards", sources(served))


@pytest.mark.parametrize(
    "phase, line", [(phase, line) for phase, words in PHASES.items() for _word, line in words]
)
def test_the_words_of_a_phase_are_read(phase, line):
    log = StartupLog()
    log.feed("[2026-01-01 00:00:00 TP0] " + line)
    assert log.phase == phase


@pytest.mark.parametrize("line", [line for words in LOST.values() for _word, line in words])
def test_the_words_of_a_loss_are_read(line):
    log = StartupLog()
    log.feed("[2026-01-01 00:00:00 TP0] " + line)
    assert log.lost == line
