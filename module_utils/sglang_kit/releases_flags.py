# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The server flags of an SGLang release, read from its sources.

Up to 0.5.13 flags are `parser.add_argument` calls; later most are annotated fields (`A[type, "help"]` or
`A[type, Arg(...)]`), from 0.5.20 in files of their own. All three forms are read, and nothing is imported.
"""

from __future__ import annotations

import ast
import glob
import os
import re

_RECORD = "srt/server_args.py"
_FIELDS = "srt/arg_groups/fields/*.py"
_MERGERS = ("srt/utils/server_args_config_parser.py", "srt/server_args_config_parser.py")
# What the YAML file of `--config` may always set.
_PLAIN_ACTIONS = (None, "store", "store_true")
# Those of options without a value, or how their names begin.
_FLAG_ACTIONS = ("store_true", "BooleanOptional", "DeprecatedStoreTrue", "DeprecatedStoreConst")


class FlagsError(Exception):
    """The flags of a tree cannot be read; the message says what was looked for."""


def read_flags(package):
    """Return the flags of the package folder of a release.

    Returns a dict: name without dashes -> ``{"canonical", "choices", "deprecated", "successor", "in_file"}``.
    `canonical` is the first spelling; `choices` is a list of strings, None where any value goes or the list
    is made at run time; `successor` is what a deprecated flag names instead; `in_file` tells whether the YAML
    file of ``--config`` may set it. Raises FlagsError if the package has no server arguments of a known form.
    """
    record = os.path.join(package, _RECORD)
    if not os.path.isfile(record):
        raise FlagsError(f"{package} has no {_RECORD}; expected the package folder of an SGLang release")
    flags = {}
    for path in [record, *sorted(glob.glob(os.path.join(glob.escape(package), _FIELDS)))]:
        with open(path, encoding="utf-8") as source:
            tree = ast.parse(source.read())
        lists = {}
        _read_lists(package, tree, lists)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "add_argument"
            ):
                names = [
                    a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
                ]
                _add(flags, names, {k.arg: k.value for k in node.keywords}, lists)
            elif isinstance(node, ast.ClassDef) and (path != record or node.name == "ServerArgs"):
                for field in node.body:
                    _read_field(flags, field, lists)
    _note_files(flags, package)
    if len(flags) < 100:
        raise FlagsError(
            f"only {len(flags)} flags were found in {package}: they are declared in a form that is not known"
        )
    return flags


def compare(flags, arguments, renamed):
    """Say what becomes of today's arguments in a release.

    `flags` is what read_flags returned, `arguments` maps names without dashes to values, `renamed` maps names
    that releases dropped to their successors. Returns findings ``{"flag", "problem", "remedy"}``, where
    problem is unknown, deprecated, not in a file, or value.
    """
    findings = []
    for name in sorted(arguments):
        flag, value = flags.get(name), arguments[name]
        if value is False:
            continue
        if flag is None:
            successor = renamed.get(name)
            findings.append(
                {
                    "flag": name,
                    "problem": "unknown",
                    "remedy": f"use {successor}"
                    if successor
                    else "take it out, or find its successor in the output of --help",
                }
            )
            continue
        successor = flag["successor"] or renamed.get(name)
        if not flag["in_file"]:
            # The other spelling of the same flag may be one that a file may set.
            other = [
                n for n, f in flags.items() if f["in_file"] and n != name and f["successor"] == "--" + name
            ]
            successor = "--" + other[0] if other else successor
            remedy = f"use {successor}" if successor else "this release takes it on the command line only"
            findings.append({"flag": name, "problem": "not in a file", "remedy": remedy})
        elif flag["deprecated"]:
            remedy = f"use {successor}" if successor else "take it out before a release removes it"
            later = flags.get((successor or "").lstrip("-"))
            if later is not None and not later["in_file"]:
                remedy = f"keep it for now: in this release a file cannot set {successor}"
            findings.append({"flag": name, "problem": "deprecated", "remedy": remedy})
        if flag["choices"] and isinstance(value, str) and value not in flag["choices"]:
            remedy = "{} is none of {}".format(value, ", ".join(flag["choices"]))
            findings.append({"flag": name, "problem": "value", "remedy": remedy})
    return findings


def _add(flags, names, options, lists):
    names = [name[2:] for name in names if name.startswith("--")]
    if not names:
        return
    action = _action(options.get("action"))
    help_text = _text(options.get("help"))
    deprecated = (action or "").startswith("Deprecated") or "deprecated" in help_text.lower()
    named = re.search(r"[Uu]se (?:the )?['`]?(--[\w-]+(?:=\w+)?)", help_text)
    successor = _text(options.get("new_flag")) or (named.group(1) if named else None)
    plain = action in _PLAIN_ACTIONS
    nargs = options.get("nargs")
    single = "AliasStore" in (action or "") if nargs is None else getattr(nargs, "value", "") is None
    dest = _text(options.get("dest")) or names[0].replace("-", "_")
    if action == "BooleanOptionalAction":
        names += ["no-" + name for name in names]
    for name in names:
        flags[name] = {
            "canonical": names[0],
            "choices": _choices(options.get("choices"), lists),
            "deprecated": deprecated,
            "successor": successor if deprecated else None,
            "in_file": plain,
            "dest": dest,
            "single": plain or single,
            # The older readers hand "true" on with a flag, unless its own name is where it is stored.
            "hands_on_true": name.replace("-", "_") != dest and (action or "").startswith(_FLAG_ACTIONS),
        }


def _note_files(flags, package):
    """Work out which spellings the release's own reader of the YAML file refuses."""
    texts = []
    for name in _MERGERS:
        path = os.path.join(package, name)
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as source:
                texts.append(source.read())
    if any("_takes_one_value" in text for text in texts):
        good = {
            key for name, f in flags.items() if f["single"] for key in (f["dest"], name.replace("-", "_"))
        }
        bad = {
            key for name, f in flags.items() if not f["single"] for key in (f["dest"], name.replace("-", "_"))
        }
        refused = bad - good
        wrong = set()
    else:
        # Older readers know a flag by where it is stored: the old spelling of a renamed flag passes, the new
        # fails.
        refused = {f["dest"] for f in flags.values() if not f["in_file"]}
        wrong = {name for name, f in flags.items() if f["hands_on_true"]}
    for name, flag in flags.items():
        flag["in_file"] = name.replace("-", "_") not in refused and name not in wrong
        del flag["dest"], flag["single"], flag["hands_on_true"]


