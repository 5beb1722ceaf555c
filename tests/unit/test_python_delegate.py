"""What python_delegate finds, writes and refuses, on small classes in the shape of SGLang's wrappers."""

import ast
import asyncio
import inspect
import pathlib
import re

import pytest
import yaml
from ansible.module_utils.sglang_kit import delegate
from ansible.module_utils.sglang_kit.delegate_source import Refusal

DATA = pathlib.Path(__file__).parent / "data" / "delegate"
OUTCOMES = yaml.safe_load((DATA / "outcomes.yml").read_text())
REFUSALS = yaml.safe_load((DATA / "refusals.yml").read_text())

WRAPPER = b"""\
class Wrapper:
    def __init__(self, inner):
        self.inner = inner


EntryClass = [Wrapper]
"""
INNER = b"""\
class Inner:
    def get_pair(self, a, b=2, *rest, key=None, **more):
        return a, b, rest, key, more

    def set_pair(self, a, b):
        self.pair = a, b
        return "set"

    async def wait(self, value):
        return value
"""
METHODS = ["get_pair", "set_pair"]
# What one method takes: two line ends, and the lines from mark to mark.
BLOCK = re.compile(rb"(?:\r\n|\n|\r){2}[ \t]*# >>> [\s\S]*?# <<< python_delegate: \w+")


@pytest.fixture
def package(tmp_path):
    """A function that writes the files of a package and returns its folder."""

    def write(**files):
        folder = tmp_path / "kit"
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / f"{name}.py").write_bytes(text if isinstance(text, bytes) else text.encode())
        return folder

    return write


def present(folder, methods=METHODS):
    return delegate.plan_present(
        str(folder / "wrapper.py"), "Wrapper", "inner", list(methods), str(folder / "inner.py"), "Inner"
    )


def absent(folder, methods=METHODS):
    return delegate.plan_absent(str(folder / "wrapper.py"), "Wrapper", "inner", list(methods))


def outcomes(plan):
    return {name: found["outcome"] for name, found in plan.methods.items()}


def files_of(case):
    return {name: case[name] for name in ("wrapper", "inner", "mixin") if name in case}


@pytest.mark.parametrize("case", OUTCOMES, ids=lambda case: case["id"])
def test_outcome(case, package):
    folder = package(**files_of(case))
    plan = present(folder, case["outcomes"])
    assert outcomes(plan) == case["outcomes"]
    written = b"".join(BLOCK.findall(plan.after)).decode().splitlines()
    assert [line.strip() for line in written if " def " in line] == case.get("heads", [])
    for found in plan.methods.values():
        text = plan.after if found["outcome"] == "added" else pathlib.Path(found["file"]).read_bytes()
        line = text.decode().splitlines()[found["line"] - 1]
        assert "def " in line


@pytest.mark.parametrize("case", OUTCOMES, ids=lambda case: case["id"])
def test_second_run_changes_nothing_and_absent_restores(case, package):
    folder = package(**files_of(case))
    first = present(folder, case["outcomes"])
    (folder / "wrapper.py").write_bytes(first.after)
    second = present(folder, case["outcomes"])
    assert second.after == first.after
    assert outcomes(second) == {m: "ours" if o == "added" else o for m, o in case["outcomes"].items()}
    assert {m: f["line"] for m, f in second.methods.items()} == {
        m: f["line"] for m, f in first.methods.items()
    }
    back = absent(folder, case["outcomes"])
    assert back.after == first.before
    assert outcomes(back) == {m: "removed" if o == "added" else o for m, o in case["outcomes"].items()}


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case["id"])
def test_refusal(case, package):
    folder = package(**files_of(case))
    with pytest.raises(Refusal) as caught:
        present(folder, case.get("methods", ["get_pair"]))
    for fragment in case["says"]:
        assert fragment.replace("{dir}", str(folder)) in str(caught.value)
    found = getattr(caught.value, "methods", {})
    assert {name: finding["outcome"] for name, finding in found.items()} == case.get("outcomes", {})


# --- what the written methods do -------------------------------------------------------------------------


def load(source):
    space = {}
    exec(compile(source, "kit", "exec"), space)
    return space


@pytest.fixture
def classes(package):
    """(Wrapper with the methods, Inner)."""
    plan = present(package(wrapper=WRAPPER, inner=INNER), [*METHODS, "wait"])
    return load(plan.after)["Wrapper"], load(INNER)["Inner"]


