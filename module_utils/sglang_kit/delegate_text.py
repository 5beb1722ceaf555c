# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The text that python_delegate puts into a class: written, found again, and taken out to the byte.

Each method stands in a block of its own, after an empty line:

    # >>> python_delegate: METHOD -> ATTRIBUTE [first 12 hex digits of the SHA-256 of the lines between]
    def METHOD(...): ...
    # <<< python_delegate: METHOD
"""

from __future__ import annotations

import ast
import builtins
import collections
import hashlib
import io
import re
import tokenize

from ansible.module_utils.sglang_kit.delegate_source import FUNCTIONS, Refusal, bindings

_BEGIN = re.compile(r"^\s*# >>> python_delegate: (\S+) -> (\S+) \[([0-9a-f]{12})\]$")
_END = re.compile(r"^\s*# <<< python_delegate: (\S+)$")
# What the body of a written method calls; a parameter of such a name would hide it.
_USED_IN_BODY = {"hasattr", "type", "AttributeError"}
# Nodes of an annotation that evaluates wherever its names do (Index: Python 3.8).
_PLAIN = (
    ast.Name,
    ast.Subscript,
    ast.Tuple,
    ast.List,
    ast.Constant,
    ast.expr_context,
    getattr(ast, "Index", ast.Name),
)

# One method that we wrote: its lines without line ends, and the bytes of the file that it takes.
Block = collections.namedtuple("Block", "method delegate lines start end node")


def content(line):
    """Return a line (bytes) without its line end."""
    return line.rstrip(b"\r\n")


def _digest(lines):
    return hashlib.sha256("\n".join(lines).encode("utf-8")).hexdigest()[:12]


# --- found again, and taken out --------------------------------------------------------------------------


def _edited(source, line, why):
    return Refusal(
        f"{source.path} line {line}: text that python_delegate wrote has been changed since ({why}). Only "
        "what is exactly as it was written is replaced or removed. Put the lines back, or restore the file "
        "from its package."
    )


def first_line(node):
    """Return the line of a statement's first character, decorators included."""
    return min([node.lineno] + [d.lineno for d in getattr(node, "decorator_list", [])])


def _gaps(source, cls):
    """Return, before each statement of the class body and after the last, the line numbers that hold none."""
    gaps, previous = [], cls.lineno
    for node in cls.body:
        gaps.append(range(previous + 1, first_line(node)))
        previous = node.end_lineno
    last = previous
    while last < len(source.lines) and source.lines[last].lstrip()[:1] in (b"", b"#"):
        last += 1
    return [*gaps, range(previous + 1, last + 1)]


def find_blocks(source, cls):
    """Return the Blocks in a class, in order; raises Refusal if one is not as it was written."""
    if b"python_delegate: " not in source.raw:
        return []
    text = [content(line).decode(source.encoding) for line in source.lines]
    starts = [0]
    for line in source.lines:
        starts.append(starts[-1] + len(line))
    gaps, blocks, taken = _gaps(source, cls), [], set()
    for index, node in enumerate(cls.body):
        above, below = first_line(node) - 1, node.end_lineno + 1
        begin = above in gaps[index] and _BEGIN.match(text[above - 1])
        if not begin or not isinstance(node, FUNCTIONS) or node.name != begin.group(1):
            continue
        end = below in gaps[index + 1] and _END.match(text[below - 1])
        if not end or end.group(1) != node.name:
            raise _edited(source, below, f"the closing mark of {node.name} is not there")
        if _digest(text[above : below - 1]) != begin.group(3):
            raise _edited(source, above, f"{node.name} is not what its mark says")
        if above - 1 not in gaps[index] or text[above - 2]:
            raise _edited(source, above, f"the empty line above {node.name} is gone")
        taken.update((above, below))
        start = starts[above - 3] + len(content(source.lines[above - 3]))
        stop = starts[below - 1] + len(content(source.lines[below - 1]))
        blocks.append(Block(node.name, begin.group(2), text[above - 1 : below], start, stop, node))
    for number in (n for gap in gaps for n in gap if n not in taken):
        if _BEGIN.match(text[number - 1]) or _END.match(text[number - 1]):
            raise _edited(source, number, "a mark without its method")
    return blocks


