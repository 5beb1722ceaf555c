"""SGLang from a git repository, which has the sources of 0.5.9: their wheel is pure Python."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from tests import lab_hosts
from tests.lab_hosts import ROOT
from tests.scenarios.source_support import copy, said

sys.path.insert(0, str(ROOT / "tools"))
import fetch_release

PROJECT = """
[build-system]
requires = ["setuptools>=61.0", "setuptools-scm>=8.0", "wheel"]
build-backend = "setuptools.build_meta"

[project]
name = "sglang"
dynamic = ["version"]
dependencies = ["requests"]

[tool.setuptools.packages.find]
include = ["sglang*"]

[tool.setuptools_scm]
root = ".."
fallback_version = "0.0.0.dev0"
"""


def git(folder, *words):
    done = subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=test", "-c", "user.email=test@example.com", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A repository in SGLang's layout: the release, and a commit after it."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(fetch_release.fetch("0.5.9")["tree"], folder / "python/sglang")
    (folder / "python/pyproject.toml").write_text(PROJECT)
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=Release")
    git(folder, "tag", "v0.5.9")
    (folder / "python/sglang/fix.py").write_text("FIXED = True\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=Fix")
    return folder


@pytest.fixture(scope="module")
def lock(tmp_path_factory):
    """A small lock: SGLang, which comes from git instead, between two others."""
    whole = (ROOT / "lab/engine/locks/0.5.9.txt").read_text()
    chosen = re.findall(r"^(?:distro|sglang|sniffio)==.*\n(?: .*\n)*", whole, re.MULTILINE)
    assert len(chosen) == 3
    path = tmp_path_factory.mktemp("lock") / "0.5.9.txt"
    path.write_text("".join(chosen))
    return path


@pytest.fixture(scope="module")
def host():
    yield from lab_hosts.host("scenarios", "git1", "62")


@pytest.fixture(scope="module")
def node(host, checkout):
    host.sh("apt-get update && apt-get install -y --no-install-recommends python3-venv")
    copy(host, checkout, "/srv/sglang.git")
    return host


@pytest.fixture
def stage(play, lock):
    """Stage the engine from a ref: stage("main", "--check", sglang_engine_version="0.5.21")."""

    def run(ref, *options, url="file:///srv/sglang.git", **extra):
        where = {"url": url, "ref": ref}
        settings = {"sglang_engine_version": "0.5.9", "sglang_engine_lock": str(lock)}
        settings = {**settings, "sglang_engine_git": where, **extra}
        return play("tests/scenarios/engine.yml", *options, extra=settings)

    return run


def tree_of(node, commit):
    return node.sh(f"ls -d /opt/sglang/engines/0.5.9+g{commit[:12]}-*").stdout.strip()


def test_a_node_without_git_is_refused(node, stage):
    run = stage("main")
    assert (run.rc != 0, run.changed) == (True, 0)
    assert "git on the node" in run.message
    node.sh("apt-get install -y --no-install-recommends git")


def test_a_ref_that_is_not_there_is_refused(stage):
    run = stage("v9.9.9")
    assert (run.rc != 0, run.changed) == (True, 0)
    assert "v9.9.9 of file:///srv/sglang.git has no commit for this node" in run.message


@pytest.mark.parametrize("login", ["user:hunter2", "hunter2"])
def test_a_secret_in_the_address_is_refused_and_not_told(stage, login):
    run = stage("main", url=f"https://{login}@example.com/sglang.git")
    assert (run.rc != 0, run.changed) == (True, 0)
    assert "holds a password or a token" in run.message
    assert "hunter2" not in run.stdout


def test_a_release_with_rust_needs_its_compiler(stage):
    run = stage("main", sglang_engine_version="0.5.21")
    assert (run.rc != 0, run.changed) == (True, 0)
    assert "no cargo on the node" in run.message


def test_both_sources_at_once_are_refused(stage):
    run = stage("main", sglang_engine_bundle="/srv/bundle")
    assert (run.rc != 0, run.changed) == (True, 0)
    assert "expected one of them" in run.message


def test_check_mode_names_the_tree_and_changes_nothing(node, stage, checkout):
    run = stage("main", "--check", "--diff")
    assert run.rc == 0, said(run)
    assert f"/opt/sglang/engines/0.5.9+g{git(checkout, 'rev-parse', 'main')[:12]}-" in run.stdout
    assert node.sh("ls -d /opt/sglang", check=False).returncode != 0


@pytest.mark.parametrize(("ref", "fixed"), [("main", True), ("v0.5.9", False)])
def test_a_ref_is_built_patched_and_attested_with_its_commit(node, stage, checkout, ref, fixed):
    commit = git(checkout, "rev-parse", ref)
    run = stage(ref)
    assert run.rc == 0, said(run)
    tree = tree_of(node, commit)
    attested = json.loads(node.sh(f"cat {tree}/attestation.json").stdout)
    assert attested["inputs"]["git"] == {"url": "file:///srv/sglang.git", "commit": commit}
    built = f"sglang-0.5.9+g{commit[:12]}"
    assert sorted(attested["distributions"]) == ["distro-1.9.0", built, "sniffio-1.3.1"]
    package = f"{tree}/lib/python3.11/site-packages/sglang"
    assert (node.sh(f"ls {package}/fix.py", check=False).returncode == 0) is fixed
    patched = node.sh(f"cat {package}/srt/models/kimi_k25.py").stdout
    assert "def set_eagle3_layers_to_capture" in patched
    assert stage(ref).changed == 0


def test_a_branch_that_moved_makes_another_tree(node, stage, checkout):
    (checkout / "python/sglang/fix.py").write_text("FIXED = 2\n")
    git(checkout, "commit", "--quiet", "--all", "--message=Fix again")
    copy(node, checkout, "/srv/sglang.git")
    run = stage("main")
    assert run.rc == 0, said(run)
    tree = tree_of(node, git(checkout, "rev-parse", "main"))
    assert node.sh(f"cat {tree}/lib/python3.11/site-packages/sglang/fix.py").stdout == "FIXED = 2\n"
    assert len(node.sh("ls /opt/sglang/engines").stdout.split()) == 3