def test_calls_and_results_pass_through(classes):
    wrapper_class, inner_class = classes
    inner = inner_class()
    wrapper = wrapper_class(inner)
    assert wrapper.get_pair(1) == (1, 2, (), None, {})
    assert wrapper.get_pair(1, 5, 6, key=7, z=8) == (1, 5, (6,), 7, {"z": 8})
    assert wrapper.set_pair(b=2, a=1) == "set"
    assert inner.pair == (1, 2)
    assert asyncio.run(wrapper.wait(3)) == 3
    for name in ("get_pair", "set_pair", "wait"):
        assert inspect.signature(getattr(wrapper_class, name)) == inspect.signature(
            getattr(inner_class, name)
        )


@pytest.mark.parametrize("inner", [None, object()], ids=["none", "lacking"])
def test_guard_names_the_delegate_and_the_method(classes, inner):
    with pytest.raises(AttributeError, match=rf"^inner \({type(inner).__name__}\) has no get_pair$"):
        classes[0](inner).get_pair(1)


def test_annotations_never_fail_at_import(package):
    inner = "import torch\nclass Inner:\n    def get_pair(self, a: torch.Tensor) -> 'torch.Tensor': ...\n"
    plan = present(package(wrapper=WRAPPER, inner=inner), ["get_pair"])
    assert load(plan.after)["Wrapper"].get_pair.__annotations__ == {
        "a": "torch.Tensor",
        "return": "torch.Tensor",
    }


# --- bytes -----------------------------------------------------------------------------------------------

SHAPES = {
    "lf": WRAPPER,
    "crlf": WRAPPER.replace(b"\n", b"\r\n"),
    "cr": WRAPPER.replace(b"\n", b"\r"),
    "tabs": WRAPPER.replace(b"    ", b"\t"),
    "two spaces": WRAPPER.replace(b"    ", b"  "),
    "mark and no final line end": b"\xef\xbb\xbf" + WRAPPER.split(b"\n\n")[0],
    "class is last, no final line end": WRAPPER.split(b"\n\n")[0].rstrip(),
    "latin-1": b"# -*- coding: latin-1 -*-\n# gr\xfc\xdfe\n" + WRAPPER,
    "comment on the last line": WRAPPER.replace(b"= inner\n", b"= inner  # kept"),
    "comments after the last line": WRAPPER.replace(
        b"= inner\n", b"= inner\n\n    # TODO: more\n# outside\n"
    ),
    "form feeds": WRAPPER.replace(b"\n\n\n", b"\n\x0c\n\x0c\n").replace(b"class", b"\x0cclass"),
    "continued last line": WRAPPER.replace(b"= inner\n", b"= \\\n        inner\n"),
    "string over lines": WRAPPER.replace(b"= inner\n", b'= inner\n    text = """\n    # >>> x\n"""\n'),
    "mixed line ends": WRAPPER.replace(b"= inner\n", b"= inner\r\n").replace(
        b"class Wrapper:\n", b"class Wrapper:\r"
    ),
    "trailing blanks": WRAPPER.replace(b"= inner\n", b"= inner  \t \n   \n"),
}


@pytest.mark.parametrize("before", SHAPES.values(), ids=SHAPES)
def test_bytes_around_are_kept(before, package):
    folder = package(wrapper=before, inner=INNER)
    plan = present(folder)
    assert outcomes(plan) == {"get_pair": "added", "set_pair": "added"}
    assert BLOCK.sub(b"", plan.after) == before
    eol = b"\r\n" if b"r:\r\n" in before else b"\r" if b"r:\r" in before else b"\n"
    for block in BLOCK.findall(plan.after):
        assert set(re.findall(rb"\r\n|\n|\r", block)) == {eol}
        assert (b"\t" in block) == (b"\tdef" in before)
    (folder / "wrapper.py").write_bytes(plan.after)
    assert present(folder).after == plan.after
    assert absent(folder).after == before
    cls = next(node for node in ast.parse(plan.after).body if isinstance(node, ast.ClassDef))
    names = [node.name for node in cls.body if isinstance(node, ast.FunctionDef)]
    assert names == ["__init__", "get_pair", "set_pair"]


# --- our own text, found again ---------------------------------------------------------------------------


@pytest.fixture
def written(package):
    """The folder of a package whose wrapper has our methods."""
    folder = package(wrapper=WRAPPER, inner=INNER)
    (folder / "wrapper.py").write_bytes(present(folder).after)
    return folder


