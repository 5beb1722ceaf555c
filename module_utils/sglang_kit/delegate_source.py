# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Read Python source without importing it: its names, its classes and their bases within one tree.

Nothing here writes. A file is kept as bytes; lines are counted as the Python tokenizer counts them, so that
line numbers of the syntax tree index them whatever the line ends are.
"""

from __future__ import annotations

import ast
import collections
import errno
import os
import platform
import re
import sys
import tokenize
import warnings

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*FUNCTIONS, ast.ClassDef)

# A name bound in a scope: by which statement, from where if imported, and whether in every run of the scope.
Binding = collections.namedtuple("Binding", "node origin certain")


class Refusal(Exception):
    """The work cannot be done; the message says what was found, what was expected and what to do."""


class NotInTree(Refusal):
    """A module that belongs to the package of the file that imports it has no file there."""


class SourceFile:
    """One Python file: its bytes, its text, its lines (bytes, with their ends) and its syntax tree.

    Raises Refusal if the bytes are not text or do not parse under this interpreter.
    """

    def __init__(self, path, raw):
        self.path = path
        self.raw = raw
        self.lines = _LINE.findall(raw)
        self.encoding, self.text = self._decode()
        self.tree = self._parse()
        self.names = bindings(self.tree.body)

    def _decode(self):
        if b"\0" in self.raw:
            raise Refusal(
                f"{self.path} is not text: it has a NUL byte at offset {self.raw.index(0)}. Expected Python "
                "source. Restore the file from its package."
            )
        try:
            lines = iter(self.lines)
            encoding = tokenize.detect_encoding(lambda: next(lines, b""))[0]
            return encoding, self.raw.decode(encoding)
        except (SyntaxError, UnicodeDecodeError, LookupError) as exc:
            raise Refusal(
                f"{self.path} is not text in the encoding that it declares (UTF-8 where it declares none): "
                f"{exc}. Restore the file from its package."
            ) from exc

    def _parse(self):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(self.raw, filename=self.path)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
            raise Refusal(
                f"{self.path} does not parse under {sys.executable} (Python {platform.python_version()}): "
                f"{exc}. Run this task with the interpreter that will import the file, or restore the file "
                "from its package."
            ) from exc

    def compile(self):
        """Compile the file, keeping nothing; raises Refusal where parsing alone did not show an error."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(self.tree, self.path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as exc:
            raise Refusal(
                f"{self.path} parses but does not compile: {exc}. Restore the file from its package."
            ) from exc

    def segment(self, node):
        """Return the text of a node, with line feeds between its lines."""
        lines = [
            line.rstrip(b"\r\n").decode(self.encoding).encode("utf-8")
            for line in self.lines[node.lineno - 1 : node.end_lineno]
        ]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return b"\n".join(lines).decode("utf-8")

    def postpones_annotations(self):
        """Whether the file says `from __future__ import annotations`."""
        return any(
            isinstance(st, ast.ImportFrom)
            and st.module == "__future__"
            and any(alias.name == "annotations" for alias in st.names)
            for st in self.tree.body
        )


class Tree:
    """Python files, each read and parsed once, found again by their real path."""

    def __init__(self):
        self._files = {}

    def read(self, path):
        """Return the SourceFile at `path`; raises Refusal if there is none or it cannot be read."""
        real = os.path.realpath(path)
        if real not in self._files:
            self._files[real] = SourceFile(real, _read_bytes(path, real))
        return self._files[real]


def _read_bytes(path, real):
    try:
        with open(real, "rb") as stream:
            return stream.read()
    except OSError as exc:
        named = path if real == os.path.abspath(path) else f"{path} (a link to {real})"
        if exc.errno in (errno.ENOENT, errno.ENOTDIR):
            raise Refusal(
                f"There is no file {named}. Expected the Python file that defines the class. Check the path, "
                "and that the installed release has this file."
            ) from exc
        raise Refusal(
            f"{named} cannot be read: {exc.strerror}. Expected a regular file that this user may read."
        ) from exc


def _blocks(statement):
    """Yield the lists of statements nested in a statement that share its scope."""
    if isinstance(statement, _SCOPES):
        return
    for field in ("body", "orelse", "finalbody"):
        block = getattr(statement, field, None)
        if isinstance(block, list):
            yield block
    for part in getattr(statement, "handlers", []) + getattr(statement, "cases", []):
        yield part.body


def _statements(body, certain=True):
    """Yield (statement, certain) of a scope; those inside if, try, with or a loop are not certain."""
    for statement in body:
        yield statement, certain
        for block in _blocks(statement):
            yield from _statements(block, False)


