# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Plan the edit that makes a class hand named methods to one of its attributes.

`plan_present` and `plan_absent` read source files and return a `Plan`: the bytes before and after, and what
was found for each method. They decide from the syntax tree, edit whole lines of bytes, and prove the result
before they return it. Nothing here writes to disk. Both raise Refusal where the edit is not possible, and
Conflict, which carries the findings, where a name is taken.
"""

from __future__ import annotations

import ast
import collections
import keyword

from ansible.module_utils.sglang_kit.delegate_class import (
    assignments,
    check_behind,
    find_behind,
    find_existing,
    ways_to,
)
from ansible.module_utils.sglang_kit.delegate_source import Refusal, SourceFile, Tree, find_class, lineage
from ansible.module_utils.sglang_kit.delegate_text import (
    Scope,
    class_end,
    find_blocks,
    indents,
    insert,
    render,
    without,
)

# before, after, pristine (the file without anything of ours): bytes. methods: {name: finding}.
Plan = collections.namedtuple("Plan", "path before after pristine methods delegate_lines")
# A file as it is, our blocks in it, and the same file and class without them.
_Opened = collections.namedtuple("_Opened", "current blocks pristine cls")


class Conflict(Refusal):
    """A name is taken by something that does not do the delegate's work; `methods` holds every finding."""

    def __init__(self, message, methods):
        super().__init__(message)
        self.methods = methods


def plan_present(path, class_name, delegate, methods, source_path, source_class):
    """Plan that the class hands exactly these methods to its delegate, except those it has without us."""
    _check_names(class_name, delegate, methods)
    tree = Tree()
    opened = _open(tree, path, class_name)
    pristine, cls = opened.pristine, opened.cls
    classes = list(lineage(tree, pristine, cls))
    assigned = assignments(classes, delegate)
    if not assigned:
        raise Refusal(
            f"{pristine.path} line {cls.lineno}: {class_name} never assigns self.{delegate}, nor does a base "
            "in the same package. Expected the attribute that holds the object behind. Check delegate "
            "against the installed release."
        )
    behind_file = tree.read(source_path)
    behind = find_class(behind_file, source_class)
    check_behind(tree, pristine, classes, delegate, (behind_file, behind))
    indent, unit = indents(pristine, cls)
    ways = ways_to(classes, delegate)

    findings, rendered, functions = {}, {}, {}
    for method in methods:
        existing = find_existing(classes, method, ways)
        if existing:
            findings[method] = existing
            continue
        where, owner, function = find_behind(tree, behind_file, behind, method)
        functions[method] = function
        # An alias in the class behind has the signature of another name.
        lines = render(_named(function, method), Scope(pristine, cls, where, owner), delegate, indent, unit)
        rendered[method] = lines
        written = any(b.delegate == delegate and b.lines == lines for b in opened.blocks)
        findings[method] = {
            "outcome": "ours" if written else "added",
            "file": pristine.path,
            "class": class_name,
            "detail": f"as {owner.name}.{method}, line {function.lineno} of {where.path}",
        }
    _refuse_conflicts(opened, class_name, delegate, findings, rendered)
    for block in opened.blocks:
        if block.delegate == delegate and block.method not in findings:
            findings[block.method] = _removed(opened, block)
    after, places = _edit(opened, class_name, delegate, rendered, functions)
    for method, place in places.items():
        if method in rendered:
            findings[method].update(place)
    lines = [line for line, _value in assigned]
    return Plan(pristine.path, opened.current.raw, after, pristine.raw, findings, lines)


def plan_absent(path, class_name, delegate, methods):
    """Plan that the class holds nothing that was written for this delegate; all else is left as it is."""
    _check_names(class_name, delegate, methods)
    tree = Tree()
    opened = _open(tree, path, class_name)
    pristine, cls = opened.pristine, opened.cls
    findings = {b.method: _removed(opened, b) for b in opened.blocks if b.delegate == delegate}
    others = [method for method in methods if method not in findings]
    classes = list(lineage(tree, pristine, cls)) if others else [(pristine, cls)]
    ways = ways_to(classes, delegate)
    for method in others:
        nothing = {"outcome": "absent", "file": pristine.path, "detail": f"{class_name} has no such method"}
        findings[method] = find_existing(classes, method, ways) or nothing
    after, _places = _edit(opened, class_name, delegate, {}, {})
    lines = [line for line, _value in assignments(classes, delegate)]
    return Plan(pristine.path, opened.current.raw, after, pristine.raw, findings, lines)


