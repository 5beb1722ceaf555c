"""Bundles of wheels: what of a lock applies, what is wrong with a folder, and one made by the real pip."""

import contextlib
import hashlib
import io
import json
import pathlib
import shutil
import zipfile

import pytest
import wheel_bundle
import wheel_bundle_info
from ansible.module_utils.sglang_kit import bundle
from ansible.module_utils.testing import patch_module_args

TARGET = {"python": "3.11", "machine": "x86_64", "glibc": "2.35"}
HASH = "0" * 64


def make_wheel(folder, name, version="1.0", tag="py3-none-any"):
    """Write a wheel that pip takes for one; returns its sha256."""
    data = io.BytesIO()
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    folder.mkdir(exist_ok=True)
    (folder / f"{name}-{version}-{tag}.whl").write_bytes(data.getvalue())
    return hashlib.sha256(data.getvalue()).hexdigest()


def call(module, check=False, **params):
    """Run a module; returns what it answered."""
    said = io.StringIO()
    arguments = patch_module_args({**params, "_ansible_check_mode": check})
    with arguments, contextlib.redirect_stdout(said), pytest.raises(SystemExit):
        module.main()
    return json.loads(said.getvalue())


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """An index of one pure and one platform wheel, their lock, and the bundle that pip made of it."""
    folder = tmp_path_factory.mktemp("original")
    first = make_wheel(folder / "index", "first")
    second = make_wheel(folder / "index", "second", tag="cp311-cp311-manylinux_2_28_x86_64")
    pins = [f"first==1.0 \\\n    --hash=sha256:{first}", f"second==1.0 \\\n    --hash=sha256:{second}"]
    (folder / "engine.txt").write_text("\n".join(pins) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder / "index"))
        answer = call(wheel_bundle, **parameters(folder))
    assert answer["changed"] is True, answer
    return folder


def parameters(folder):
    return {
        "path": str(folder / "bundle"),
        "version": "0.5.9",
        "locks": {"engine": str(folder / "engine.txt")},
        **TARGET,
    }


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder in place of the package index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


@pytest.fixture
def made(original, tmp_path, index):
    """A copy of the original for one test, and the parameters that made it."""
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    return parameters(tmp_path)


def problems(params, version="0.5.9", target=TARGET, digest=None):
    lock = digest or hashlib.sha256(pathlib.Path(params["locks"]["engine"]).read_bytes()).hexdigest()
    return bundle.problems(params["path"], version, {"engine": lock}, target)


@pytest.mark.parametrize(
    ("marker", "python", "applies"),
    [
        ("", "3.11", True),
        (" ; python_full_version < '3.11'", "3.10", True),
        (" ; python_full_version < '3.11'", "3.11", False),
        (" ; sys_platform == 'win32'", "3.11", False),
        (" ; platform_machine == 'x86_64' and sys_platform == 'linux'", "3.12", True),
        (" ; platform_machine == 'aarch64'", "3.12", False),
        (" ; implementation_name == 'pypy'", "3.12", False),
    ],
)
def test_a_pin_applies_by_the_target_and_not_by_this_interpreter(marker, python, applies):
    hashes = f"    --hash=sha256:{HASH} \\\n    --hash=sha256:{'1' * 64}"
    text = f"# by hand\none[extra]==1.0{marker} \\\n{hashes}\n    # via x\n"
    expected = [("one[extra]==1.0", [HASH, "1" * 64])] if applies else []
    assert bundle.select(text, {**TARGET, "python": python}) == expected


@pytest.mark.parametrize(
    "line", ["one==1.0", f"one>=1.0 --hash=sha256:{HASH}", "-e .", "one==1.0 --hash=md5:00"]
)
def test_a_lock_that_does_not_pin_is_refused(line):
    with pytest.raises(bundle.BundleError, match="expected name==version with sha256 hashes"):
        bundle.requirements(line)


def test_tags_are_no_newer_than_the_nodes_and_the_best_first():
    tags = bundle.tags(TARGET)
    assert tags[0] == "manylinux_2_35_x86_64"
    assert "manylinux_2_36_x86_64" not in tags
    assert {"manylinux_2_5_x86_64", "manylinux2014_x86_64", "linux_x86_64"} <= set(tags)


def test_a_bundle_that_was_made_fits(made):
    assert problems(made) == []
    assert problems(made, target={**TARGET, "glibc": "2.41"}) == []


