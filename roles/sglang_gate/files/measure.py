#!/usr/bin/python3 -I
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Measure the running server as the gate does, and leave the outcome for Prometheus's textfile collector.

usage: measure.py SETTINGS.json OUTPUT.prom
Settings: url, timeout, key_file, and what acceptance.prove() wants. A server that does not pass is an
outcome, not a failure of this program. Standard library only, Python 3.8 and later.
"""

import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # python -I leaves the script's own folder out

import acceptance
import probe_http


def metrics(result, now):
    """Return the outcome of acceptance.prove() in Prometheus's text format (str)."""
    measured = result["acceptance"] or {}
    rows = [
        ("passed", "Whether the running server passed the gate.", [("", int(result["passed"]))]),
        ("last_run_timestamp_seconds", "When the gate last ran.", [("", round(now))]),
        ("acceptance_length", "Tokens for each verify step.", [("", measured.get("length"))]),
        ("requests", "Requests that were measured.", [("", measured.get("requests"))]),
        ("speculated_requests", "Requests that speculated.", [("", measured.get("speculated"))]),
        (
            "tokens_per_second",
            "Tokens a second, one request at a time.",
            [("", measured.get("tokens_per_s"))],
        ),
        (
            "answer_seconds",
            "Seconds for each fixed prompt.",
            [('{prompt="' + answer["name"] + '"}', answer["seconds"]) for answer in result["answers"]],
        ),
    ]
    lines = []
    for name, text, values in rows:
        known = [(labels, value) for labels, value in values if value is not None]
        if known:
            lines += [f"# HELP sglang_gate_{name} {text}", f"# TYPE sglang_gate_{name} gauge"]
            lines += [f"sglang_gate_{name}{labels} {value}" for labels, value in known]
    return "\n".join(lines) + "\n"


def main():
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    output = Path(sys.argv[2])
    server = probe_http.Server(
        settings["url"], settings["timeout"], probe_http.read_key(settings["key_file"])
    )
    result = acceptance.prove(server, probe_http.served_models, settings)
    for problem in result["problems"]:
        print(problem)
    part = output.with_suffix(".part")
    part.write_text(metrics(result, time.time()), encoding="utf-8")
    part.chmod(0o644)
    part.replace(output)


if __name__ == "__main__":
    main()