def without(source, blocks):
    """Return the bytes of a file without some blocks of it."""
    raw = source.raw
    for block in reversed(blocks):
        raw = raw[: block.start] + raw[block.end :]
    return raw


def insert(source, cls, offset, blocks):
    """Return the bytes of a file with blocks (lists of lines) at an offset that ends a line of the class."""
    header = source.lines[cls.lineno - 1]
    eol = header[len(content(header)) :].decode("ascii")
    text = "".join(eol * 2 + eol.join(lines) for lines in blocks)
    try:
        raw = text.encode("utf-8" if source.encoding == "utf-8-sig" else source.encoding)
    except UnicodeEncodeError as exc:
        raise Refusal(
            f"{source.path} is encoded in {source.encoding}, which cannot write a signature of the class "
            f"behind: {exc}. Take that method from the list of methods."
        ) from exc
    return source.raw[:offset] + raw + source.raw[offset:]


def class_end(source, cls):
    """Return the offset at the end of the last line of a class, before its line end."""
    return sum(map(len, source.lines[: cls.end_lineno - 1])) + len(content(source.lines[cls.end_lineno - 1]))


def indents(source, cls):
    """Return (indent of a class body, one step more); raises Refusal for a body on the line of its header."""
    first = cls.body[0]
    before = source.lines[first_line(first) - 1][: first.col_offset]
    if before.strip() or first.lineno == cls.lineno:
        raise Refusal(
            f"{source.path} line {cls.lineno}: the body of {cls.name} stands on the line of its header. "
            "Expected a body on lines of its own. Give the class one."
        )
    inner = before.decode("ascii").replace("\f", "")
    header = source.lines[cls.lineno - 1].decode(source.encoding)
    outer = header[: len(header) - len(header.lstrip())].replace("\f", "")
    return inner, inner[len(outer) :] if inner.startswith(outer) and inner != outer else "    "


# --- written ---------------------------------------------------------------------------------------------


def one_line(text):
    """Return an expression's text on one line, without comments; strings are kept as they are."""
    out, last = "", None
    left_out = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
    tokens = [
        t for t in tokenize.generate_tokens(io.StringIO(f"({text})").readline) if t.type not in left_out
    ]
    for token in tokens[1:-1]:
        if last is not None:
            if token.start[0] == last.end[0]:
                out += " " * (token.start[1] - last.end[1])
            elif last.string not in "([{" and token.string not in ")]},":
                out += " "
        out += token.string
        last = token
    return out


def _origin(source, name):
    """Return where a name of a file comes from, comparable between files; None if it is not certain."""
    found = source.names.get(name)
    if found is None:
        return ("builtins", name) if hasattr(builtins, name) else None
    if len(found) > 1 or not found[0].certain or found[0].origin is None or found[0].origin[0]:
        return None
    return found[0].origin


