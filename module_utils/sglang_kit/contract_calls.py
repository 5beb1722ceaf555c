# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Find, by shape, what the EAGLE-3 path of an SGLang tree asks of the target model object.

Call sites move between releases, so no path and no line is known here. What is known is how the target model
is spelt (`self.model` of a model runner, `target_worker.model_runner.model`, a parameter that such an
expression is handed to, an alias, an attribute that keeps it) and which words mark the EAGLE-3 path. Where
the model goes into something that cannot be followed, a Site of kind ``not_understood`` says so.
"""

from __future__ import annotations

import ast
import re

from .contract_tree import FUNCTIONS
from .contract_wrapper import dotted

_BLOCKS = ("body", "orelse", "finalbody")

# Words that place code on the EAGLE-3 path, on another algorithm's, or on that of any speculation.
EAGLE = re.compile(r"eagle|aux_hidden", re.IGNORECASE)
OTHER = re.compile(
    r"dflash|dspark|ngram|frozen_kv|standalone|lookahead|dllm|uno_|lilicorr|suffix", re.IGNORECASE
)
SPECULATION = re.compile(r"spec_algo|speculative", re.IGNORECASE)
# Names of hooks: an access to one of them is of interest whatever it is spelt on.
HOOK = re.compile(r"^(set_eagle\w*|get_embed_and_head\w*|set_\w*(aux_hidden|layers_to_capture)\w*)$")
_MODEL = re.compile(r"\.model\b|\btarget_model\b|\b(set_eagle|get_embed_and_head|set_\w*layers_to_capture)")
_SEED_WORDS = ("eagle", "EAGLE", "Eagle", "aux_hidden", "embed_and_head", "layers_to_capture")
_SPEAKS = re.compile(r"model|set_eagle|embed_and_head|layers_to_capture")

MODELS = ("target", "shared", "draft")
_ASKED = ("target", "shared")
MAKER = "maker of "

# Functions that look at an object without asking anything of it.
_LOOKERS = frozenset(
    ("isinstance", "type", "id", "repr", "str", "print", "callable", "bool", "hash", "cast", "vars")
)


class Site:
    """One place where the target model is asked for something.

    `name` is what is asked for, None where that is not understood; `required` is False behind a guard;
    `guard` says which; `alternatives` are other names of which one would do; `call` is the ast.Call if it is
    called; `certain` is False where the same code also runs for a drafter.
    """

    def __init__(
        self,
        module,
        node,
        name=None,
        guard=None,
        required=True,
        call=None,
        alternatives=(),
        why=None,
        certain=True,
    ):
        self.file = module.name
        self.line = node.lineno
        self.name = name
        self.guard = guard
        self.required = required
        self.call = call
        self.alternatives = tuple(alternatives)
        self.why = why
        self.certain = certain


def seeds(tree):
    """Return the files that are read for call sites: those that speak of EAGLE-3 and of a model object."""
    return [
        name
        for name, text in sorted(tree.texts.items())
        if not name.startswith("srt/models/") and _speaks(text) and _MODEL.search(text)
    ]


def _speaks(text):
    # Plain substrings: a release has 25 MB of sources, and all of them are looked at.
    return any(word in text for word in _SEED_WORDS)


def find_sites(tree):
    """Return the Sites of the EAGLE-3 path in `tree`, in order of file and line."""
    finder = _Finder(tree)
    finder.run()
    unique = {}
    for site in (site for found in finder.sites.values() for site in found):
        unique.setdefault((site.file, site.line, site.name, site.why), site)
    return sorted(unique.values(), key=lambda s: (s.file, s.line, s.name or ""))


class _Finder:
    def __init__(self, tree):
        self.tree = tree
        # Function node -> its sites, as the last look at it found them.
        self.sites = {}
        # Function node -> {parameter or local name: kind}. The kinds are target, draft, shared (the code runs
        # for both), and each of them after "maker of": a function that returns such a model.
        self.names = {}
        # Function nodes that an EAGLE-3 call reaches with the model, and the classes' attributes that keep
        # it.
        self.on_path = set()
        self.kept = {}
        self.returns = {}
        self.queue = {}

    def run(self):
        self.seeds = [self.tree.module(name) for name in seeds(self.tree)]
        for module in self.seeds:
            lines = self.tree.texts[module.name].splitlines()
            for function in module.functions():
                if any(_SPEAKS.search(line) for line in lines[function.lineno - 1 : function.end_lineno]):
                    self.enqueue(module, function)
        while self.queue:
            function, module = self.queue.popitem()
            self.sites[function] = _Scan(self, module, function).run()

    def enqueue(self, module, function):
        self.queue[function] = module

    def hand(self, module, function, name, kind, on_path):
        """Record that a name in `function` stands for the model; if that is new, look at it again."""
        new = _widen(self.names.setdefault(function, {}), name, kind)
        if not new and (not on_path or function in self.on_path):
            return
        if on_path:
            self.on_path.add(function)
        for inner in module.functions():
            if function.lineno <= inner.lineno <= function.end_lineno:
                self.enqueue(module, inner)

    def keep(self, module, owner, attribute, kind):
        """Record that instances of class `owner` keep the model in `attribute`."""
        if _widen(self.kept.setdefault(owner, {}), attribute, kind):
            self._look_again("." + attribute, module)

    def returned(self, name, kind):
        """Record that functions called `name` return the model."""
        if _widen(self.returns, name, kind):
            self._look_again(name + "(")

    def _look_again(self, text, *modules):
        for module in {*self.seeds, *modules}:
            if text in self.tree.texts[module.name]:
                for function in module.functions():
                    self.enqueue(module, function)


class _Scan:
    """One pass over one function."""

    def __init__(self, finder, module, function):
        self.finder = finder
        self.tree = finder.tree
        self.module = module
        self.function = function
        self.owner = module.enclosing(function, (ast.ClassDef,))
        self.expressions = {}
        self.sites = []

    def run(self):
        """Return the sites in the function."""
        nodes = self.module.own_nodes[self.function]
        for node in nodes:
            if (
                isinstance(node, ast.Assign)
                and len(node.targets) == 1
                and isinstance(node.targets[0], ast.Name)
            ):
                self.expressions.setdefault(node.targets[0].id, node.value)
        for node in nodes:
            self._note_alias(node)
        for node in nodes:
            if isinstance(node, ast.expr):
                self._look(node)
            elif isinstance(node, ast.Return) and node.value is not None:
                self._note_return(node)
        return self.sites

    # --- what an expression stands for

    def kind(self, node):
        """Return target, shared or draft where `node` stands for a model object, else None."""
        if isinstance(node, ast.Name):
            given = self._name(node.id)
            if given is not None:
                return given
            return _kind_of_words(node.id) if re.fullmatch(r"_?(target|draft)_model", node.id) else None
        if isinstance(node, ast.Attribute):
            return self._kind_of_attribute(node.value, node.attr)
        if isinstance(node, ast.Call):
            return self._kind_of_call(node)
        if isinstance(node, ast.IfExp):
            return self.kind(node.body) or self.kind(node.orelse)
        if isinstance(node, ast.BoolOp):
            return next((k for k in map(self.kind, node.values) if k), None)
        if isinstance(node, (ast.NamedExpr, ast.Await, ast.Starred)):
            return self.kind(node.value)
        if isinstance(node, ast.Lambda):
            made = self.kind(node.body)
            return MAKER + made if made in MODELS else None
        return None

    def _name(self, name):
        # Nested functions see the names of those around them.
        function = self.function
        while function is not None:
            given = self.finder.names.get(function, {}).get(name)
            if given is not None:
                return given
            function = self.module.enclosing(function, FUNCTIONS)
        return None

    def _kind_of_attribute(self, base, name):
        if isinstance(base, ast.Name) and base.id in ("self", "cls") and self.owner is not None:
            kept = self._kept(name)
            if kept is not None:
                return kept
            if name == "model" and re.search(r"ModelRunner", self.owner.name):
                return "draft" if re.search(r"draft", self.owner.name, re.IGNORECASE) else "shared"
        if re.fullmatch(r"_?(target|draft)_model", name):
            return _kind_of_words(name)
        if name != "model":
            return None
        words = self._words(base)
        if words and re.search(r"(runner|^mr|_mr)$|runner_list\b", words[-1]):
            return self._kind_of_runner(words)
        return None

    def _kind_of_runner(self, words):
        said = _kind_of_words(" ".join(words))
        if said is not None:
            return said
        # In the workers' own modules a runner that is not called the target's is the drafter's.
        if self.module.name.startswith("srt/speculative/"):
            return "draft" if words[0] == "self" else "shared"
        return "shared"

    def _kind_of_call(self, node):
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) >= 2:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                return self._kind_of_attribute(node.args[0], name.value)
        made = self.kind(node.func)
        if made is not None and made.startswith(MAKER):
            return made[len(MAKER) :]
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if called in self.finder.returns:
            said = _kind_of_words(" ".join(self._words(node.func)))
            return said or self.finder.returns[called]
        return None

    def _kept(self, attribute):
        seen = [(self.module, self.owner)] if self.finder.kept else []
        while seen:
            module, owner = seen.pop()
            kind = self.finder.kept.get(owner, {}).get(attribute)
            if kind is not None:
                return kind
            for base in owner.bases:
                found = self.tree.resolve(module, base.id) if isinstance(base, ast.Name) else None
                if found is not None and isinstance(found[1], ast.ClassDef):
                    seen.append(found)
        return None

    def _words(self, node, depth=4):
        """Return the identifiers of an access chain, local aliases written out."""
        if isinstance(node, ast.Attribute):
            return [*self._words(node.value, depth), node.attr]
        if isinstance(node, ast.Subscript):
            return self._words(node.value, depth)
        if isinstance(node, ast.Call):
            return self._words(node.func, depth)
        if isinstance(node, ast.Name):
            origin = self.expressions.get(node.id)
            if depth and origin is not None and isinstance(origin, (ast.Attribute, ast.Name, ast.Subscript)):
                return [*self._words(origin, depth - 1), node.id]
            return [node.id]
        return []

    # --- where the model goes

    def _note_alias(self, node):
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and value is not None:
            targets = [node.target]
        else:
            return
        for target in targets:
            if (
                isinstance(target, ast.Tuple)
                and isinstance(value, ast.Tuple)
                and len(target.elts) == len(value.elts)
            ):
                pairs = list(zip(target.elts, value.elts))
            else:
                pairs = [(target, value)]
            for name, source in pairs:
                kind = self.kind(source)
                if kind is None:
                    continue
                if isinstance(name, ast.Name):
                    self.finder.hand(self.module, self.function, name.id, kind, False)
                elif (
                    isinstance(name, ast.Attribute)
                    and isinstance(name.value, ast.Name)
                    and self.owner is not None
                ) and name.value.id == "self":
                    self.finder.keep(self.module, self.owner, name.attr, kind)

    def _note_return(self, node):
        kind = self.kind(node.value)
        if kind not in _ASKED:
            return
        name = self.function.name
        marks = [dotted(d) or "" for d in self.function.decorator_list]
        if self.owner is not None and any(m.split(".")[-1] in ("property", "cached_property") for m in marks):
            self.finder.keep(self.module, self.owner, name, kind)
        else:
            self.finder.returned(name, kind)

    # --- what is asked of it

    def _look(self, node):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            self._look_at_access(node, node.value, node.attr)
        elif isinstance(node, ast.Call):
            self._look_at_call(node)
        elif isinstance(node, (ast.Subscript, ast.Starred)) and self._asked_of(node.value, node):
            self._not_understood(node, "the model is indexed or unpacked")
        elif isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)) and isinstance(
            getattr(node, "ctx", ast.Load()), ast.Load
        ):
            items = node.values if isinstance(node, ast.Dict) else node.elts
            pairwise = isinstance(node, ast.Tuple) and isinstance(
                self.module.parent.get(node), (ast.Assign, ast.Return)
            )
            if not pairwise and any(item is not None and self._asked_of(item, node) for item in items):
                self._not_understood(node, "the model goes into a container")

    def _look_at_access(self, node, base, name):
        kind = self.kind(base)
        if kind is None:
            models = isinstance(base, ast.Attribute) and base.attr == "model"
            if (HOOK.match(name) or models) and not self._bystander(base) and self._relevant(node, name):
                guard = self._guard(node, name)
                why = f"{name} is asked of an object that the audit cannot place"
                self.sites.append(Site(self.module, node, name, guard=guard, required=guard is None, why=why))
            return
        if kind not in _ASKED or not self._relevant(node, name) or self._for_draft(node):
            return
        parent = self.module.parent.get(node)
        call = parent if isinstance(parent, ast.Call) and parent.func is node else None
        self._record(node, name, kind, call)

    def _bystander(self, base):
        """Tell whether a hook's name is used on something that surely is no model of the target."""
        words = self._words(base)
        return bool(words) and ("draft" in " ".join(words) or words in (["self"], ["super"], ["cls"]))

    def _look_at_call(self, node):
        called = node.func.id if isinstance(node.func, ast.Name) else None
        if called in ("hasattr", "getattr") and len(node.args) >= 2 and self.kind(node.args[0]) in _ASKED:
            self._look_at_probe(node, called)
            return
        if called in _LOOKERS or called in ("hasattr", "getattr", "setattr", "delattr"):
            return
        kind = self.kind(node.func)
        if kind in _ASKED and self._relevant(node, ""):
            self._record(node, "__call__", kind, None)
        func, given = node.func, node.args
        if given and (dotted(func) or "").split(".")[-1] == "partial":
            func, given = given[0], given[1:]
        for place, value in list(enumerate(given)) + [(k.arg, k.value) for k in node.keywords]:
            kind = self.kind(value)
            if kind is not None and kind.split(MAKER)[-1] in _ASKED and not self._for_draft(node):
                self._follow(node, func, place, kind)

    def _look_at_probe(self, node, called):
        base, asked = node.args[:2]
        if not (isinstance(asked, ast.Constant) and isinstance(asked.value, str)):
            if self._relevant(node, "") and not self._for_draft(node):
                self._not_understood(node, f"{called} asks the model for a name that is computed")
            return
        name = asked.value
        if not self._relevant(node, name) or self._for_draft(node):
            return
        if called == "getattr" and len(node.args) == 2:
            self._record(node, name, self.kind(base), None)
        elif called == "getattr":
            self._add(node, name, self.kind(base), guard="getattr with a default", required=False)
        else:
            self._record_hasattr(node, name, self.kind(base))

    def _follow(self, call, func, place, kind):
        """The model is an argument of `call`: look into whatever is called, as far as the tree shows it."""
        on_path = self._relevant(call, "")
        targets = self._callees(func, on_path)
        if targets is None:
            return
        for module, function, bound in targets:
            if not on_path and not _speaks(self.tree.texts[module.name]):
                continue
            parameter = _parameter_of(function, place, bound)
            if parameter is not None:
                # A tensor is no model: some releases call a backend with arguments out of step.
                if "Tensor" not in " ".join(_identifiers(parameter.annotation or call.func)):
                    self.finder.hand(module, function, parameter.arg, kind, on_path)
            elif on_path and not _only_forwards(function):
                self._not_understood(
                    call, f"the model is handed to {function.name}, in a way that the audit cannot match"
                )
        if not targets and on_path:
            name = dotted(func) or "an expression"
            self._not_understood(call, f"the model is handed to {name}, which the audit cannot find")

    def _callees(self, func, on_path):
        """Return ``[(module, function, bound)]``; [] where nothing is found; None where it is of no interest.

        Off the EAGLE-3 path only files that speak of it are looked into, so that the rest need not be parsed.
        """
        if isinstance(func, ast.Name):
            inner = self._local_function(func.id)
            if inner is not None:
                return [(self.module, inner, False)]
            if not on_path and func.id not in self.module.definitions and not self._speaks(func.id):
                return None
            return self._definition(self.tree.resolve(self.module, func.id), func.id, self.module)
        if not isinstance(func, ast.Attribute):
            return []
        if isinstance(func.value, ast.Name) and func.value.id in self.module.imports:
            if self._outside(func.value.id) or not (on_path or self._speaks(func.value.id)):
                return None
            found = self.tree.resolve(self.module, func.value.id)
            if found is not None and found[1] is None:
                return self._definition(self.tree.resolve(found[0], func.attr), func.attr, found[0])
            if found is not None and isinstance(found[1], ast.ClassDef):
                return [
                    (found[0], f, not _is_static(f))
                    for f in found[1].body
                    if isinstance(f, FUNCTIONS) and f.name == func.attr
                ]
            return []
        if not on_path:
            return None
        return [
            (module, function, not _is_static(function))
            for module, function in self.tree.functions_named(func.attr)
            if module.enclosing(function, (ast.ClassDef,))
        ]

    def _speaks(self, name):
        """Tell whether the file that `name` is imported from may speak of the EAGLE-3 path."""
        path = self.tree.origin(self.module, name)
        return path is not None and (path.endswith("__init__.py") or _speaks(self.tree.texts[path]))

    def _definition(self, found, name, module):
        if found is None:
            return None if self._outside(name, module) else []
        module, node = found
        if isinstance(node, ast.ClassDef):
            return [
                (module, f, True) for f in node.body if isinstance(f, FUNCTIONS) and f.name == "__init__"
            ] or None
        return [(module, node, False)]

    def _outside(self, name, module=None):
        """Tell whether `name` comes from outside the tree: torch asks only for nn.Module's interface."""
        origin = (module or self.module).imports.get(name)
        return origin is not None and origin[0].split(".")[0] != "sglang"

    def _local_function(self, name):
        function = self.function
        while function is not None:
            for node in ast.walk(function):
                if isinstance(node, FUNCTIONS) and node is not function and node.name == name:
                    return node
            function = self.module.enclosing(function, FUNCTIONS)
        return None

    # --- recording

    def _asked_of(self, value, node):
        return (
            self.kind(value) in ("target", "shared")
            and self._relevant(node, "")
            and not self._for_draft(node)
        )

    def _not_understood(self, node, why, name=None):
        self.sites.append(Site(self.module, node, name=name, why=why))

    def _add(self, node, name, kind, **more):
        self.sites.append(
            Site(self.module, node, name=name, certain=kind == "target" or not self._in_workers(), **more)
        )

    def _in_workers(self):
        return self.module.name.startswith("srt/speculative/")

    def _record(self, node, name, kind, call):
        guard = self._guard(node, name)
        self._add(node, name, kind, guard=guard, required=guard is None, call=call)

    def _record_hasattr(self, node, name, kind):
        """A probe asks for nothing by itself, unless what follows its failure is an error."""
        alternatives, fails = self._after_probe(node)
        if fails:
            self._add(node, name, kind, guard=None, required=True, alternatives=alternatives)
        else:
            self._add(node, name, kind, guard="hasattr", required=False)

    def _after_probe(self, node):
        """Return ``(names that would do instead, whether having none raises)`` for a hasattr in an if."""
        branch = self.module.enclosing(node, (ast.If, ast.IfExp))
        if not isinstance(branch, ast.If) or not _contains(branch.test, node):
            return (), False
        if isinstance(branch.test, ast.UnaryOp) and isinstance(branch.test.op, ast.Not):
            return (), bool(branch.body) and isinstance(branch.body[-1], ast.Raise)
        names, last = [], branch
        while len(last.orelse) == 1 and isinstance(last.orelse[0], ast.If):
            last = last.orelse[0]
            names += _probed(last.test)
        before = self.module.parent.get(branch)
        while isinstance(before, ast.If) and branch in before.orelse:
            names += _probed(before.test)
            branch, before = before, self.module.parent.get(before)
        return names, bool(last.orelse) and isinstance(last.orelse[-1], ast.Raise)

    # --- guards and conditions

    def _guard(self, node, name):
        for test, holds in self._conditions(node):
            if holds and isinstance(test, ast.Call):
                if name in _probed(test):
                    return "hasattr"
                if (
                    isinstance(test.func, ast.Name)
                    and test.func.id == "isinstance"
                    and self.kind(test.args[0])
                ):
                    return "isinstance"
        if self._in_handler(node):
            return "fallback after an error"
        for handler in self._handlers(node):
            if not any(isinstance(n, ast.Raise) for n in ast.walk(handler)):
                return "try"
        return None

    def _in_handler(self, node):
        while node is not self.function:
            node = self.module.parent[node]
            if isinstance(node, ast.ExceptHandler):
                return True
        return False

    def _handlers(self, node):
        child, parent = node, self.module.parent.get(node)
        while parent is not None and child is not self.function:
            if isinstance(parent, ast.Try) and child in parent.body:
                for handler in parent.handlers:
                    caught = (
                        []
                        if handler.type is None
                        else [n for n in ast.walk(handler.type) if isinstance(n, ast.Name)]
                    )
                    if handler.type is None or any(
                        n.id in ("AttributeError", "Exception", "BaseException") for n in caught
                    ):
                        yield handler
                        break
            child, parent = parent, self.module.parent.get(parent)

    def _conditions(self, node):
        """Yield ``(test, whether it holds at `node`)``, the nearest first, within the function."""
        child, parent = node, self.module.parent.get(node)
        while parent is not None and child is not self.function:
            if isinstance(parent, (ast.If, ast.While)) and child is not parent.test:
                yield from _atoms(parent.test, child in parent.body)
            elif isinstance(parent, ast.IfExp) and child is not parent.test:
                yield from _atoms(parent.test, child is parent.body)
            elif isinstance(parent, ast.BoolOp):
                for earlier in parent.values[: parent.values.index(child)]:
                    yield from _atoms(earlier, isinstance(parent.op, ast.And))
            for field in _BLOCKS:
                block = getattr(parent, field, None)
                if isinstance(block, list) and child in block:
                    for earlier in filter(_bars, reversed(block[: block.index(child)])):
                        yield from _atoms(earlier.test, False)
            child, parent = parent, self.module.parent.get(parent)

    def _for_draft(self, node):
        return any(
            holds
            and not isinstance(test, ast.BoolOp)
            and re.search(r"is_draft", " ".join(_identifiers(test)))
            for test, holds in self._conditions(node)
        )

    def _relevant(self, node, name):
        """Tell whether code at `node` belongs to the EAGLE-3 path."""
        for test, holds in self._conditions(node):
            words = " ".join(_identifiers(test))
            eagle, other = EAGLE.search(words), OTHER.search(words)
            if eagle and not holds and not other and isinstance(test, (ast.Attribute, ast.Call, ast.Name)):
                return False
            if holds and eagle:
                return not (other and not re.search(r"eagle", words, re.IGNORECASE))
            if holds and other:
                return False
            if holds and SPECULATION.search(words):
                return True
        function = self.function
        while function is not None:
            if function in self.finder.on_path:
                return True
            if OTHER.search(function.name):
                return False
            if EAGLE.search(function.name):
                return True
            function = self.module.enclosing(function, FUNCTIONS)
        for words in (self.owner.name if self.owner is not None else "", self.module.name):
            if EAGLE.search(words):
                return True
            if OTHER.search(words):
                return False
        return self._in_workers() or bool(HOOK.match(name))


