"""The attestation of an engine tree: what it covers, and what a changed tree is told."""

import json

import pytest
from ansible.module_utils.sglang_kit import attestation

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