def rewrite(folder, old, new):
    path = folder / "wrapper.py"
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))


@pytest.mark.parametrize(
    "old, new, says",
    [
        (
            b"return self.inner.get_pair",
            b"return 1, self.inner.get_pair",
            "get_pair is not what its mark says",
        ),
        (b"    # <<< python_delegate: get_pair\n", b"", "the closing mark of get_pair is not there"),
        (
            b"\n\n    # >>> python_delegate: get_pair",
            b"\n    # >>> python_delegate: get_pair",
            "the empty line above get_pair",
        ),
        (b"def get_pair", b"def got_pair", "a mark without its method"),
    ],
    ids=["body", "closing mark", "empty line", "name"],
)
@pytest.mark.parametrize("plan", [present, absent])
def test_text_changed_since_is_never_touched(written, old, new, says, plan):
    rewrite(written, old, new)
    with pytest.raises(Refusal, match=says):
        plan(written)


def test_a_changed_signature_behind_is_followed(written):
    (written / "inner.py").write_bytes(INNER.replace(b"set_pair(self, a, b)", b"set_pair(self, a, b, c=0)"))
    plan = present(written)
    assert outcomes(plan) == {"get_pair": "ours", "set_pair": "added"}
    assert b"def set_pair(self, a, b, c=0):" in plan.after
    assert plan.pristine == WRAPPER


def test_a_method_no_longer_named_is_removed(written):
    plan = present(written, ["set_pair"])
    assert outcomes(plan) == {"set_pair": "ours", "get_pair": "removed"}
    (written / "wrapper.py").write_bytes(WRAPPER)
    assert plan.after == present(written, ["set_pair"]).after


def test_a_method_that_upstream_has_meanwhile_is_left_to_it(written):
    mark = b"    # >>> python_delegate: get_pair"
    rewrite(written, mark, b"    def get_pair(self):\n        return self.inner.get_pair()\n\n" + mark)
    plan = present(written)
    assert outcomes(plan) == {"get_pair": "upstream", "set_pair": "ours"}
    assert plan.after.count(b"def get_pair") == 1


def test_two_delegates_of_one_class_do_not_disturb_each_other(package):
    wrapper = WRAPPER.replace(b"self.inner = inner\n", b"self.inner = inner\n        self.other = inner\n")
    folder = package(wrapper=wrapper, inner=INNER)
    path, inner = folder / "wrapper.py", str(folder / "inner.py")
    path.write_bytes(present(folder, ["get_pair"]).after)
    path.write_bytes(delegate.plan_present(str(path), "Wrapper", "other", ["set_pair"], inner, "Inner").after)
    both = path.read_bytes()
    assert present(folder, ["get_pair"]).after == both
    assert delegate.plan_present(str(path), "Wrapper", "other", ["set_pair"], inner, "Inner").after == both
    with pytest.raises(delegate.Conflict, match=r"set_pair is handed to other by an earlier run"):
        present(folder, ["get_pair", "set_pair"])
    path.write_bytes(absent(folder).after)
    assert b"get_pair" not in path.read_bytes()
    assert delegate.plan_absent(str(path), "Wrapper", "other", []).after == wrapper


def test_what_others_put_behind_ours_stays_there(written):
    rewrite(written, b"\n\n\nEntryClass", b"\n\n    def more(self):\n        return 1\n\n\nEntryClass")
    text = (written / "wrapper.py").read_bytes()
    assert present(written).after == text
    assert absent(written).after == WRAPPER.replace(
        b"\n\n\nE", b"\n\n    def more(self):\n        return 1\n\n\nE"
    )


def test_absent_where_nothing_is(package):
    folder = package(wrapper=WRAPPER, inner=INNER)
    plan = absent(folder)
    assert plan.after == WRAPPER
    assert outcomes(plan) == {"get_pair": "absent", "set_pair": "absent"}


def test_an_edit_that_does_not_prove_right_is_refused(package, monkeypatch):
    folder = package(wrapper=WRAPPER, inner=INNER)
    insert = delegate.insert
    monkeypatch.setattr(
        delegate, "insert", lambda *args: insert(*args).replace(b"EntryClass = [", b"EntryClass = [1, ")
    )
    with pytest.raises(Refusal, match="something else than the methods would change"):
        present(folder)
    monkeypatch.setattr(delegate, "insert", lambda *args: insert(*args).replace(b"b=2", b"b=3"))
    with pytest.raises(Refusal):
        present(folder)
