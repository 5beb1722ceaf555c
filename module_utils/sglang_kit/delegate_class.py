# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What a class and the class behind its delegate have already, told from their syntax trees.

`classes` is always a list of (SourceFile, ClassDef): a class and its bases within the tree, nearest first.
"""

from __future__ import annotations

import ast
import contextlib

from ansible.module_utils.sglang_kit.delegate_source import (
    FUNCTIONS,
    NotInTree,
    Refusal,
    bindings,
    lineage,
    resolve,
)
from ansible.module_utils.sglang_kit.delegate_text import self_name

_BRANCHES = (ast.If, ast.IfExp, *((ast.Match,) if hasattr(ast, "Match") else ()))


def _is_name(node, name):
    return isinstance(node, ast.Name) and node.id == name


def _mentions(nodes, me, names):
    """Whether code reads one of `names` of the object called `me`, plainly or by getattr with a constant."""
    for node in (sub for root in nodes for sub in ast.walk(root)):
        if isinstance(node, ast.Attribute) and node.attr in names and _is_name(node.value, me):
            return True
        if isinstance(node, ast.Call) and _is_name(node.func, "getattr") and len(node.args) > 1:
            who, what = node.args[:2]
            if _is_name(who, me) and isinstance(what, ast.Constant) and what.value in names:
                return True
    return False


def _is_part(node, me, names):
    """Whether an expression is `self.<one of names>` or a chain of attributes of it."""
    while isinstance(node, ast.Attribute):
        if _is_name(node.value, me):
            return node.attr in names
        node = node.value
    return False


def _functions(classes):
    for _where, cls in classes:
        for found in bindings(cls.body).values():
            yield from (b.node for b in found if isinstance(b.node, FUNCTIONS) and self_name(b.node))


def assignments(classes, attribute):
    """Return [(line, value or None)] of each `self.<attribute> = value` or definition in a class body."""
    found = [(b.node.lineno, None) for _where, cls in classes for b in bindings(cls.body).get(attribute, [])]
    for function in _functions(classes):
        me = self_name(function)
        for node in ast.walk(function):
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            for target in getattr(node, "targets", None) or [node.target]:
                for sub in ast.walk(target):
                    if isinstance(sub, ast.Attribute) and sub.attr == attribute and _is_name(sub.value, me):
                        found.append((node.lineno, node.value if sub is target else None))
    return sorted(found, key=lambda item: item[0])


def ways_to(classes, delegate):
    """Return the attributes that lead to the delegate: itself, what returns it, and what is a part of it."""
    ways, functions = {delegate}, list(_functions(classes))
    while True:
        more = set()
        for function in functions:
            me = self_name(function)
            for node in ast.walk(function):
                if (
                    isinstance(node, ast.Return)
                    and node.value is not None
                    and _mentions([node.value], me, ways)
                ):
                    more.add(function.name)
                if isinstance(node, ast.Assign) and _is_part(node.value, me, ways):
                    more.update(
                        t.attr for t in node.targets if isinstance(t, ast.Attribute) and _is_name(t.value, me)
                    )
        if more <= ways:
            return ways
        ways |= more


def _is_stub(function):
    """Whether a body does nothing: only a docstring, pass, ..., raise, or the return of a constant."""
    for node in function.body:
        constant = isinstance(node, (ast.Expr, ast.Return)) and isinstance(
            node.value, (ast.Constant, type(None))
        )
        if not constant and not isinstance(node, (ast.Pass, ast.Raise)):
            return False
    return True


def _oddity(binding):
    """Say what a class has under a name if it is no ordinary method; None if it is one."""
    node = binding.node
    if isinstance(node, ast.ClassDef):
        return "a class"
    if not isinstance(node, FUNCTIONS):
        return "an assignment in the class body"
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if "property" in name or name in ("setter", "getter", "deleter"):
            return "a property"
        if name in ("classmethod", "staticmethod"):
            return f"a {name}"
    return None if binding.certain else "a method defined only under a condition"


def _followed(names, method):
    """Return the binding of a method, an alias (`method = other`) followed within the class body."""
    binding, seen = names[method][-1], {method}
    while isinstance(binding.node, ast.Assign) and isinstance(binding.node.value, ast.Name):
        other = binding.node.value.id
        if other in seen or other not in names:
            break
        seen.add(other)
        binding = names[other][-1]
    return binding


def _finding(outcome, where, cls, node, detail):
    place = {"file": where.path, "class": cls.name, "line": node.lineno, "end_line": node.end_lineno}
    return dict(place, outcome=outcome, detail=detail)


def find_existing(classes, method, ways):
    """Return the finding (`upstream` or `conflict`) for a method that the class has without us, else None.

    A base's stub counts as nothing there, as does a `__getattr__` that does not plainly hand on.
    """
    for position, (where, cls) in enumerate(classes):
        names = bindings(cls.body)
        if method not in names:
            continue
        binding = _followed(names, method)
        node, odd = binding.node, _oddity(binding)
        what = f"{odd or 'a method'} of {cls.name}, line {node.lineno} of {where.path}"
        if odd:
            return _finding("conflict", where, cls, node, f"{what}, where a method is expected")
        if _is_stub(node):
            if position:
                continue
            return _finding("conflict", where, cls, node, f"{what}, whose body does nothing")
        if not _mentions(node.body, self_name(node), ways):
            return _finding("conflict", where, cls, node, f"{what}, whose body never uses the delegate")
        return _finding("upstream", where, cls, node, what)
    for where, cls in classes:
        for binding in bindings(cls.body).get("__getattr__", [])[-1:]:
            if isinstance(binding.node, FUNCTIONS) and binding.certain and _hands_on(binding.node, ways):
                what = f"__getattr__ of {cls.name}, line {binding.node.lineno} of {where.path}"
                return _finding("upstream", where, cls, binding.node, what)
    return None


def _hands_on(function, ways):
    """Whether a `__getattr__` gives every name to the delegate: getattr(self.delegate, name), no branch."""
    args = function.args.args
    if len(args) != 2 or any(isinstance(node, _BRANCHES) for node in ast.walk(function)):
        return False
    for node in ast.walk(function):
        call = node.value if isinstance(node, ast.Return) else None
        if isinstance(call, ast.Call) and _is_name(call.func, "getattr") and len(call.args) == 2:
            who, what = call.args
            if _is_name(what, args[1].arg) and _is_part(who, args[0].arg, ways):
                return True
    return False


def find_behind(tree, source, cls, method):
    """Return (SourceFile, class, function) of a method of the class behind, its own or a base's."""
    looked = []
    for where, klass in lineage(tree, source, cls):
        looked.append(klass.name)
        names = bindings(klass.body)
        if method not in names:
            continue
        binding = _followed(names, method)
        odd = _oddity(binding)
        if odd:
            raise Refusal(
                f"{where.path} line {binding.node.lineno}: {klass.name}.{method} is {odd}. Expected a method "
                f"that an instance can be asked for. Take {method} from the list of methods."
            )
        return where, klass, binding.node
    raise Refusal(
        f"The class behind the delegate has no method {method}: looked in {', '.join(looked)}, from "
        f"{source.path}. A delegation could only fail. Check that source names the class behind, and that "
        "this release has the method."
    )


def check_behind(tree, source, classes, delegate, behind):
    """Refuse if the class plainly builds its delegate from a class other than `behind` (file, class)."""
    built = []
    for line, value in assignments(classes, delegate):
        if isinstance(value, ast.Call):
            try:
                found = resolve(tree, source, value.func)
            except NotInTree:
                continue
            if found and isinstance(found[1], ast.ClassDef):
                built.append((line, *found))
    if built and not any(_descends(tree, where, cls, behind) for _line, where, cls in built):
        line, where, cls = built[0]
        raise Refusal(
            f"{source.path} line {line}: the delegate {delegate} is a {cls.name} of {where.path}. Expected "
            f"the class that source names, {behind[1].name} of {behind[0].path}. Correct source."
        )


def _descends(tree, where, cls, wanted):
    """Whether a class is `wanted` (file, class) or has it among its bases in the tree."""
    with contextlib.suppress(NotInTree):
        return any((w.path, c.name) == (wanted[0].path, wanted[1].name) for w, c in lineage(tree, where, cls))
    return False
