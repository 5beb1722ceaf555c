# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Turn what systemd, the journal and the HTTP server say into one observation. Pure functions."""

from __future__ import annotations

import json
import re

from ansible.module_utils.sglang_kit.startup_log import StartupLog, parse_bar, split_record

UNIT_PROPERTIES = (
    "ActiveState",
    "ExecMainCode",
    "ExecMainStartTimestampMonotonic",
    "ExecMainStatus",
    "InvocationID",
    "LoadState",
    "MainPID",
    "NRestarts",
    "NeedDaemonReload",
    "Result",
    "StatusText",
    "SubState",
    "UnitFileState",
)
# What tells one state of a start from another; the rest of a unit moves all the time.
STATE = ("exists", "load_state", "active_state", "sub_state", "result", "invocation", "restarts")
# Of the kernel's log, what can end an engine: the OOM killer, the GPUs' driver, disks.
_KERNEL = re.compile(
    r"Out of memory: Killed|Memory cgroup out of memory|oom-kill:|fallen off the bus|"
    r"NVRM: (?:Xid|.*(?:failed|is lost))|"
    r"I/O error|blk_update_request|critical medium error|nvme\w+: .*timeout"
)
KERNEL_LINES = 50
# Enough for the whole start of eight ranks with an hour of progress bars.
JOURNAL_LINES = 6000


def parse_unit(text, monotonic_s):
    """Read `systemctl show` (str of KEY=value lines) into the unit's part of an observation.

    monotonic_s: the host's monotonic clock, to turn the time of the start into an age.
    """
    raw = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def number(key):
        value = raw.get(key, "")
        return int(value) if value.isdigit() else 0

    started = number("ExecMainStartTimestampMonotonic") / 1e6
    return {
        "exists": raw.get("LoadState") in ("loaded", "masked"),
        "load_state": raw.get("LoadState", "unknown"),
        "active_state": raw.get("ActiveState", "unknown"),
        "sub_state": raw.get("SubState", "unknown"),
        "result": raw.get("Result", "unknown"),
        "exit_code": number("ExecMainCode"),
        "exit_status": number("ExecMainStatus"),
        "restarts": number("NRestarts"),
        "main_pid": number("MainPID"),
        "invocation": raw.get("InvocationID", ""),
        "status_text": raw.get("StatusText", ""),
        "enabled": raw.get("UnitFileState") == "enabled",
        "needs_reload": raw.get("NeedDaemonReload") == "yes",
        "age_s": round(monotonic_s - started, 1) if started else None,
    }


def is_news(unit, seen):
    """Return whether a unit is in another state than it was seen in before.

    unit, seen: the unit's part of an observation; seen: None before the first.
    """
    return not seen or any(unit[key] != seen.get(key) for key in STATE)


def parse_journal(text):
    """Read `journalctl -o json --all` (str, one object a line) into [(seconds since 1970, message)].

    A message that is not valid text comes as a list of byte values; one that is too long comes as null.
    """
    records = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        message = entry.get("MESSAGE")
        if isinstance(message, list):
            message = bytes(bytearray(message)).decode("utf-8", "replace")
        if message:
            records.append((int(entry.get("__REALTIME_TIMESTAMP", 0)) / 1e6, message))
    return records


def read_start(records, now, active):
    """Read one start's records into its part of an observation.

    records: from parse_journal. now: seconds since 1970. active: True if systemd holds the unit for started,
    which under Type=notify is the launcher's word and stands after the journal has moved on.
    """
    log = StartupLog(at=records[0][0] if records else now)
    for at, message in records:
        log.feed(message, at)
    if active and log.phase != "draining":
        log.phase, log.bar = "serving", None
    known = active or bool(records)
    return {
        "phase": log.phase if known else None,
        "part": log.part,
        "described": log.describe() if known else "no start in the journal",
        "bar": log.bar,
        "progress": log.progress,
        "progress_age_s": round(max(0.0, now - log.last_progress_at), 1),
        "phase_s": round(max(0.0, now - log.history[-1]["at"]), 1),
        "history": log.history if known else [],
        "leads": log.leads,
    }


def tail(records, limit):
    """Return the last `limit` lines of a start (list of str) without its progress bars."""
    lines = []
    for _at, message in records:
        lines.extend(line for line in split_record(message) if not parse_bar(line))
    return lines[-limit:] if limit else []


def kernel_lines(records):
    """Return those of the kernel's records that can explain the end of an engine (list of str)."""
    return [message for _at, message in records if _KERNEL.search(message)][-KERNEL_LINES:]


def gpu_memory(gpus):
    """Return what is held of each GPU's memory, in MiB, and by whom.

    gpus: as gpu_smi.read_xml returns them.
    """
    return [
        {
            "index": gpu["index"],
            "used_mib": gpu["memory_used_mib"],
            "total_mib": gpu["memory_total_mib"],
            "holders": gpu["processes"],
        }
        for gpu in gpus
    ]