def _read_field(flags, field, lists):
    if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
        return
    note = field.annotation
    if not (isinstance(note, ast.Subscript) and getattr(note.value, "id", None) in ("A", "Annotated")):
        return
    inside = note.slice.value if isinstance(note.slice, ast.Index) else note.slice
    described, options = False, {}
    for part in inside.elts[1:] if isinstance(inside, ast.Tuple) else ():
        if isinstance(part, ast.Call) and getattr(part.func, "id", None) == "Arg":
            described, options = True, {k.arg: k.value for k in part.keywords}
        elif not isinstance(part, ast.Call):
            described = True
            options.setdefault("help", part)
    if not described or getattr(options.get("no_cli"), "value", False):
        return
    options["dest"] = ast.Constant(value=field.target.id)
    own = _text(options.get("cli_name")) or "--" + field.target.id.replace("_", "-")
    aliases = options.get("aliases")
    names = [own] + [_text(a) for a in (aliases.elts if isinstance(aliases, ast.List) else ())]
    if "choices" not in options:
        options = dict(options, choices=_literal(inside.elts[0]))
    extra = options.get("action_kwargs")
    if isinstance(extra, ast.Dict):
        options = dict(options, **{_text(k): v for k, v in zip(extra.keys, extra.values)})
    _add(flags, names, options, lists)


def _literal(annotation):
    """Return the Literal[...] inside an annotation, as the tuple of its values, or None."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", None) == "Literal":
            inside = node.slice.value if isinstance(node.slice, ast.Index) else node.slice
            return inside if isinstance(inside, ast.Tuple) else ast.Tuple(elts=[inside])
    return None


def _action(node):
    if node is None:
        return None
    if isinstance(node, ast.Constant):
        return node.value
    return getattr(node, "id", None) or getattr(node, "attr", None) or "an expression"


def _text(node):
    """Return the text of a string expression, as far as it is literal."""
    return (
        "".join(n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))
        if node
        else ""
    )


def _choices(node, lists):
    if isinstance(node, ast.Name):
        return lists.get(node.id)
    if isinstance(node, (ast.List, ast.Tuple)) and node.elts:
        values = [getattr(item, "value", None) for item in node.elts]
        return values if all(isinstance(value, str) for value in values) else None
    return None


def _read_lists(package, tree, lists, depth=3):
    """Collect the lists of strings that a file defines or imports; one that is extended later is left out."""
    for node in tree.body:
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("sglang.srt.arg_groups")
            and depth
        ):
            path = os.path.join(package, *node.module.split(".")[1:]) + ".py"
            if os.path.isfile(path):
                inner = {}
                with open(path, encoding="utf-8") as source:
                    _read_lists(package, ast.parse(source.read()), inner, depth - 1)
                wanted = {a.name: a.asname or a.name for a in node.names}
                lists.update({wanted[name]: values for name, values in inner.items() if name in wanted})
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values = _choices(node.value, lists)
            if values is not None:
                lists[node.targets[0].id] = values
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("append", "extend", "insert", "remove"):
            lists.pop(getattr(node.value, "id", None), None)
