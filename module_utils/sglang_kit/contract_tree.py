# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""A staged SGLang package, read and never imported: files, syntax trees, names followed through imports."""

from __future__ import annotations

import ast
import glob
import os
import re
import sys

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class ContractError(Exception):
    """The tree cannot be audited at all; the message says what was found and what to do."""


def package_root(path):
    """Return the folder of the ``sglang`` package in `path`.

    `path` may be the package itself, a folder that holds it (site-packages), or a virtual environment.
    Raises ContractError if there is none.
    """
    patterns = ["", "sglang", "lib/python3*/site-packages/sglang", "lib64/python3*/site-packages/sglang"]
    for pattern in patterns:
        for candidate in sorted(glob.glob(os.path.join(glob.escape(path), pattern))):
            if os.path.isdir(os.path.join(candidate, "srt", "models")):
                return os.path.normpath(candidate)
    raise ContractError(
        f"no SGLang package in {path}: looked for srt/models there, in sglang/ and in "
        "lib/python3*/site-packages/sglang/. "
        "Give the engine's virtual environment, its site-packages, or the package folder."
    )


class Module:
    """One parsed source file. `name` is its path below the package, with forward slashes."""

    def __init__(self, name, text):
        self.name = name
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            raise ContractError(
                f"{name} does not parse under Python {sys.version_info[0]}.{sys.version_info[1]}: line "
                f"{error.lineno}: {error.msg}. Run the audit with the engine's own interpreter, "
                "or rebuild the engine tree if the file was damaged."
            ) from error
        self.parent = {}
        # Function -> the nodes of its body that belong to no function inside it.
        self.own_nodes = {}
        self.definitions = {}
        self.imports = {}
        self._walk()

    def _walk(self):
        stack = [(self.tree, None)]
        while stack:
            node, function = stack.pop()
            inner = function
            if isinstance(node, FUNCTIONS):
                self.own_nodes[node] = []
                inner = node
            for child in ast.iter_child_nodes(node):
                self.parent[child] = node
                stack.append((child, inner))
            if function is not None:
                self.own_nodes[function].append(node)
            if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
                if isinstance(self.parent[node], (ast.Module, ast.If, ast.Try)):
                    self.definitions.setdefault(node.name, node)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.imports[alias.asname or alias.name.split(".")[0]] = (alias.name, None)
            elif isinstance(node, ast.ImportFrom):
                origin = node.module or ""
                if node.level:
                    package = ("sglang/" + self.name).split("/")[: -node.level]
                    origin = ".".join(package + ([node.module] if node.module else []))
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = (origin, alias.name)

    def functions(self):
        """Return every function of the module, methods and nested ones included."""
        return list(self.own_nodes)

    def enclosing(self, node, kinds):
        """Return the nearest ancestor of `node` that is one of `kinds`, or None."""
        node = self.parent.get(node)
        while node is not None and not isinstance(node, kinds):
            node = self.parent.get(node)
        return node


class Tree:
    """All sources of one package; texts are read at once, syntax trees only where something asks for them."""

    def __init__(self, path):
        self.root = package_root(path)
        self.texts = {}
        for folder, _folders, files in os.walk(os.path.join(self.root, "srt")):
            for name in files:
                if name.endswith(".py"):
                    full = os.path.join(folder, name)
                    with open(full, "rb") as source:
                        text = source.read().decode("utf-8", "replace").lstrip("\ufeff")
                    self.texts[os.path.relpath(full, self.root).replace(os.sep, "/")] = text
        self._modules = {}
        self._definitions = {}

    def version(self):
        """Return the version that the package or its metadata states, or None."""
        for metadata in glob.glob(
            os.path.join(glob.escape(os.path.dirname(self.root)), "sglang-*.dist-info", "METADATA")
        ):
            with open(metadata, encoding="utf-8") as source:
                found = re.search(r"^Version: *(\S+)", source.read(), re.MULTILINE)
            if found:
                return found.group(1)
        return None

    def module(self, name):
        """Return the parsed Module of a path below the package. Raises ContractError if it does not parse."""
        if name not in self._modules:
            self._modules[name] = Module(name, self.texts[name])
        return self._modules[name]

    def origin(self, module, name):
        """Return the file that `module` imports `name` from, without parsing it; None for one outside."""
        source, member = module.imports.get(name, ("", None))
        if source.split(".")[0] != "sglang":
            return None
        return self._file_of(f"{source}.{member}") or self._file_of(source)

    def _file_of(self, dotted):
        path = "/".join(dotted.split(".")[1:])
        for name in (path + ".py", path + "/__init__.py"):
            if name in self.texts:
                return name
        return None

    def resolve(self, module, name, depth=8):
        """Follow `name` from `module` through the imports of the tree.

        Returns ``(Module, definition)``, ``(Module, None)`` if `name` is a module of the tree, or None if it
        is defined outside the tree or not found.
        """
        if name in module.definitions:
            return module, module.definitions[name]
        if depth == 0 or name not in module.imports:
            return None
        origin, member = module.imports[name]
        if origin.split(".")[0] != "sglang":
            return None
        if member is not None:
            inner = self._file_of(origin + "." + member)
            source = self._file_of(origin)
            if source is not None:
                found = self.resolve(self.module(source), member, depth - 1)
                if found is not None:
                    return found
            return (self.module(inner), None) if inner is not None else None
        source = self._file_of(origin)
        return (self.module(source), None) if source is not None else None

    def functions_named(self, name):
        """Return every ``(Module, function)`` of the tree outside srt/models that is called `name`."""
        if name not in self._definitions:
            found = []
            for path, text in self.texts.items():
                if f"def {name}(" in text and not path.startswith("srt/models/"):
                    module = self.module(path)
                    found += [(module, node) for node in module.functions() if node.name == name]
            self._definitions[name] = found
        return self._definitions[name]

    def class_files(self, class_name):
        """Return the files below srt/models that define a class of that name at the top level."""
        pattern = re.compile(rf"^class {re.escape(class_name)}\b", re.MULTILINE)
        return [n for n, t in sorted(self.texts.items()) if n.startswith("srt/models/") and pattern.search(t)]

    def architectures(self):
        """Read the model registry.

        Returns ``(names, unread)``: a dict of architecture name to file as the ``EntryClass`` statements
        under srt/models declare them, and the files whose statement has a form that is not understood.
        """
        names, unread = {}, []
        for path, text in sorted(self.texts.items()):
            if not path.startswith("srt/models/") or "\nEntryClass" not in text:
                continue
            value = _entry_class(text)
            if value is None:
                unread.append(path)
            for name in value or ():
                names[name] = path
        return names, unread


def _entry_class(text):
    """Return the class names in the EntryClass statement of a model file, or None if its form is new."""
    # Only the statement is parsed: parsing every model file would take most of the audit's time.
    found = re.findall(
        r"^EntryClass\b[^=\n]*=\s*(\[[^\]]*\]|\([^)]*\)|\w+)[ \t]*(?:#.*)?$", text, re.MULTILINE
    )
    if not found or len(found) != len(re.findall(r"^EntryClass\b", text, re.MULTILINE)):
        return None
    try:
        value = ast.parse(found[-1], mode="eval").body
    except SyntaxError:
        return None
    items = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
    return [item.id for item in items] if all(isinstance(item, ast.Name) for item in items) else None