def test_making_it_again_changes_nothing_and_asks_nobody(made, index):
    for wheel in index.iterdir():
        wheel.unlink()
    answer = call(wheel_bundle, **made)
    assert (answer["changed"], answer["wheels"]) == (False, 2)


def test_check_mode_says_what_would_be_made_and_makes_nothing(made, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    assert call(wheel_bundle, check=True, **{**made, "path": str(elsewhere)})["changed"] is True
    assert not elsewhere.exists()


def test_what_no_lock_names_is_removed_and_what_is_damaged_is_gathered_again(made, tmp_path):
    wheels = tmp_path / "bundle/wheels"
    (wheels / "first-1.0-py3-none-any.whl").write_bytes(b"half a whe")
    make_wheel(wheels, "stray")
    assert call(wheel_bundle, **made)["changed"] is True
    assert problems(made) == []
    assert not (wheels / "stray-1.0-py3-none-any.whl").exists()


def test_a_wheel_that_cannot_be_had_is_named(made, index, tmp_path):
    lock = tmp_path / "engine.txt"
    lock.write_text(lock.read_text() + f"third==2.0 --hash=sha256:{HASH}\n")
    answer = call(wheel_bundle, **made)
    assert answer["failed"]
    assert "wheels of the engine for Python 3.11, x86_64, glibc 2.35 could not be gathered" in answer["msg"]
    assert "third==2.0" in answer["msg"]
    assert "pip download" in answer["msg"]
    assert not (tmp_path / "bundle/bundle.json").exists()


def test_a_wheel_for_a_newer_glibc_is_not_gathered(made, tmp_path):
    answer = call(wheel_bundle, **{**made, "path": str(tmp_path / "old"), "glibc": "2.17"})
    assert answer["failed"]
    assert "second==1.0" in answer["msg"]


def test_a_missing_lock_is_refused(made):
    answer = call(wheel_bundle, **{**made, "locks": {"engine": "/nonexistent/0.9.9.txt"}})
    assert "/nonexistent/0.9.9.txt" in answer["msg"]
    assert "tools/lock" in answer["msg"]


def test_no_bundle_is_said_so(tmp_path):
    (said,) = bundle.problems(str(tmp_path), "0.5.9", {}, TARGET)
    assert f"there is no {tmp_path}/bundle.json" in said


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "cannot be read"), ("[]", "format None, expected 1"), ('{"format": 2}', "format 2")],
)
def test_a_manifest_that_is_none_is_said_so(tmp_path, text, says):
    (tmp_path / "bundle.json").write_text(text)
    (said,) = bundle.problems(str(tmp_path), "0.5.9", {}, TARGET)
    assert says in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": "0.5.23"}, "it holds SGLang 0.5.9, expected 0.5.23"),
        ({"target": {**TARGET, "python": "3.13"}}, "it is for python 3.11, this node has 3.13"),
        ({"target": {**TARGET, "machine": "aarch64"}}, "it is for machine x86_64, this node has aarch64"),
        ({"target": {**TARGET, "glibc": "2.9"}}, "it is for glibc 2.35 or newer, this node has 2.9"),
        ({"digest": HASH}, "it was made from another lock of the engine (sha256 "),
    ],
)
def test_a_bundle_for_something_else_is_said_so(made, change, says):
    (said,) = problems(made, **change)
    assert said.startswith(says)


def test_a_missing_and_a_damaged_wheel_are_both_named(made, tmp_path):
    wheels = tmp_path / "bundle/wheels"
    (wheels / "first-1.0-py3-none-any.whl").unlink()
    damaged = wheels / "second-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    good = hashlib.sha256(damaged.read_bytes()).hexdigest()
    damaged.write_bytes(damaged.read_bytes()[:-1])
    missing, changed = problems(made)
    assert missing == "wheels/first-1.0-py3-none-any.whl is missing"
    assert changed.startswith(f"wheels/{damaged.name} is damaged: found sha256 ")
    assert changed.endswith(f"expected {good}")


def test_the_module_judges_by_the_interpreter_that_runs_it(made):
    here = bundle.this_machine()
    answer = call(wheel_bundle_info, path=made["path"], version="0.5.9", locks={})
    expected = (
        []
        if here["python"] == TARGET["python"]
        else [f"it is for python 3.11, this node has {here['python']}"]
    )
    assert answer["problems"] == expected
    answer = call(wheel_bundle_info, path=made["path"] + "/none", locks={})
    assert "there is no" in answer["problems"][0]