def _check_names(class_name, delegate, methods):
    for what, name in [("class_name", class_name), ("delegate", delegate)] + [
        ("methods", m) for m in methods
    ]:
        mangled = what == "methods" and name.startswith("__") and not name.endswith("__")
        if not name.isidentifier() or keyword.iskeyword(name) or mangled:
            raise Refusal(
                f"{what}: {name!r} is not a name that a class can offer. Expected a Python identifier."
            )
    if len(set(methods)) != len(methods):
        raise Refusal(f"methods names one method twice: {', '.join(methods)}. Expected each once.")


def _open(tree, path, class_name):
    current = tree.read(path)
    cls = find_class(current, class_name)
    blocks = find_blocks(current, cls)
    if not blocks:
        return _Opened(current, blocks, current, cls)
    pristine = SourceFile(current.path, without(current, blocks))
    return _Opened(current, blocks, pristine, find_class(pristine, class_name))


def _named(function, name):
    if function.name == name:
        return function
    fields = {field: getattr(function, field) for field in function._fields}
    return ast.copy_location(type(function)(**dict(fields, name=name)), function)


def _removed(opened, block):
    place = {"file": opened.current.path, "line": block.node.lineno, "end_line": block.node.end_lineno}
    return dict(place, outcome="removed", detail="was written by python_delegate")


def _refuse_conflicts(opened, class_name, delegate, findings, rendered):
    for block in opened.blocks:
        if block.delegate != delegate and block.method in rendered:
            findings[block.method] = {
                "outcome": "conflict",
                "file": opened.current.path,
                "class": class_name,
                "line": block.node.lineno,
                "end_line": block.node.end_lineno,
                "detail": f"handed to {block.delegate} by an earlier run, line {block.node.lineno}",
            }
    taken = [
        f"{name} is {found['detail']}" for name, found in findings.items() if found["outcome"] == "conflict"
    ]
    if taken:
        raise Conflict(
            f"{class_name}: {'; '.join(taken)}. Expected a method that hands on to {delegate}, or none. "
            "Nothing was changed. Take the name from the list of methods if what is there is right, else "
            "restore the file from "
            "its package.",
            findings,
        )


def _edit(opened, class_name, delegate, rendered, functions):
    """Return (the new bytes, {method: its lines}); blocks of other delegates stay as they are."""
    groups = collections.OrderedDict()
    for block in opened.blocks:
        groups.setdefault(block.delegate, []).append(block.lines)
    groups[delegate] = list(rendered.values())
    pristine = opened.pristine
    # Where ours were before, so that what others put behind them since stays where it is.
    offset = opened.blocks[0].start if opened.blocks else class_end(pristine, opened.cls)
    after = insert(pristine, opened.cls, offset, [lines for group in groups.values() for lines in group])
    blocks = opened.blocks
    if after != opened.current.raw:
        kept = {b.method: None for b in opened.blocks if b.delegate != delegate}
        blocks = prove(pristine, after, class_name, dict(kept, **functions))
    return after, {b.method: {"line": b.node.lineno, "end_line": b.node.end_lineno} for b in blocks}


def _alike(one, other):
    """Whether two syntax trees are equal but for positions; four times as fast as comparing their dumps."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, ast.AST):
        return all(_alike(getattr(one, field, None), getattr(other, field, None)) for field in one._fields)
    return one == other


def _parameters(function):
    """A comparable form of a function's parameters and defaults, without annotations."""
    args = function.args
    return (
        [[a.arg for a in group] for group in (args.posonlyargs, args.args, args.kwonlyargs)],
        [a.arg if a else None for a in (args.vararg, args.kwarg)],
        [ast.dump(d) if d is not None else None for d in args.defaults + args.kw_defaults],
    )


def prove(pristine, after, class_name, expected):
    """Compile and re-read new bytes; return the blocks, or raise Refusal unless they are all that is new.

    expected: {name: function of the class behind, or None where a block is kept as it was}.
    """
    new = SourceFile(pristine.path, after)
    new.compile()
    cls = find_class(new, class_name)
    blocks = find_blocks(new, cls)
    wrong = []
    if sorted(b.method for b in blocks) != sorted(expected):
        wrong.append(f"the methods written are {sorted(b.method for b in blocks)}")
    if without(new, blocks) != pristine.raw:
        wrong.append("taking them out does not give the file back")
    for block in blocks:
        function = expected.get(block.method)
        if function is not None and _parameters(block.node) != _parameters(function):
            wrong.append(f"the parameters of {block.method} are not those of the class behind")
    ours = [b.node for b in blocks]
    cls.body = [node for node in cls.body if node not in ours]
    if not _alike(new.tree, pristine.tree):
        wrong.append("something else than the methods would change")
    if wrong:
        raise Refusal(
            f"The edit of {pristine.path} did not prove right and was not written: {'; '.join(wrong)}. "
            f"Expected these methods and nothing else: {', '.join(expected) or 'none'}. Report this with the "
            "file."
        )
    return blocks
