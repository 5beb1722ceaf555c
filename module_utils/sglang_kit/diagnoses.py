# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Find the cause of a death: match what was observed against diagnoses, which are data."""

from __future__ import annotations

import re

from ansible.module_utils.sglang_kit.startup_log import parse_bar, split_prefix, split_record

CONDITIONS = ("match", "kernel", "result", "status", "load_state", "phase", "verdict")
# What an engine prints in every start and what therefore explains no death.
_NOISE = re.compile(
    r"Ignore import error|.*UserWarning: |\s*warnings\.warn\(|W\d{4} |frame #\d|.*is deprecated and will be|"
    r".*is not installed; audio|Received sigquit from a child|SIGQUIT received|kill_process_tree called|"
    r"Sleeping \d+ seconds before crash|server_args=|[\s^~]+$|usage: |\s+\[-"
)
# What a server says for each request.
_ROUTINE = re.compile(r"(?:Prefill|Decode) batch, |\S+:\d+ - \"")
# Lines in which any word can stand without being anybody's complaint.
_ALL_KINDS_OF_WORDS = re.compile(r"server_args=|Ignore import error|Received a request|Finish: ")
_SCHEDULER = "Scheduler hit an exception"
# Without its own warm-up the engine posts this to itself before it listens, and logs the failure.
_HARMLESS = "/freeze_gc"
_DEATH = re.compile(r"launcher: the engine's process \S+ \(pid \d+\) was killed")
_TRACEBACK = "Traceback (most recent call last)"
# What stands between the killed process and the exception of one that missed it.
CONSEQUENCE = "What another process said, as a consequence:"


def diagnose(diagnoses, unit, lines, kernel=(), phase=None, verdict=None):
    """Return the diagnoses that fit, at most two, the more specific first; "line" is what speaks for each.

    diagnoses: list of dict with id, cause, remedy, source and one or more of CONDITIONS, which must all hold:
    match and kernel (regular expressions found in a line), result (systemd's Result), status (exit status or
    signal, int), load_state (systemd's LoadState), phase (list), verdict (the gate's word). The list
    is in order of precedence. A second one is named only if a line of its own speaks for it, and if it does
    not say "follows", which marks what other causes lead to. Behind an entry that says "ends" and fits, no
    other is looked for: all that is said beside it are consequences.
    unit: the unit's part of an observation. lines: the log of the start (list of str). kernel: the kernel's
    (list of str). phase: the phase in which it ended.
    """
    words = [line for line in lines if not _ALL_KINDS_OF_WORDS.match(split_prefix(line)[0])]
    facts = {"result": unit["result"], "status": unit["exit_status"], "load_state": unit.get("load_state")}
    found = []
    for entry in diagnoses:
        if any(key in entry and entry[key] != value for key, value in facts.items()):
            continue
        if entry.get("verdict", verdict) != verdict or ("phase" in entry and phase not in entry["phase"]):
            continue
        line = _speaks(entry, "match", words) or _speaks(entry, "kernel", kernel)
        if line is None and ("match" in entry or "kernel" in entry):
            continue
        if not found or not (line is None or line == found[0]["line"] or entry.get("follows")):
            found.append(dict(entry, line=line))
        if entry.get("ends"):
            break
    return found[:2]


def _speaks(entry, key, lines):
    """Return the first line in which the entry's expression is found, or None."""
    if key not in entry:
        return None
    pattern = re.compile(entry[key])
    return next((line for line in lines if pattern.search(line)), None)


def telling_lines(lines, limit=10):
    """Return the lines that say most about a death (list of str).

    Those of the process that failed first: its exception with the end of its stack, or the launcher's word
    that it was killed, with what was said before. Without either, the last lines.
    """
    flat = [line for text in lines for line in split_record(text) if not parse_bar(line)]
    flat = [line for line in flat if not _NOISE.match(split_prefix(line)[0])]
    begin = next((i for i, line in enumerate(flat) if _SCHEDULER in line), None)
    death = next((i for i, line in enumerate(flat) if _DEATH.match(line)), None)
    if death is not None:
        # An exception beside it, even before it, is that of a process which missed the killed one.
        killed = flat.pop(death)
        words = []
        if begin is not None:
            begin -= begin > death
            words = [CONSEQUENCE, *_exception(flat, begin, 4)]
            death = min(begin, death)
        before = [line for line in flat[:death] if not _ROUTINE.match(split_prefix(line)[0])]
        return [*before[-(limit - 1 - len(words)) :], killed, *words]
    if begin is None:
        begin = next((i for i in reversed(range(len(flat))) if _TRACEBACK in flat[i]), None)
    words = [] if begin is None else _exception(flat, begin, limit)
    if not words or any(_HARMLESS in line for line in words[-2:]):
        return flat[-limit:]
    return words


def _exception(lines, begin, limit):
    """Return the exception that begins there (list of str): first line, end of its stack, words."""
    end = begin + 1
    while end < len(lines) and lines[end].startswith((" ", "\t")):
        end += 1
    words = lines[end : end + 2]
    return [lines[begin], *lines[begin + 1 : end][-(limit - 1 - len(words)) :], *words]
