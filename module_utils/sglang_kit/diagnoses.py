# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Find the cause of a death: match what was observed against diagnoses, which are data."""

from __future__ import annotations

import re

from ansible.module_utils.sglang_kit.startup_log import parse_bar, split_prefix, split_record

CONDITIONS = ("match", "result", "status")
# What an engine prints in every start and what therefore explains no death.
_NOISE = re.compile(
    r"Ignore import error|.*UserWarning: |\s*warnings\.warn\(|W\d{4} |frame #\d|.*is deprecated and will be|"
    r".*is not installed; audio|Received sigquit from a child|SIGQUIT received|kill_process_tree called|"
    r"Sleeping \d+ seconds before crash|server_args=|[\s^~]+$|usage: |\s+\[-"
)
_SCHEDULER = "Scheduler hit an exception"
# Without its own warm-up the engine posts this to itself before it listens, and logs the failure.
_HARMLESS = "/freeze_gc"
_TRACEBACK = "Traceback (most recent call last)"


def diagnose(diagnoses, unit, lines):
    """Return the diagnoses that fit, at most two, the more specific first.

    diagnoses: list of dict with id, cause, remedy, source and one or more of CONDITIONS: match (regular
    expression found in a line), result (systemd's Result), status (exit status or signal, int); all that are
    given must hold. The list's order is the order of precedence. A later one is named only if a line of the
    log speaks for it: a bare exit status adds nothing to a cause that is known.
    unit: the unit's part of an observation. lines: the log of the start (list of str).
    """
    found = []
    for entry in diagnoses:
        if "result" in entry and entry["result"] != unit["result"]:
            continue
        if "status" in entry and entry["status"] != unit["exit_status"]:
            continue
        line = None
        if "match" in entry:
            line = next((text for text in lines if re.search(entry["match"], text)), None)
            if line is None:
                continue
        elif found:
            continue
        found.append(dict(entry, line=line))
    return found[:2]


def telling_lines(lines, limit=10):
    """Return the lines that say most about a death (list of str).

    The exception of the process that failed first, with the end of its stack; without one, the last lines.
    """
    flat = [line for text in lines for line in split_record(text) if not parse_bar(line)]
    flat = [line for line in flat if not _NOISE.match(split_prefix(line)[0])]
    begin = next((i for i, line in enumerate(flat) if _SCHEDULER in line), None)
    if begin is None:
        begin = next((i for i in reversed(range(len(flat))) if _TRACEBACK in flat[i]), None)
    if begin is None:
        return flat[-limit:]
    end = begin + 1
    while end < len(flat) and flat[end].startswith((" ", "\t")):
        end += 1
    words = flat[end : end + 2]
    if any(_HARMLESS in line for line in words):
        return flat[-limit:]
    return [flat[begin], *flat[begin + 1 : end][-(limit - 1 - len(words)) :], *words]
