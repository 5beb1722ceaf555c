# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Ask one release's own parser what it makes of a configuration. Run by the engine's interpreter.

Reads ``{"content": text of the YAML file, "named": [keys]}`` as JSON from standard input, and answers in JSON
on standard output. Nothing is loaded, and no GPU is asked for: the parser is built, not the configuration
that it leads to. Every key is put through the release's own reader of the file and its own parser alone, so
that all faults are found at once, and then the whole file.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import json
import logging
import os
import re
import sys

# Since 0.5.19, and before.
MERGERS = ("sglang.srt.utils.server_args_config_parser", "sglang.srt.server_args_config_parser")
# A slip of the pen, but not "enable" for "disable".
CLOSE = 0.92


class Rejected(Exception):
    """What the parser said instead of exiting."""


class Ended(Rejected):
    """The parser would have ended the process in peace, as after printing its help."""


class Notes(logging.Handler):
    """Collects what the engine warns of while it parses."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(re.sub(r"\x1b\[[\d;]*m", "", record.getMessage()))


def load_engine():
    """Return the version, a fresh parser, and the class that reads the YAML file."""
    server_args = importlib.import_module("sglang.srt.server_args")
    parser = argparse.ArgumentParser(prog="sglang")
    server_args.ServerArgs.add_cli_args(parser)
    try:
        merger = importlib.import_module(MERGERS[0])
    except ModuleNotFoundError:
        merger = importlib.import_module(MERGERS[1])
    return importlib.import_module("sglang.version").__version__, parser, merger.ConfigArgumentMerger


def read_yaml(content):
    """Return the map of a YAML text as ``[(key, value)]``, every key as often as it is written.

    Raises Rejected where the text is no YAML, or no map.
    """
    yaml = importlib.import_module("yaml")
    loader = yaml.SafeLoader(content)
    try:
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise Rejected(f"a {root.id} at the root")
        return [
            (loader.construct_object(k, deep=True), loader.construct_object(v, deep=True))
            for k, v in root.value
        ]
    except yaml.MarkedYAMLError as error:
        # Not the error's own text: it quotes the line, which may hold a secret.
        where = error.problem_mark or error.context_mark
        raise Rejected(f"{error.problem} in line {where.line + 1}") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise Rejected(f"no YAML: {type(error).__name__}") from error
    finally:
        loader.dispose()


@contextlib.contextmanager
def _answering(parser, notes):
    """Make the parser raise where it would end the process, and hear what it warns of."""

    def error(message):
        raise Rejected(message)

    parser.error = error
    logging.getLogger().addHandler(notes)
    try:
        yield
    except SystemExit as end:
        raise Ended("the engine prints something and ends") from end
    except (Exception, AssertionError) as fault:
        if isinstance(fault, Rejected):
            raise
        raise Rejected(str(fault) or type(fault).__name__) from fault
    finally:
        logging.getLogger().removeHandler(notes)
        del parser.error


def parse(parser, merger, content, notes):
    """Put a YAML text through the release's reader and parser; Rejected with its message if it refuses."""
    path = os.path.abspath("server.yaml")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(content)
    with _answering(parser, notes):
        # A word of its own: in the form --config=FILE every release ignores it without a word.
        return parser.parse_args(merger.merge_config_with_args(["--config", path]))


def describe(parser, name):
    """Return the action behind an option written without dashes, or None if no option is spelt so."""
    return parser._option_string_actions.get("--" + name)


def successor_of(action):
    """Return what a deprecated option says to use instead, or None."""
    named = re.search(r"[Uu]se (?:the )?['`]?(--[\w-]+(?:\{[\w,]+\})?(?:=\w+)?)", action.help or "")
    return getattr(action, "new_flag", None) or (named.group(1) if named else None)


def is_deprecated(action):
    """Tell whether the release calls an option deprecated."""
    word = re.match(r"\W*(deprecated|removed)\b|.*is deprecated now", action.help or "", re.IGNORECASE)
    return type(action).__name__.startswith("Deprecated") or bool(word)


