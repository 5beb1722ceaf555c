# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Does the language model behind a wrapper really capture hidden states, and which layers does it take?"""

from __future__ import annotations

import ast

from .contract_tree import FUNCTIONS


def language_model(wrapper, setter):
    """Find the class that carries out `setter` for `wrapper`.

    Returns ``(ModelClass, attribute)``: the class whose own method does the work and the wrapper's attribute
    that leads to it (None if the wrapper does it itself), or ``(None, None)``.
    """
    current, first = wrapper, None
    for _step in range(8):
        step = current.delegate_of(setter)
        if step is None:
            break
        first = first or step[0]
        if step[2] is None:
            return None, first
        current = step[2]
    if setter in current.members:
        return current, first
    # The wrapper has no such method (yet): the model behind it is the part that has one.
    for attribute in wrapper.built:
        inner = wrapper.attribute_class(attribute)
        if inner is not None and setter in inner.members:
            found, _attribute = language_model(inner, setter)
            return found, attribute
    return None, None


def check_forward(wrapper, setter):
    """Follow captured hidden states from the setter to the logits.

    Returns a list of ``{"what", "ok", "where"}``; `ok` is None where the code has a shape that is not
    understood.
    """
    model, attribute = language_model(wrapper, setter)
    if model is None:
        return [
            _step(
                f"a class that implements {setter} behind {wrapper.name}",
                None,
                wrapper.module,
                wrapper.node,
            )
        ]
    steps = []
    if attribute is not None:
        steps.append(_reaches(wrapper, attribute))
    method = model.members[setter]
    set_names = _assigned_by(method.node)
    if not set_names:
        steps.append(_step(f"what {model.name}.{setter} records", None, method.module, method.node))
    for name in sorted({name for _holder, name in set_names}):
        # Some setters leave the same mark in two places, of which one is read.
        read = [
            _is_read(model, method, holder, name) for holder in sorted(h for h, n in set_names if n == name)
        ]
        steps.append(next((step for step in read if step["ok"]), read[0]))
    steps.append(_hands_on(model))
    return steps


def capture_rule(model, setter):
    """Read how a setter turns layer ids into captured layers.

    Returns ``{"default", "shift"}``: the syntax tree of the default list (None if there is none that is
    understood) and one of ``always`` (each id plus one), ``if_first_is_one``, ``never``, or None if not
    understood.
    """
    function = model.members[setter].node
    shifted = kept = default = None
    for node in ast.walk(function):
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)):
            continue
        if "layers_to_capture" not in node.targets[0].attr:
            continue
        value = node.value
        if isinstance(value, ast.List):
            default = value
        elif isinstance(value, ast.ListComp) and _adds_one(value.elt):
            shifted = node
        elif isinstance(value, (ast.Name, ast.Call)):
            kept = node
    if shifted is not None and kept is not None:
        tests = [n.test for n in ast.walk(function) if isinstance(n, ast.If)]
        shift = "if_first_is_one" if any(_first_is_one(test) for test in tests) else None
    elif shifted is not None:
        shift = "always"
    else:
        shift = "never" if kept is not None else None
    return {"default": default, "shift": shift}


def captured_layers(rule, ids, layers):
    """Return the layers that a setter captures for drafter ids (None: the defaults) in a target of `layers`
    layers.

    Returns None where the rule was not understood.
    """
    if ids is None:
        if rule["default"] is None:
            return None
        values = [_evaluate(element, layers) for element in rule["default"].elts]
        return None if None in values else values
    if rule["shift"] is None:
        return None
    plus = rule["shift"] == "always" or (rule["shift"] == "if_first_is_one" and ids[:1] == [1])
    return [i + 1 for i in ids] if plus else list(ids)


def _evaluate(node, layers):
    """Work out an integer expression whose only unknown is the number of layers."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, (ast.Name, ast.Attribute)):
        return layers
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, layers), _evaluate(node.right, layers)
        if left is None or right is None:
            return None
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.FloorDiv) and right:
            return left // right
    return None


def _adds_one(node):
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add)
        and getattr(node.right, "value", None) == 1
    )


def _first_is_one(test):
    return any(
        isinstance(n, ast.Compare)
        and isinstance(n.left, ast.Subscript)
        and isinstance(n.ops[0], ast.Eq)
        and getattr(n.comparators[0], "value", None) == 1
        for n in ast.walk(test)
    )


def _step(what, ok, module, node):
    return {"what": what, "ok": ok, "where": f"{module.name}:{node.lineno}"}


def _reaches(wrapper, attribute):
    forward = wrapper.members.get("forward")
    what = f"{wrapper.name}.forward runs self.{attribute}"
    if forward is None or not isinstance(forward.node, FUNCTIONS):
        return _step(what, None, wrapper.module, wrapper.node)
    names = {attribute} | {
        name
        for name, member in wrapper.members.items()
        if member.kind == "property" and any(_reads(n, attribute) for n in ast.walk(member.node))
    }
    found = any(_reads(node, name) for node in ast.walk(forward.node) for name in names)
    return _step(what, found, forward.module, forward.node)


def _reads(node, attribute):
    return isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Load)


def _assigned_by(function):
    """Return ``(holder, name)`` of each attribute of self, or of an attribute of self, that a method sets."""
    me = function.args.args[0].arg
    found = set()
    for node in ast.walk(function):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Attribute):
                base = target.value
                if isinstance(base, ast.Name) and base.id == me:
                    found.add((None, target.attr))
                elif (
                    isinstance(base, ast.Attribute)
                    and isinstance(base.value, ast.Name)
                    and base.value.id == me
                ):
                    found.add((base.attr, target.attr))
    return {(holder or "", name) for holder, name in found}


def _is_read(model, setter, holder, name):
    owner = model.attribute_class(holder) if holder else model
    label = "{}.{}".format(model.name, f"{holder}.{name}" if holder else name)
    what = f"the forward path consults {label}"
    if owner is None:
        return _step(f"{what}: the class of {holder} is not known", None, setter.module, setter.node)
    setters = {
        m.node
        for m in owner.members.values()
        if isinstance(m.node, FUNCTIONS) and m.node.name.startswith("set_")
    }
    for member in owner.members.values():
        if not isinstance(member.node, FUNCTIONS) or member.node in setters or member.node.name == "__init__":
            continue
        for node in ast.walk(member.node):
            if _reads(node, name):
                return _step(what, True, member.module, node)
    return _step(what, False, owner.module, owner.node)


def _hands_on(model):
    what = f"{model.name} hands aux_hidden_states to its logits processor"
    for member in model.members.values():
        if not isinstance(member.node, FUNCTIONS):
            continue
        for node in ast.walk(member.node):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and "logits_processor" in node.func.attr
            ):
                given = node.args + [k.value for k in node.keywords]
                names = [n.id for a in given for n in ast.walk(a) if isinstance(n, ast.Name)]
                if any("aux_hidden" in name for name in names):
                    return _step(what, True, member.module, node)
    return _step(what, None, model.module, model.node)