def _widen(known, name, kind):
    """Add a kind to what is known of a name, which only ever grows; return whether that told anything new."""
    before = known.get(name)
    if before is not None and before != kind:
        kind = MAKER + "shared" if MAKER in before + kind else "shared"
    known[name] = kind
    return kind != before


def _kind_of_words(words):
    if "draft" in words:
        return "draft"
    return "target" if "target" in words else None


def _parameter_of(function, place, bound):
    """Return the ast.arg that takes the argument at `place` (an index, or a keyword), or None."""
    spec = function.args
    positional = (spec.posonlyargs + spec.args)[1 if bound else 0 :]
    if isinstance(place, int):
        return positional[place] if place < len(positional) else None
    return next((a for a in positional + spec.kwonlyargs if a.arg == place), None)


def _only_forwards(function):
    """Tell whether a function hands all that it takes to functions of its own name, looked at too."""
    calls = [
        n
        for n in ast.walk(function)
        if isinstance(n, ast.Call) and any(isinstance(a, ast.Starred) for a in n.args)
    ]
    names = [n.func.attr for n in calls if isinstance(n.func, ast.Attribute)]
    return function.args.vararg is not None and bool(names) and set(names) == {function.name}


def _is_static(function):
    return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list)


def _contains(tree, node):
    return any(node is inner for inner in ast.walk(tree))


def _atoms(test, holds):
    """Split a condition into the parts that surely hold, or surely do not, as ``(part, holds)``."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, holds = test.operand, not holds
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And if holds else ast.Or):
        for value in test.values:
            yield from _atoms(value, holds)
    else:
        yield test, holds


def _bars(statement):
    """Tell whether what follows a statement is reached only where its test fails."""
    if not isinstance(statement, ast.If) or statement.orelse:
        return False
    last = statement.body[-1]
    # A probe that raises guards nothing: without the name there is no server.
    if isinstance(last, ast.Raise) and _probed(statement.test):
        return False
    return isinstance(last, (ast.Return, ast.Raise, ast.Continue, ast.Break))


def _identifiers(node):
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


def _probed(test):
    """Return the names that hasattr, or getattr, looks for in a test."""
    return [
        call.args[1].value
        for call in ast.walk(test)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ("hasattr", "getattr")
        and len(call.args) >= 2
        and isinstance(call.args[1], ast.Constant)
    ]