def usable_spellings(parser, merger, action):
    """Return the other long spellings of the same setting that the release's YAML reader lets pass.

    Flags that lead to one setting set it to different values, so that only options with a value count.
    """
    refused = getattr(merger, "unsupported_actions", {})
    options = [
        option[2:]
        for other in parser._actions
        if other is action or (other.dest == action.dest and other.nargs is None and action.nargs is None)
        for option in other.option_strings
        if option.startswith("--")
    ]
    return [name for name in options if name.replace("-", "_") not in refused]


def judge(parser, merger, key, value):
    """Judge one key alone. Returns a description in plain values; `error` is None where it is accepted."""
    yaml = importlib.import_module("yaml")
    answer = {
        "key": key if isinstance(key, str) else repr(key),
        "kind": "null" if value is None else type(value).__name__,
        "shown": value if isinstance(value, (str, int, float, bool)) else json.dumps(value, default=str),
        "error": None,
        "ends": False,
        "notes": [],
        "effective": None,
    }
    if not isinstance(key, str):
        return dict(answer, exact=False, error=f"the key is read as {type(key).__name__}, not as text")
    action, options = describe(parser, key), parser._option_string_actions
    longs = [option[2:] for option in options if option.startswith("--")]
    plain = key.lstrip("-").lower().replace("_", "-")
    abbreviated = [] if action else [name for name in longs if key and name.startswith(key)]
    answer.update(
        exact=action is not None,
        candidates=abbreviated,
        respelt=plain if plain != key and plain in longs else None,
        close=difflib.get_close_matches(plain, longs, 3, CLOSE),
    )
    if action is None and len(abbreviated) == 1:
        action = describe(parser, abbreviated[0])
    if action is not None:
        taking_file = usable_spellings(parser, merger, action)
        answer.update(
            dest=action.dest,
            choices=[str(c) for c in action.choices] if action.choices else None,
            flag=action.nargs == 0,
            several=action.nargs in ("+", "*"),
            type=getattr(action.type, "__name__", "str"),
            json=isinstance(action.default, str) and action.default.startswith("{"),
            deprecated=is_deprecated(action),
            successor=successor_of(action),
            in_file=key.replace("-", "_") not in getattr(merger, "unsupported_actions", {}),
            spellings=[name for name in taking_file if name != key],
        )
    notes = Notes()
    try:
        parsed = parse(parser, merger, yaml.safe_dump({key: value}, allow_unicode=True), notes)
        if action is not None:
            answer["effective"] = getattr(parsed, action.dest, None)
    except Rejected as refusal:
        answer.update(error=str(refusal), ends=isinstance(refusal, Ended))
    answer["notes"] = notes.lines
    return answer


def examine(parser, merger_class, content, named):
    """Judge every key of a text, then the whole. Returns the answer of this program, without the version."""
    merger = merger_class(parser)
    needed = [action for action in parser._actions if action.required]
    for action in needed:
        action.required = False
    values = vars(parser.parse_args([]))
    keys, text_error, whole_error = [], None, None
    try:
        for key, value in read_yaml(content):
            keys.append(judge(parser, merger, key, value))
    except Rejected as refusal:
        text_error = str(refusal)
    for action in needed:
        action.required = True
    if text_error is None:
        try:
            values = vars(parse(parser, merger, content, Notes()))
        except Rejected as refusal:
            whole_error = str(refusal)
            values.update({k["dest"]: k["effective"] for k in keys if k.get("dest") and not k["error"]})
    actions = {key: describe(parser, key) for key in named}
    return {
        "keys": keys,
        "text_error": text_error,
        "whole_error": whole_error,
        "values": {name.replace("_", "-"): value for name, value in values.items()},
        "named": {key: action.dest for key, action in actions.items() if action is not None},
        "refused": sorted(getattr(merger, "unsupported_actions", {})),
        "options": sorted(option[2:] for option in parser._option_string_actions if option.startswith("--")),
        "attention": [str(c) for c in getattr(describe(parser, "attention-backend"), "choices", None) or []],
    }


def main():
    request = json.load(sys.stdin)
    # What the engine prints while it is imported must not end up in the answer.
    with open(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)
        version, parser, merger_class = load_engine()
        result = examine(parser, merger_class, request["content"], request["named"])
        json.dump(dict(result, version=version), answer, default=str)


if __name__ == "__main__":
    main()
