# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The launcher's look at the GPUs' memory, with a process that holds some of it and then lets go."""

from __future__ import annotations

import contextlib
import subprocess
import sys

PORT = 31800
HELD_MIB = 4096
# The launcher's own bound is a minute.
SHORT_BOUND_S = 3.0
LONGEST_S = 60
STARTING = "launcher: starting "
# What the engine says once it has read its configuration.
ENGINE_BEGAN = "server_args="
QUERIES = {
    "gpus": "--query-gpu=index,uuid,memory.used",
    "apps": "--query-compute-apps=gpu_uuid,pid,used_memory",
}
HOLDER = """import sys, torch
held = torch.empty({mib} << 20, dtype=torch.uint8, device="cuda:{index}")
print("held", flush=True)
sys.stdin.read()
"""
IMPATIENT = """import sys
sys.path.insert(0, {folder!r})
import launcher
launcher.VACANT_S = {bound}
sys.exit(launcher.main())
"""


@contextlib.contextmanager
def holder(index):
    """Run a process that holds memory of a GPU until the block ends."""
    program = HOLDER.format(mib=HELD_MIB, index=index)
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        if process.stdout.readline() != b"held\n":
            raise RuntimeError("the memory of the GPU could not be taken")
        # At the block's end its stdin is closed, upon which it ends.
        yield process


def capture(folder, name):
    """Write what nvidia-smi answers to the launcher's two queries, as it is, beside the logs."""
    for what, query in QUERIES.items():
        words = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        answer = subprocess.run(words, capture_output=True, check=True)
        (folder / f"smi-{name}-{what}.csv").write_bytes(answer.stdout)


def prove_vacancy(trial):
    """Start two releases while memory of a GPU is held; returns (steps, problems)."""
    launcher = trial.launcher_module
    index = trial.gpus - 1
    capture(trial.logs, "idle")
    steps = {"idle_rows": launcher.smi_rows(QUERIES["gpus"]), "idle": launcher.held_gpus()}
    impatient = trial.launcher.with_name("impatient.py")
    impatient.write_text(
        IMPATIENT.format(folder=str(trial.launcher.parent), bound=SHORT_BOUND_S), encoding="utf-8"
    )
    with holder(index) as process:
        capture(trial.logs, "busy")
        steps.update(holder=process.pid, held=launcher.held_gpus())
        first = trial.start_release("memory_held", PORT, True, "patched", "echo", impatient)
        first.wait(first.ended, LONGEST_S)
        first.clean_up()
        steps["refused"] = {"status": first.status, "after_s": first.ended_at and round(first.ended_at, 1)}
        steps["diagnoses"] = [entry["id"] for entry in trial.diagnose(first)]
        steps["words"] = first.log_path.read_text(encoding="utf-8").strip()
        second = trial.start_release("memory_freed", PORT + 1, True, "patched", "echo", trial.launcher)
        waiting = "STATUS=waiting for memory of the GPUs: "
        second.wait(lambda: any(words.startswith(waiting) for _at, words in second.systemd.said), LONGEST_S)
        began = said(second, STARTING)
    # The block's end has ended the holder.
    freed_at = second.clock()
    second.wait(lambda: said(second, STARTING), LONGEST_S)
    started_at = second.clock()
    second.wait(lambda: said(second, ENGINE_BEGAN) or second.ended(), LONGEST_S)
    second.clean_up()
    steps["freed"] = {
        "after_s": round(freed_at, 1),
        "started_s": round(started_at, 1),
        "told": [(round(at, 1), words) for at, words in second.systemd.said],
        "engine_began": said(second, ENGINE_BEGAN),
    }
    name = f"pid {process.pid} "
    wanted = [
        ("an idle GPU counts as free", steps["idle"] == []),
        ("the held GPU is named", len(steps["held"]) == 1 and steps["held"][0].startswith(f"GPU {index} ")),
        ("the holder is named by its pid", name in "".join(steps["held"])),
        ("the launcher refuses with status 1", steps["refused"]["status"] == 1),
        ("its words name the holder", name in steps["words"]),
        (
            "the first diagnosis is gpu_memory_held_before",
            steps["diagnoses"][:1] == ["gpu_memory_held_before"],
        ),
        (
            "systemd is told of the wait",
            any(words.startswith(waiting) for _at, words in steps["freed"]["told"]),
        ),
        ("no engine is started while memory is held", not began),
        ("the engine is started once memory is free", steps["freed"]["engine_began"]),
    ]
    return steps, ["not so: " + what for what, holds in wanted if not holds]


def said(start, words):
    """Return True once these words stand in a start's log."""
    return words in start.log_path.read_text(encoding="utf-8", errors="replace")
