#!/usr/bin/python3 -I
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Tell Prometheus's textfile collector what only the node itself knows of its server.

usage: node_state.py RELEASE OUTPUT.prom
RELEASE is the link to the present release. Looks at the unit, the engine's attestation, the evidence of the
gate, and the GPUs; changes nothing else. Standard library only, Python 3.8 and later.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # python -I leaves the script's own folder out

import attestation
import gpu_smi
import node_facts

UNIT = "sglang.service"
PROPERTIES = "ActiveState,SubState,InactiveExitTimestampMonotonic,ActiveEnterTimestampMonotonic,NRestarts"
SMI_TIMEOUT_S = 60


def read_unit(text, monotonic, now):
    """Read `systemctl show` into rows; monotonic and now: one moment on systemd's clock and on the wall's."""
    unit = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    # Between two starts of its own systemd calls the unit activating, too.
    starts = unit.get("ActiveState") == "activating" and unit.get("SubState") != "auto-restart"

    def ago(name):
        return monotonic - int(unit.get(name) or 0) / 1e6

    rows = [
        ("starting_seconds", {}, round(ago("InactiveExitTimestampMonotonic")) if starts else 0),
        ("unit_restarts", {}, int(unit.get("NRestarts") or 0)),
    ]
    if unit.get("ActiveState") == "active":
        rows.append(
            ("serving_since_timestamp_seconds", {}, round(now - ago("ActiveEnterTimestampMonotonic")))
        )
    return rows


def read_release(link):
    """Return the rows of the present release, and a sentence for each thing that is wrong with its engine."""
    release = Path(link)
    if not release.exists():
        return [], []
    problems = attestation.verify(str((release / "engine").resolve()))
    try:
        passed = json.loads((release / "gate.json").read_text(encoding="utf-8"))["passed"]
    except (OSError, ValueError, KeyError):
        passed = False
    return [
        ("release_info", {"release": release.resolve().name}, 1),
        ("release_passed", {}, int(passed)),
        ("attestation_ok", {}, int(not problems)),
    ], problems


def read_gpus(text):
    """Return the rows of `nvidia-smi -q -x` (str; None if it failed)."""
    try:
        gpus = gpu_smi.read_xml(text or "")["gpus"]
    except gpu_smi.SmiError:
        return [("gpus_readable", {}, 0)]
    rows = [("gpus_readable", {}, 1), ("gpus", {}, len(gpus))]
    for gpu in gpus:
        outcome = gpu["fabric"]["outcome"]
        if outcome:
            labels = {"gpu": gpu["bus_id"], "outcome": outcome}
            rows.append(("gpu_fabric_ok", labels, int(outcome == "Completed, Success")))
    return rows


def render(rows):
    """Return rows of (name, labels, value) in Prometheus's text format."""
    lines = []
    for name in dict.fromkeys(name for name, _labels, _value in rows):
        lines.append(f"# TYPE sglang_node_{name} gauge")
        for labels, value in [(labels, value) for other, labels, value in rows if other == name]:
            said = ",".join(f"{key}={json.dumps(str(word))}" for key, word in labels.items())
            lines.append(f"sglang_node_{name}" + (f"{{{said}}}" if said else "") + f" {value}")
    return "\n".join(lines) + "\n"


def run(arguments):
    """Run a program; returns (exit status, output, errors), 127 where it is not there, 124 if it hangs."""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        return 127, "", str(error)
    except subprocess.TimeoutExpired as error:
        return 124, "", str(error)
    return done.returncode, done.stdout, done.stderr


def main():
    link, output = sys.argv[1], Path(sys.argv[2])
    source = node_facts.Source("/", run)
    _status, unit, _errors = run(["systemctl", "show", "--property=" + PROPERTIES, UNIT])
    rows = read_unit(unit, time.clock_gettime(time.CLOCK_MONOTONIC), time.time())
    release, problems = read_release(link)
    for problem in problems:
        print(problem)
    rows += release
    smi = source.program("nvidia-smi")
    if smi:
        status, text, _errors = run([smi, "-q", "-x"])
        rows += read_gpus(text if status == 0 else None)
        rows += [("gpu_xid", found, 1) for found in node_facts.read_xids(source)]
    part = output.with_suffix(".part")
    part.write_text(render(rows), encoding="utf-8")
    part.chmod(0o644)
    part.replace(output)


if __name__ == "__main__":
    main()