class Scope:
    """Carries expressions from the class behind (`source`, `behind`) to the target (`target`, `cls`)."""

    def __init__(self, target, cls, source, behind):
        self.target, self.cls, self.source = target, cls, source
        self._hidden = set(bindings(cls.body)) | set(bindings(behind.body))

    def _same(self, node):
        """Whether an expression means the same in both: its names are bound alike, and before the class."""
        for sub in ast.walk(node):
            if isinstance(
                sub, (ast.NamedExpr, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
            ):
                return False
            if isinstance(sub, ast.Name):
                here = _origin(self.target, sub.id)
                if here is None or here != _origin(self.source, sub.id) or sub.id in self._hidden:
                    return False
                if sub.id in self.target.names and self.target.names[sub.id][0].node.lineno > self.cls.lineno:
                    return False
        return True

    def _evaluates(self, node):
        """Whether an annotation that its own file never evaluates surely would: it indexes only typing."""
        for sub in ast.walk(node):
            if isinstance(sub, ast.Subscript):
                origin = _origin(self.source, sub.value.id) if isinstance(sub.value, ast.Name) else None
                if not origin or origin[1] != "typing":
                    return False
            if not isinstance(sub, _PLAIN):
                return False
        return True

    def annotation(self, node):
        """Return the text of an annotation: as it stands where that cannot fail, else as a string."""
        text = one_line(self.source.segment(node))
        if isinstance(node, ast.Constant) or self.target.postpones_annotations():
            return text
        if self._same(node) and (not self.source.postpones_annotations() or self._evaluates(node)):
            return text
        return f'"{text}"' if text.isprintable() and not {'"', "\\"} & set(text) else repr(text)

    def default(self, node, function, name):
        """Return the text of a default value; raises Refusal if the target would give it another meaning."""
        text = one_line(self.source.segment(node))
        if not self._same(node):
            raise Refusal(
                f"{self.source.path} line {node.lineno}: in {function.name} the default of {name} is {text}, "
                f"of which a name is not bound alike in {self.target.path}. Expected a default that both "
                f"files can express. Take {function.name} from the list of methods."
            )
        return text


def self_name(function):
    """Return the name of a function's first positional parameter, None if it has none."""
    first = (function.args.posonlyargs + function.args.args)[:1]
    return first[0].arg if first else None


def _signature(function, scope):
    """Return (parameters, arguments of the call, return annotation or "") as text."""
    args = function.args
    positional = args.posonlyargs + args.args
    defaults = dict(zip([a.arg for a in positional[len(positional) - len(args.defaults) :]], args.defaults))
    defaults.update((a.arg, d) for a, d in zip(args.kwonlyargs, args.kw_defaults) if d is not None)

    def parameter(arg, star=""):
        text, equals = star + arg.arg, "="
        if arg.annotation is not None:
            text, equals = f"{text}: {scope.annotation(arg.annotation)}", " = "
        if arg.arg in defaults:
            text += equals + scope.default(defaults[arg.arg], function, arg.arg)
        return text

    parameters = [parameter(arg) for arg in positional]
    call = [arg.arg for arg in positional[1:]]
    if args.posonlyargs:
        parameters.insert(len(args.posonlyargs), "/")
    if args.vararg:
        parameters.append(parameter(args.vararg, "*"))
        call.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        parameters.append("*")
    parameters += [parameter(arg) for arg in args.kwonlyargs]
    call += [f"{arg.arg}={arg.arg}" for arg in args.kwonlyargs]
    if args.kwarg:
        parameters.append(parameter(args.kwarg, "**"))
        call.append(f"**{args.kwarg.arg}")
    returns = f" -> {scope.annotation(function.returns)}" if function.returns is not None else ""
    return ", ".join(parameters), ", ".join(call), returns


def render(function, scope, delegate, indent, unit):
    """Return the lines of one block, marks included, without line ends; raises Refusal."""
    name, me = function.name, self_name(function)
    every = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    if me is None or every & _USED_IN_BODY:
        why = "takes no self" if me is None else f"has a parameter {(every & _USED_IN_BODY).pop()}"
        raise Refusal(
            f"{scope.source.path} line {function.lineno}: {name} {why}. Expected an ordinary method, whose "
            f"parameters hide nothing that the guard calls. Take {name} from the list of methods."
        )
    parameters, call, returns = _signature(function, scope)
    # An asynchronous generator is handed on by a plain function; only a coroutine is awaited.
    coroutine = isinstance(function, ast.AsyncFunctionDef) and not any(
        isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(function)
    )
    body = [
        f"{'async ' if coroutine else ''}def {name}({parameters}){returns}:",
        f'{unit}if not hasattr({me}.{delegate}, "{name}"):',
        f"{unit * 2}raise AttributeError(",
        f'{unit * 3}"{delegate} (%s) has no {name}" % type({me}.{delegate}).__name__',
        f"{unit * 2})",
        f"{unit}return {'await ' if coroutine else ''}{me}.{delegate}.{name}({call})",
    ]
    lines = [line for text in body for line in (indent + text).split("\n")]
    return [
        f"{indent}# >>> python_delegate: {name} -> {delegate} [{_digest(lines)}]",
        *lines,
        f"{indent}# <<< python_delegate: {name}",
    ]
