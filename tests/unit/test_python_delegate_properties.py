"""Properties of python_delegate over generated classes and signatures."""

import ast
import inspect
import pathlib
import tempfile

from ansible.module_utils.sglang_kit import delegate
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = ["set_layers", "get_pair", "set_pair"]
BODIES = {
    "upstream": "return self.inner.{name}(*args)",
    "by property": "return self.model.{name}(*args)",
}


@st.composite
def signatures(draw):
    """A parameter list, self included, of every kind that Python has."""
    names = iter("abcdefgh")
    parts = ["self"]
    defaults = st.sampled_from(["None", "1", "-2.5", "'x'", "b'y'", "(1, 'z')", "[]", "{'k': 2}", "not 0"])
    annotations = st.sampled_from(
        ["", ": int", ": 'Later'", ": Optional[int]", ": Unknown", ": unknown.Thing[int]"]
    )
    optional = False
    positional = draw(st.integers(0, 3))
    only = draw(st.integers(0, positional))
    for index in range(positional):
        optional = optional or draw(st.booleans())
        parts.append(next(names) + draw(annotations) + (f" = {draw(defaults)}" if optional else ""))
        if index + 1 == only:
            parts.append("/")
    keywords = draw(st.integers(0, 2))
    if draw(st.booleans()):
        parts.append(f"*{next(names)}" + draw(annotations))
    elif keywords:
        parts.append("*")
    for _index in range(keywords):
        parts.append(
            next(names) + draw(annotations) + (f" = {draw(defaults)}" if draw(st.booleans()) else "")
        )
    if draw(st.booleans()):
        parts.append(f"**{next(names)}" + draw(annotations))
    return ", ".join(parts)


@st.composite
def wrappers(draw):
    """(bytes of a file that defines Wrapper, the methods that it has already)."""
    unit = draw(st.sampled_from(["    ", "\t", "  "]))
    eol = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    has = draw(st.sets(st.sampled_from(NAMES)))
    comment = draw(st.sampled_from(["", "  # noted", "\t#tab", " "]))
    members = [["def __init__(self, inner):", "\tself.inner = inner" + comment]]
    if draw(st.booleans()):
        members.append(["@property", "def model(self):", "\treturn self.inner"])
        bodies = list(BODIES.values())
    else:
        bodies = [BODIES["upstream"]]
    for name in sorted(has):
        members.append([f"def {name}(self, *args):", "\t" + draw(st.sampled_from(bodies)).format(name=name)])
    members += draw(
        st.lists(
            st.sampled_from(
                [
                    ["LIMIT = 3  # at most"],
                    ["# only a remark"],
                    ['text = """', "# >>> not a mark", '"""'],
                    ["class Inside:", "\tdef get_pair(self):", "\t\treturn 1"],
                    ["\x0c", "def other(self): return {1: 2,", "\t3: 4}"],
                    ["if 1:", "\tkey = 1", "else:", "\tkey = 2"],
                ]
            ),
            max_size=4,
        )
    )
    body = draw(st.permutations(members))
    lines = draw(
        st.sampled_from(
            [[], ["# coding: latin-1", "# ÿ"], ['"""Doc."""'], ["from typing import Optional", ""]]
        )
    )
    lines = [*lines, "", f"class Wrapper(object):{comment}"]
    for member in body:
        lines += [*([""] * draw(st.integers(0, 2))), *[unit + line.replace("\t", unit) for line in member]]
    lines += draw(
        st.sampled_from(
            [[], [""], ["", "", "EntryClass = [Wrapper]"], ["# the end"], ["", unit + "# inside", "x = 1"]]
        )
    )
    text = eol.join(lines) + draw(st.sampled_from(["", eol]))
    raw = text.encode("latin-1" if "latin-1" in text else "utf-8")
    return (b"\xef\xbb\xbf" if "latin-1" not in text and draw(st.booleans()) else b"") + raw, has


def source_of(heads):
    body = "".join(f"    def {name}({head}):\n        return locals()\n" for name, head in heads.items())
    return "from __future__ import annotations\nfrom typing import Optional\nclass Inner:\n" + body


def plans(folder, raw, inner, methods):
    wrapper, behind = folder / "wrapper.py", folder / "inner.py"
    wrapper.write_bytes(raw)
    behind.write_text(inner)
    return (
        delegate.plan_present(str(wrapper), "Wrapper", "inner", methods, str(behind), "Inner"),
        lambda: delegate.plan_absent(str(wrapper), "Wrapper", "inner", methods),
        wrapper,
    )


@settings(deadline=None, max_examples=200)
@given(wrappers(), st.fixed_dictionaries({name: signatures() for name in NAMES}), st.permutations(NAMES))
def test_any_class(generated, heads, methods):
    raw, has = generated
    with tempfile.TemporaryDirectory() as name:
        plan, absent, path = plans(pathlib.Path(name), raw, source_of(heads), methods)
        expected = {method: "upstream" if method in has else "added" for method in methods}
        assert {method: found["outcome"] for method, found in plan.methods.items()} == expected

        # Only the class changes, and in it only the methods added.
        assert (plan.after == raw) == (has == set(NAMES))
        before, after = ast.parse(raw), ast.parse(plan.after)
        old, new = (next(n for n in tree.body if isinstance(n, ast.ClassDef)) for tree in (before, after))
        added = [m for m in methods if m not in has]
        kept = [ast.dump(n) for n in new.body if getattr(n, "name", "") not in added]
        assert kept == [ast.dump(n) for n in old.body]
        old.body = new.body = []
        assert ast.dump(before) == ast.dump(after)

        # A second run changes nothing; taking out gives the file back.
        path.write_bytes(plan.after)
        again = plans(pathlib.Path(name), plan.after, source_of(heads), methods)[0]
        assert again.after == plan.after
        assert absent().after == raw

        # The signatures are those of the class behind, and every call passes.
        spaces = [{}, {}]
        exec(compile(plan.after, "wrapper", "exec"), spaces[0])
        exec(compile(source_of(heads), "inner", "exec"), spaces[1])
        inner = spaces[1]["Inner"]()
        for method in added:
            mine, theirs = (
                inspect.signature(getattr(c, method)) for c in (spaces[0]["Wrapper"], type(inner))
            )
            assert shape(mine) == shape(theirs)
            args, kwargs = arguments(theirs)
            passed = getattr(spaces[0]["Wrapper"](inner), method)(*args, **kwargs)
            assert passed == getattr(inner, method)(*args, **kwargs)


def shape(signature):
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


def arguments(signature):
    """One call that gives every parameter a value of its own."""
    args, kwargs = [], {}
    for number, parameter in enumerate(list(signature.parameters.values())[1:]):
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            args.append(number)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            args += [number, number]
        elif parameter.kind is parameter.KEYWORD_ONLY:
            kwargs[parameter.name] = number
        else:
            kwargs["extra"] = number
    return args, kwargs
