# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Judge the configuration of a server by what its engine's own parser says of it.

The parser is asked in a child process (args_child.py) under the engine's interpreter. Here its answer becomes
findings ``{"id", "key", "severity", "found", "expected", "remedy", "source"}``: severity is error or warning,
source is ``parser`` or where the knowledge comes from, key is empty where the finding is about the whole.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile

from . import args_child
from .args_rules import DROPPED, FILE_FORMS, SUCCESSORS

# Where an engine keeps what it compiles. Nothing of root's may lie there for the service to trip over.
CACHES = (
    "HOME",
    "XDG_CACHE_HOME",
    "HF_HOME",
    "SGLANG_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TMPDIR",
)
SECRET = re.compile(r"(api-key|password|secret|hf-token)$")
HIDDEN = "(hidden)"


class ArgsError(Exception):
    """The engine's parser could not be asked; the message says why and what to do."""


def ask(python, content, named, environment, timeout):
    """Return what args_child.py answers about a YAML text.

    `python` is the engine's interpreter, `named` lists keys, `environment` is added to a bare environment,
    `timeout` is in seconds. Raises ArgsError if there is no answer.
    """
    if not os.access(python, os.X_OK):
        raise ArgsError(f"{python} cannot be run; stage the engine before its parser is asked")
    folder = tempfile.mkdtemp(prefix="sglang-args-")
    bare = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}
    forced = dict.fromkeys(CACHES, folder)
    # Importing the engine must not write into its tree, take memory of GPUs that serve, or ask a hub.
    forced.update(
        PYTHONDONTWRITEBYTECODE="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1"
    )
    try:
        child = subprocess.Popen(
            [python, "-c", inspect.getsource(args_child)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            cwd=folder,
            env=dict(bare, **dict({k: str(v) for k, v in environment.items()}, **forced)),
            start_new_session=True,
        )
        try:
            out, err = child.communicate(json.dumps({"content": content, "named": named}), timeout=timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            raise ArgsError(
                f"the parser of the engine at {python} gave no answer within {timeout} s. "
                "Run it again on a quieter node, or raise the timeout."
            ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if child.returncode:
        last = [line.strip() for line in err.splitlines() if line.strip()][-3:]
        raise ArgsError(
            "the engine at {} cannot even build its parser (exit status {}): {}. It would not start either: "
            "stage it again from a lock that fits the release.".format(
                python, child.returncode, " | ".join(last)
            )
        )
    return json.loads(out)


def judge(answer, named):
    """Return the findings about keys and file, in the order of the file.

    `answer` is what `ask` returned; `named` maps keys to the variables that set them.
    """
    if answer["text_error"]:
        return [
            _finding(
                "file",
                "",
                answer["text_error"],
                "a YAML map of the engine's long options",
                "correct the text of the configuration",
            )
        ]
    findings, seen = [], {}
    owners = {dest: key for key, dest in answer["named"].items()}
    for entry in answer["keys"]:
        dest, key = entry.get("dest"), entry["key"]
        owner = owners.get(dest)
        if owner is not None and key != owner:
            findings.append(
                _finding(
                    "named",
                    key,
                    f"another spelling of {owner}",
                    f"{named[owner]} alone to set it",
                    f"leave it out and set {named[owner]}",
                    "kit",
                )
            )
            continue
        findings += _judge_key(entry, answer)
        first = seen.setdefault((dest, None) if dest else (None, key), entry)
        if first is not entry:
            findings.append(_twice(entry, first))
    if answer["whole_error"] and not any(finding["severity"] == "error" for finding in findings):
        findings.append(
            _finding(
                "whole",
                "",
                answer["whole_error"],
                "a configuration that the parser accepts as a whole",
                "correct what the message names",
            )
        )
    return findings


def muddled(answer, findings):
    """Return the options that something faulty in the configuration was meant for.

    Their parsed value is not what was meant, so that no rule about them says anything of worth.
    """
    faulty = {finding["key"] for finding in findings if finding["severity"] == "error"}
    meant = set(faulty)
    for entry in answer["keys"]:
        if entry["key"] in faulty:
            meant.update([entry.get("respelt"), *entry.get("candidates", ()), *entry.get("close", ())])
    return meant


def effective(answer):
    """Return the values that the configuration's options have after parsing, without their secrets."""
    dests = {entry["dest"].replace("_", "-") for entry in answer["keys"] if entry.get("dest")}
    values = {name: answer["values"][name] for name in sorted(dests) if name in answer["values"]}
    return {name: HIDDEN if SECRET.search(name) and value else value for name, value in values.items()}


def explain(findings, severity):
    """Return one line for each finding of a severity."""
    return [
        "{}: found {}, expected {}. Remedy: {}. ({})".format(
            f["key"] or "the configuration", f["found"], f["expected"], f["remedy"], f["source"]
        )
        for f in findings
        if f["severity"] == severity
    ]


def as_yaml(flags):
    """Write the flags in a text as lines of the file: ``--a-{b,c}=d`` is "a-b: d and a-c: d"."""
    return " and ".join(f"{name}: {value}" if value else name for name, value in _flags_in(flags))


def successor(key, answer, own=None):
    """Return what to write in the file in place of an option, or None if a file of this release has nothing.

    `own` is what the release itself says to use. The table of renamed options is read in both directions: a
    newer name may have been given to an older release.
    """
    for flags in (own, SUCCESSORS.get(key), FILE_FORMS.get(key)):
        names = [name for name, _value in _flags_in(flags or "")]
        if names and all(
            name in answer["options"] and name.replace("-", "_") not in answer["refused"] for name in names
        ):
            return as_yaml(flags)
    older = [old for old, later in SUCCESSORS.items() if key in dict(_flags_in(later))]
    return next((old for old in older if old in answer["options"]), None)


def _flags_in(text):
    """Return ``[(name, value or empty)]`` of the flags in a text, with braces written out."""
    found = []
    for name, value in re.findall(r"--([\w-]+(?:\{[\w,]+\})?)(?:=([\w.]+))?", text):
        head, _, tails = name.partition("{")
        found += [(head + tail, value) for tail in tails.rstrip("}").split(",")]
    return found


def _finding(identifier, key, found, expected, remedy, source="parser", severity="error"):
    return {
        "id": identifier,
        "key": key,
        "severity": severity,
        "found": str(found),
        "expected": expected,
        "remedy": remedy,
        "source": source,
    }


def _shown(entry):
    """Return a key's value for a message; never a secret's."""
    return HIDDEN if SECRET.search(entry["key"].replace("_", "-")) else repr(entry["shown"])


def _said(entry):
    """Return the parser's message without the list of choices, and without a secret."""
    if SECRET.search(entry["key"].replace("_", "-")):
        return HIDDEN
    return entry["error"].split(" (choose from")[0]


def _twice(entry, first):
    same = entry["key"] == first["key"]
    return _finding(
        "twice",
        entry["key"],
        "it a second time" if same else "the same setting as {}".format(first["key"]),
        "every setting once",
        "keep one of them: the last one wins without a word",
        "kit",
    )


def _judge_key(entry, answer):
    """Return the findings about one key."""
    key = entry["key"]
    if not entry["exact"]:
        return [_unknown(entry, answer)]
    # Some readers do not know that the old spelling of an option takes no value, and give it one.
    if not entry["in_file"] or (
        entry["flag"] and entry["kind"] == "bool" and entry["error"] and not entry["ends"]
    ):
        return [_refused_in_file(entry, answer)]
    if entry["kind"] == "null":
        return [
            _finding(
                "null",
                key,
                "no value, which the engine reads as the text 'None'",
                "a value",
                "leave the key out to have the engine's default",
                "kit",
            )
        ]
    if key == "config":
        return [
            _finding(
                "config",
                key,
                _shown(entry),
                "no configuration inside the configuration",
                "leave it out: it is read by nobody",
                "kit",
            )
        ]
    if entry["error"]:
        return [_refused_value(entry)]
    return _doubtful(entry, answer)


def _unknown(entry, answer):
    key = entry["key"]
    if "candidates" not in entry:
        return _finding(
            "spelling", key, entry["error"], "a long option of the engine", "put the key in quotes"
        )
    known = "an option of SGLang {}".format(answer["version"])
    new = successor(key, answer)
    if entry["respelt"]:
        return _finding("spelling", key, "another spelling", known, "write {}".format(entry["respelt"]))
    if new:
        return _finding("renamed", key, "an option that this release does not have", known, f"use {new}")
    if key in DROPPED:
        return _finding(
            "dropped",
            key,
            "an option that this release does not have",
            known,
            f"leave it out: {DROPPED[key]}",
            "kit",
        )
    if len(entry["candidates"]) > 1:
        several = ", ".join(entry["candidates"])
        return _finding(
            "ambiguous", key, "the beginning of several options", "one option in full", f"choose of {several}"
        )
    if entry["candidates"]:
        full = entry["candidates"][0]
        return _finding(
            "abbreviated",
            key,
            f"the beginning of {full}",
            "the option in full",
            f"write {full}: a later release may read it as something else",
            severity="error" if entry["error"] else "warning",
        )
    close = " or ".join(entry["close"])
    remedy = f"write {close} if that is meant" if close else "take it out; the engine would refuse to start"
    return _finding("unknown", key, "an option that this release does not have", known, remedy)


def _refused_in_file(entry, answer):
    later = successor(entry["key"], answer, entry["successor"])
    if entry["spellings"]:
        remedy = "write {}, which sets the same".format(" or ".join(entry["spellings"]))
    elif later:
        remedy = f"use {later}"
    else:
        remedy = "leave it out; it can be set on a command line only"
    return _finding(
        "not-in-file",
        entry["key"],
        "an option that the YAML reader of SGLang {} cannot set".format(answer["version"]),
        "one that a file may set",
        remedy,
    )


def _refused_value(entry):
    key = entry["key"]
    if entry["ends"]:
        return _finding("value", key, _said(entry), "settings only", "leave it out")
    if entry["choices"]:
        choices = entry["choices"]
        alike = {choice.lower(): choice for choice in choices}
        near = difflib.get_close_matches(str(entry["shown"]).lower(), alike, 1)
        remedy = f"write {alike[near[0]]}" if near else "choose of {}".format(", ".join(choices))
        return _finding("value", key, _shown(entry), "a value that this release knows", remedy)
    if entry["flag"]:
        return _finding(
            "value",
            key,
            f"{_shown(entry)}: {_said(entry)}",
            "true or false",
            "write true to give the flag, or leave it out",
        )
    kinds = {"int": "an integer", "float": "a number", "loads": "JSON in quotes"}
    expected = "several values" if entry["several"] else kinds.get(entry["type"], "one value")
    return _finding(
        "value", key, f"{_shown(entry)}: {_said(entry)}", expected, "correct the value, or leave it out"
    )


def _doubtful(entry, answer):
    """Findings about a key that the parser accepts."""
    key, value, found = entry["key"], entry["effective"], []
    if entry["json"] and not _is_object(value):
        found.append(
            _finding(
                "json",
                key,
                _shown(entry) if entry["kind"] == "str" else "a map, which this release hands on as no JSON",
                "a JSON object",
                "write it as JSON in quotes",
                "kit",
            )
        )
    if entry["kind"] == "bool" and not entry["flag"] and value in ("true", "false"):
        found.append(
            _finding(
                "boolean",
                key,
                f"a boolean, which the engine reads as the text '{value}'",
                "one value",
                "put the value in quotes if the text is meant, else leave the key out",
                "kit",
            )
        )
    if entry["kind"] == "list" and entry["shown"] == "[]":
        found.append(
            _finding(
                "empty",
                key,
                "an empty list, which is as if it was not there",
                "values",
                "leave it out",
                "kit",
                "warning",
            )
        )
    if entry["deprecated"] or any("deprecated" in note for note in entry["notes"]):
        found.append(_deprecated(entry, answer))
    return found


def _deprecated(entry, answer):
    later = successor(entry["key"], answer, entry["successor"])
    coming = as_yaml(entry["successor"] or "")
    if later:
        remedy = f"use {later}"
    elif coming:
        remedy = f"keep it for now: in this release a file cannot set {coming}"
    else:
        remedy = "take it out before a release removes it"
    return _finding(
        "deprecated",
        entry["key"],
        "a deprecated option",
        "one that the next releases have",
        remedy,
        severity="warning",
    )


def _is_object(value):
    try:
        return isinstance(json.loads(value), dict)
    except (TypeError, ValueError):
        return False
