# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What a model class really offers: body, bases, what __init__ sets, what it hands on to a delegate."""

from __future__ import annotations

import ast

from .contract_tree import FUNCTIONS

# The public interface of torch.nn.Module, which every model inherits. Kept as data: no torch is imported
# here.
NN_MODULE = frozenset(
    [
        "add_module",
        "apply",
        "bfloat16",
        "buffers",
        "call_super_init",
        "children",
        "compile",
        "cpu",
        "cuda",
        "double",
        "dump_patches",
        "eval",
        "extra_repr",
        "float",
        "forward",
        "get_buffer",
        "get_extra_state",
        "get_parameter",
        "get_submodule",
        "half",
        "ipu",
        "load_state_dict",
        "modules",
        "mtia",
        "named_buffers",
        "named_children",
        "named_modules",
        "named_parameters",
        "parameters",
        "register_backward_hook",
        "register_buffer",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_load_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_module",
        "register_parameter",
        "register_state_dict_post_hook",
        "register_state_dict_pre_hook",
        "requires_grad_",
        "set_extra_state",
        "set_submodule",
        "share_memory",
        "state_dict",
        "to",
        "to_empty",
        "train",
        "training",
        "type",
        "xpu",
        "zero_grad",
    ]
)


class Member:
    """One name that a class has: `kind` is method, property, attribute or inherited from torch."""

    def __init__(self, kind, module=None, node=None, owner=None):
        self.kind = kind
        self.module = module
        self.node = node
        self.owner = owner

    @property
    def place(self):
        """Where it is defined, as ``file:line``, or the class outside the tree that brings it."""
        if self.node is None:
            return self.owner
        return f"{self.module.name}:{self.node.lineno}"


