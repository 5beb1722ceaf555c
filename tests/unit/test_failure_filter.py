# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What is handed on of a task that failed."""

import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("failure_filter", ROOT / "plugins/filter/sglang_failure.py")
filters = importlib.util.module_from_spec(spec)
spec.loader.exec_module(filters)
LOOP = "One or more items failed"


@pytest.mark.parametrize(
    "result, said",
    [
        ({"failed": True, "msg": "no such file "}, ["no such file"]),
        ({"failed": True}, ["failed without a word"]),
        (
            {
                "failed": True,
                "msg": LOOP,
                "results": [
                    {"failed": False, "msg": "fine"},
                    {"msg": "fine as well"},
                    {"failed": True, "msg": "https://roll1 is the last healthy worker"},
                ],
            },
            ["https://roll1 is the last healthy worker"],
        ),
        # Of two hosts that say the same one is enough.
        (
            {"msg": LOOP, "results": [{"failed": True, "msg": "full"}, {"failed": True, "msg": "full"}]},
            ["full"],
        ),
        ({"msg": LOOP, "results": [{"unreachable": True, "msg": "timed out"}]}, ["timed out"]),
        ({"msg": LOOP, "results": [{"failed": True, "censored": "hidden"}]}, ["failed without a word"]),
        # The loop's own fault, before its first item.
        ({"failed": True, "msg": "'x' is undefined", "results": []}, ["'x' is undefined"]),
    ],
)
def test_what_a_failed_task_says(result, said):
    assert filters.failures(result) == said