def _bound(statement):
    """Yield (name, origin) for each name that a statement binds; the origin of an import is comparable."""
    if isinstance(statement, _SCOPES):
        yield statement.name, None
    elif isinstance(statement, ast.Import):
        for alias in statement.names:
            name = alias.asname or alias.name.split(".")[0]
            yield name, (0, alias.name if alias.asname else name, None)
    elif isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name, (statement.level, statement.module or "", alias.name)
    else:
        targets = list(getattr(statement, "targets", []))
        if getattr(statement, "target", None) is not None and getattr(statement, "value", True) is not None:
            targets.append(statement.target)
        targets += [item.optional_vars for item in getattr(statement, "items", []) if item.optional_vars]
        for target in targets:
            for node in ast.walk(target):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id, None


def bindings(body):
    """Return {name: [Binding, ...]} for a module's or a class's body, in the order of the text."""
    found = {}
    for statement, certain in _statements(body):
        for name, origin in _bound(statement):
            found.setdefault(name, []).append(Binding(statement, origin, certain))
    return found


def find_class(source, name):
    """Return the one class of that name at module level; raises Refusal for none, or a name bound again."""
    found = source.names.get(name, [])
    classes = [b.node for b in found if isinstance(b.node, ast.ClassDef)]
    if not classes:
        known = [n for n, bs in source.names.items() if any(isinstance(b.node, ast.ClassDef) for b in bs)]
        raise Refusal(
            f"{source.path} defines no class {name} at module level. Found: "
            f"{', '.join(known) or 'no class at all'}. Check the class name against the installed release."
        )
    if len(found) > 1:
        lines = ", ".join(str(b.node.lineno) for b in found)
        raise Refusal(
            f"{source.path} binds the name {name} {len(found)} times (lines {lines}). Expected one class of "
            "that name, as it is not certain which one counts. Restore the file from its package."
        )
    return classes[0]


def _module_file(source, level, module):
    """Return the file of an imported module, None if it is outside the tree; raises NotInTree."""
    parts = module.split(".") if module else []
    folder = os.path.dirname(source.path)
    if level:
        for _step in range(level - 1):
            folder = os.path.dirname(folder)
        tops = [folder]
    else:
        tops = []
        while folder != os.path.dirname(folder):
            if os.path.basename(folder) == parts[0]:
                tops.append(os.path.dirname(folder))
            folder = os.path.dirname(folder)
    for top in tops:
        base = os.path.join(top, *parts)
        for candidate in (base + ".py", os.path.join(base, "__init__.py")):
            if os.path.isfile(candidate):
                return candidate
    if tops:
        raise NotInTree(
            f"{source.path} imports {'.' * level}{module}, of which there is no file under {tops[0]}. "
            "Expected the whole package. Install it anew."
        )
    return None


def resolve(tree, source, expression):
    """Find the class or function that a name or `module.name` stands for.

    Returns (SourceFile, definition), or None if it lies outside the tree or cannot be told; raises NotInTree.
    """
    if isinstance(expression, ast.Subscript):
        expression = expression.value
    if isinstance(expression, ast.Name):
        return _resolve_name(tree, source, expression.id, ())
    if isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Name):
        for binding in source.names.get(expression.value.id, []):
            if binding.origin is None:
                continue
            path = _imported_module(source, *binding.origin)
            return _resolve_name(tree, tree.read(path), expression.attr, ()) if path else None
    return None


def _imported_module(source, level, module, name):
    """Return the file of a module bound by an import; None if outside the tree, or if it is no module."""
    try:
        return _module_file(source, level, ".".join(filter(None, (module, name))))
    except NotInTree:
        # `from package.module import Name` binds a class or a value, if package.module is there.
        if name is None or _module_file(source, level, module) is None:
            raise
        return None


def _resolve_name(tree, source, name, seen):
    for binding in reversed(source.names.get(name, [])):
        if isinstance(binding.node, _SCOPES):
            return source, binding.node
        if binding.origin is not None and binding.origin[2] is not None:
            level, module, original = binding.origin
            path = _module_file(source, level, module)
            if path and (path, original) not in seen:
                return _resolve_name(tree, tree.read(path), original, (*seen, (path, original)))
    return None


def lineage(tree, source, cls, seen=()):
    """Yield (SourceFile, class) for a class and then, depth first, each base whose file is in the tree.

    Files are read as the caller asks for them; one from outside the package (torch.nn.Module) is passed over.
    """
    yield source, cls
    seen = (*seen, (source.path, cls.name))
    for base in cls.bases:
        found = resolve(tree, source, base)
        if found and isinstance(found[1], ast.ClassDef) and (found[0].path, found[1].name) not in seen:
            yield from lineage(tree, found[0], found[1], seen)