class ModelClass:
    """A class of the tree together with those of its bases that the tree holds."""

    def __init__(self, tree, module, node):
        self.tree = tree
        self.module = module
        self.node = node
        self.name = node.name
        # Bases outside the tree, other than nn.Module and object: what they bring cannot be read.
        self.unread_bases = []
        self.is_module = False
        # (module, class) in the order of look-up, the class itself first.
        self.lineage = []
        self._read_lineage(module, node)
        self.members = {}
        # Attribute -> (module, class) where __init__ or the body assigns an instance of a class of the tree.
        self.built = {}
        # Attribute -> method of self whose result __init__ assigns to it.
        self.made_by = {}
        self.dynamic = None
        for owner_module, owner in self.lineage:
            self._read_members(owner_module, owner)

    def _read_lineage(self, module, node):
        if any(node is known for _module, known in self.lineage):
            return
        self.lineage.append((module, node))
        for base in node.bases:
            name = dotted(base)
            if name is None and isinstance(base, ast.Subscript):
                name = dotted(base.value)
            if name in ("nn.Module", "torch.nn.Module", "Module"):
                self.is_module = True
                continue
            if name is not None and name.endswith("PreTrainedModel"):
                self.is_module = True
            if name in ("object", "ABC", "abc.ABC", "Generic", "Protocol", "typing.Generic"):
                continue
            found = self.tree.resolve(module, name) if name is not None and "." not in name else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                self._read_lineage(*found)
            else:
                self.unread_bases.append(name or f"line {base.lineno}")

    def _read_members(self, module, owner):
        for node in _statements(owner.body):
            if isinstance(node, FUNCTIONS):
                marks = [dotted(d.func if isinstance(d, ast.Call) else d) or "" for d in node.decorator_list]
                is_property = any(m.split(".")[-1] in ("property", "cached_property") for m in marks)
                self._add(node.name, "property" if is_property else "method", module, node, owner)
                if node.name in ("__getattr__", "__getattribute__") and self.dynamic is None:
                    self.dynamic = Member("method", module, node, owner.name)
            elif isinstance(node, ast.ClassDef):
                self._add(node.name, "attribute", module, node, owner)
            else:
                for target, value in _assigned(node):
                    if isinstance(target, ast.Name):
                        self._add(target.id, "attribute", module, node, owner)
                        self._note_built(target.id, module, value)
        for function in [n for n in _statements(owner.body) if isinstance(n, FUNCTIONS) and n.args.args]:
            me = _first(function)
            for node in ast.walk(function):
                for target, value in _assigned(node):
                    if isinstance(target, ast.Attribute) and _is_name(target.value, me):
                        self._add(target.attr, "attribute", module, node, owner)
                        self._note_built(target.attr, module, value, function)
        # Names that the module hangs on the class after its definition.
        for node in module.tree.body:
            for target, _value in _assigned(node):
                if isinstance(target, ast.Attribute) and _is_name(target.value, owner.name):
                    self._add(target.attr, "attribute", module, node, owner)
            if (
                isinstance(node, ast.Expr)
                and _is_call_of(node.value, "setattr")
                and len(node.value.args) == 3
            ):
                subject, name = node.value.args[:2]
                if _is_name(subject, owner.name) and isinstance(name, ast.Constant):
                    self._add(name.value, "attribute", module, node, owner)

    def _add(self, name, kind, module, node, owner):
        self.members.setdefault(name, Member(kind, module, node, owner.name))

    def _note_built(self, attribute, module, value, function=None):
        if not isinstance(value, ast.Call):
            return
        called = value.func
        if (
            isinstance(called, ast.Attribute)
            and function is not None
            and _is_name(called.value, _first(function))
        ):
            self.made_by.setdefault(attribute, called.attr)
        found = self._class_called(module, value, function)
        if found is not None:
            self.built.setdefault(attribute, found)

    def _class_called(self, module, value, function=None):
        """Return ``(module, class)`` if an expression makes an instance of a class of the tree, else None."""
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name):
            return None
        name = value.func.id
        if function is not None:
            # A class that is handed in counts as the one that is handed in by default.
            spec = function.args
            defaults = dict(zip([a.arg for a in spec.args[::-1]], spec.defaults[::-1]))
            defaults.update((a.arg, d) for a, d in zip(spec.kwonlyargs, spec.kw_defaults))
            name = getattr(defaults.get(name), "id", name)
        found = self.tree.resolve(module, name)
        return found if found is not None and isinstance(found[1], ast.ClassDef) else None

    def get(self, name):
        """Return the Member called `name`, or None."""
        if name in self.members:
            return self.members[name]
        if self.is_module and name in NN_MODULE:
            return Member("inherited", owner="torch.nn.Module")
        if name.startswith("__") and name.endswith("__"):
            return Member("inherited", owner="object")
        return None

    def why_unsure(self):
        """Say why a name that was not found may exist all the same, or None if it surely does not."""
        if self.dynamic is not None:
            return f"{self.name} answers any name through {self.dynamic.place}"
        if self.unread_bases:
            return "{} inherits from {}, which lies outside the tree".format(
                self.name,
                ", ".join(self.unread_bases),
            )
        return None

    def delegate_of(self, name):
        """Follow a method that hands its call to an attribute of self.

        Returns ``(attribute, method, ModelClass or None)`` for the first such call in method `name`, None if
        it hands nothing on. The class is None where the tree does not show what the attribute holds.
        """
        member = self.members.get(name)
        if member is None or not isinstance(member.node, FUNCTIONS) or not member.node.args.args:
            return None
        me = _first(member.node)
        for node in ast.walk(member.node):
            called = node.func if isinstance(node, ast.Call) else None
            if not isinstance(called, ast.Attribute) or called.attr != name:
                continue
            holder = called.value
            if isinstance(holder, ast.Attribute) and _is_name(holder.value, me):
                inner = self.attribute_class(holder.attr)
                if inner is not None and inner.get(name) is None and _copes_without(member.node, name):
                    return None
                return holder.attr, called.attr, inner
        return None

    def attribute_class(self, attribute):
        """Return the ModelClass of what an attribute holds, if __init__ or a property shows it, else None."""
        maker = self.members.get(self.made_by.get(attribute))
        if maker is not None and isinstance(maker.node, FUNCTIONS):
            made = [self._class_called(maker.module, node) for node in _returned(maker.node)]
            return ModelClass(self.tree, *made[0]) if len(made) == 1 and made[0] is not None else None
        if attribute in self.built:
            return ModelClass(self.tree, *self.built[attribute])
        member = self.members.get(attribute)
        if member is not None and member.kind == "property":
            returned = _returned(member.node)
            if (
                len(returned) == 1
                and isinstance(returned[0], ast.Attribute)
                and returned[0].attr != attribute
            ):
                return self.attribute_class(returned[0].attr)
        return None

    def misfit(self, name, call):
        """Say how a call does not fit the signature of method `name`; None if it fits or cannot be told."""
        member = self.members.get(name)
        if (
            call is None
            or member is None
            or member.kind != "method"
            or not isinstance(member.node, FUNCTIONS)
        ):
            return None
        spec = member.node.args
        if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
            return None
        static = any(_is_name(d, "staticmethod") for d in member.node.decorator_list)
        positional = [a.arg for a in spec.posonlyargs + spec.args][0 if static else 1 :]
        only_keyword = [a.arg for a in spec.kwonlyargs]
        given = [k.arg for k in call.keywords]
        if len(call.args) > len(positional) and spec.vararg is None:
            return f"is given {len(call.args)} positional arguments and takes {len(positional)}"
        unknown = [k for k in given if k not in positional + only_keyword]
        if unknown and spec.kwarg is None:
            return "is given {}, which it does not take".format(", ".join(unknown))
        needed = positional[: len(positional) - len(spec.defaults)]
        needed += [n for n, default in zip(only_keyword, spec.kw_defaults) if default is None]
        absent = [n for n in needed if n not in positional[: len(call.args)] and n not in given]
        return "is called without {}".format(", ".join(absent)) if absent else None

    def is_stub(self, name):
        """Tell whether method `name` only raises NotImplementedError."""
        member = self.members.get(name)
        if member is None or not isinstance(member.node, FUNCTIONS):
            return False
        body = [
            n for n in member.node.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
        ]
        if len(body) != 1 or not isinstance(body[0], ast.Raise) or body[0].exc is None:
            return False
        error = body[0].exc
        return dotted(error.func if isinstance(error, ast.Call) else error) == "NotImplementedError"


