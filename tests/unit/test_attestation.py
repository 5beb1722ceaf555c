"""The attestation of an engine tree: what it covers, and what a changed tree is told."""

import json
import shutil

import engine_attestation
import pytest
from ansible.module_utils.sglang_kit import attestation
from ansible.module_utils.testing import patch_module_args

PATCHED = "lib/python3.11/site-packages/sglang/srt/models/kimi_k25.py"


@pytest.fixture
def tree(tmp_path):
    """A virtual environment with two distributions and the file that matters, attested."""
    site = tmp_path / "lib/python3.11/site-packages"
    for name in ("sglang-0.5.9", "torch-2.9.1"):
        folder = site / f"{name}.dist-info"
        folder.mkdir(parents=True)
        (folder / "RECORD").write_text(f"{name}/file.py,sha256=abc,1\n")
    (tmp_path / PATCHED).parent.mkdir(parents=True)
    (tmp_path / PATCHED).write_text("class A: pass\n")
    statement = {"inputs": {}, **attestation.look(str(tmp_path), [PATCHED])}
    (tmp_path / attestation.NAME).write_text(json.dumps(statement))
    return tmp_path


def test_untouched_tree_verifies(tree):
    assert attestation.verify(str(tree)) == []


def test_edited_file_is_named(tree):
    (tree / PATCHED).write_text("class A: x = 1\n")
    (problem,) = attestation.verify(str(tree))
    assert problem.startswith(PATCHED + " has sha256 ")


def test_missing_file_is_named(tree):
    (tree / PATCHED).unlink()
    assert attestation.verify(str(tree)) == [PATCHED + " is gone"]


def test_upgrade_inside_the_tree_is_named(tree):
    site = tree / "lib/python3.11/site-packages"
    (site / "sglang-0.5.9.dist-info").rename(site / "sglang-0.5.23.dist-info")
    assert attestation.verify(str(tree)) == [
        "distributions are gone: sglang-0.5.9",
        "distributions were added: sglang-0.5.23",
    ]


def test_reinstall_of_the_same_version_is_named(tree):
    (tree / "lib/python3.11/site-packages/torch-2.9.1.dist-info/RECORD").write_text("other\n")
    assert attestation.verify(str(tree)) == ["distributions were installed anew: torch-2.9.1"]


def test_tree_without_attestation_is_unfinished(tree):
    (tree / attestation.NAME).unlink()
    assert attestation.verify(str(tree)) == [f"{tree} has no attestation.json: it is unfinished"]


def test_unreadable_attestation_is_said(tree):
    (tree / attestation.NAME).write_text("{")
    (problem,) = attestation.verify(str(tree))
    assert "cannot be read" in problem


def attest(capsys, tree, made_in, **more):
    """Run the module in this process; return its exit status and its result."""
    params = {"tree": str(tree), "made_in": str(made_in), "files": [PATCHED], **more}
    with patch_module_args(params), pytest.raises(SystemExit) as ended:
        engine_attestation.main()
    return ended.value.code, json.loads(capsys.readouterr().out)


@pytest.fixture
def made(tree):
    """A tree that was made beside its name, and is not attested yet."""
    made_in = tree.with_name(tree.name + ".part")
    tree.rename(made_in)
    (made_in / attestation.NAME).unlink()
    yield made_in
    for folder in (tree, made_in):
        shutil.rmtree(folder, ignore_errors=True)


def test_attested_tree_gets_its_name(tree, made, capsys):
    status, result = attest(capsys, tree, made)
    assert (status, result["changed"]) == (0, True)
    assert not made.exists()
    assert attestation.verify(str(tree)) == []
    assert attest(capsys, tree, made)[1]["changed"] is False


def test_check_mode_leaves_the_tree_where_it_was_made(tree, made, capsys):
    status, result = attest(capsys, tree, made, _ansible_check_mode=True)
    assert (status, result["changed"]) == (0, True)
    assert not tree.exists()
    assert not (made / attestation.NAME).exists()


@pytest.mark.parametrize("interrupted", [False, True])
def test_unfinished_tree_of_that_name_is_replaced_whole(tree, made, capsys, interrupted):
    tree.mkdir()
    (tree / "left over").touch()
    if interrupted:
        tree.with_name(tree.name + ".replaced").mkdir()
    assert attest(capsys, tree, made)[0] == 0
    assert not (tree / "left over").exists()
    assert attestation.verify(str(tree)) == []
    assert not tree.with_name(tree.name + ".replaced").exists()


def test_tree_without_the_patched_file_gets_no_name(tree, made, capsys):
    (made / PATCHED).unlink()
    status, result = attest(capsys, tree, made)
    assert status == 1
    assert f"{made} lacks {PATCHED}" in result["msg"]
    assert not tree.exists()


def test_attested_tree_that_was_changed_is_refused_and_kept(tree, made, capsys):
    assert attest(capsys, tree, made)[0] == 0
    (tree / PATCHED).write_text("class A: x = 1\n")
    status, result = attest(capsys, tree, made)
    assert status == 1
    assert f"Remove {tree}/attestation.json and deploy again" in result["msg"]
    assert (tree / PATCHED).read_text() == "class A: x = 1\n"