def dotted(node):
    """Return ``a.b.c`` for a chain of names and attributes, or None for any other expression."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *parts[::-1]])


def _copes_without(function, name):
    """Tell whether a method looks first whether there is such a thing to call, and goes on if not."""
    nodes = list(ast.walk(function))
    probes = [n for n in nodes if _is_call_of(n, "hasattr") and getattr(n.args[-1], "value", None) == name]
    return bool(probes) and not any(isinstance(n, ast.Raise) for n in nodes)


def _first(function):
    return function.args.args[0].arg


def _returned(function):
    return [
        node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None
    ]


def _is_name(node, name):
    return isinstance(node, ast.Name) and node.id == name


def _is_call_of(node, name):
    return isinstance(node, ast.Call) and _is_name(node.func, name)


def _assigned(node):
    """Return the ``(target, value)`` pairs of a statement; a bare annotation assigns nothing."""
    if isinstance(node, ast.Assign):
        pairs = []
        for target in node.targets:
            if isinstance(target, (ast.Tuple, ast.List)):
                pairs += [(element, None) for element in target.elts]
            else:
                pairs.append((target, node.value))
        return pairs
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return [(node.target, node.value)]
    return []


def _statements(body):
    """Return the statements of a class body, those inside its if and try blocks included."""
    found = []
    for node in body:
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for block in ("body", "orelse", "finalbody"):
                found += _statements(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                found += _statements(handler.body)
        else:
            found.append(node)
    return found
