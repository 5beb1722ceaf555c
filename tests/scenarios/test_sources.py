"""Where an engine comes from: a bundle, on a host that reaches its controller alone; a git repository.

Each host is real and made for its tests, which run in the order in which they stand.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

import ansible_runner
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import fetch_release

OCTETS = {"offline1": "61", "git1": "62"}
BUNDLE = ROOT / ".lab/bundle"
HUB = "10.99.7.2"
CHAT = {
    "model": "kimi-k2.5-tiny",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 16,
    "temperature": 0,
}


class Host:
    """A lab host: a shell on it by ssh, and playbooks run on it alone."""

    def __init__(self, name, work):
        self.name = name
        self.work = work

    def sh(self, script, check=True, stdin=None):
        done = subprocess.run(
            ["ssh", "-F", str(ROOT / ".lab/ssh/config"), self.name, "sudo bash -c " + shlex.quote(script)],
            stdin=stdin or subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert not check or done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done

    def copy(self, source, target):
        """Copy a folder of the controller to the host, with whole times (a manifest holds them) and modes."""
        self.sh(f"mkdir -p {target}")
        with subprocess.Popen(
            ["tar", "--format=posix", "-C", str(source), "-c", "."], stdout=subprocess.PIPE
        ) as tar:
            self.sh(f"tar -x --no-same-owner -C {target}", stdin=tar.stdout)
        assert tar.returncode == 0

    def play(self, playbook, *options, **extra):
        """Run a playbook; returns (rc, number of changes, messages of what failed, output)."""
        runner = ansible_runner.run(
            private_data_dir=tempfile.mkdtemp(dir=self.work),
            project_dir=str(ROOT),
            playbook=str(ROOT / playbook),
            inventory=str(ROOT / "inventories/scenarios"),
            limit=self.name,
            cmdline=" ".join(options) or None,
            extravars=extra,
            envvars={"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
            quiet=True,
        )
        output = runner.stdout.read()
        print(output[-6000:])
        failed = [one["event_data"]["res"] for one in runner.events if one["event"] == "runner_on_failed"]
        said = "\n".join(f"{result.get('msg')}\n{result.get('stderr', '')}" for result in failed)
        return runner.rc, sum((runner.stats or {}).get("changed", {}).values()), said, output


@pytest.fixture(scope="module")
def host(request, tmp_path_factory):
    """Make a host, by its name; it goes when the tests of this file end."""
    hosts, made = str(ROOT / "lab/hosts"), {}

    def make(name):
        if name not in made:
            subprocess.run([hosts, "down", name], check=True)
            subprocess.run([hosts, "up", name, OCTETS[name]], check=True)
            request.addfinalizer(lambda: subprocess.run([hosts, "down", name], check=True))
            made[name] = Host(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


@pytest.fixture(scope="module")
def bundle():
    """The bundle of the lab's engine and models, made by its playbook as a user makes it."""
    command = ["ansible-playbook", "playbooks/bundle.yml", "--inventory=inventories/scenarios"]
    command += [f"--extra-vars=bundle_path={BUNDLE} bundle_python=3.11 bundle_models=true"]
    environment = {
        **os.environ,
        "PIP_FIND_LINKS": f"{ROOT}/.lab/wheels {os.environ.get('PIP_FIND_LINKS', '')}",
    }
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=600)
    return BUNDLE


REACH = {
    "the package index": "python3 -m venv /tmp/reach && "
    "/tmp/reach/bin/pip download --quiet --retries 0 --dest /tmp/reach idna",
    "the distribution": "apt-get -o APT::Update::Error-Mode=any update",
    "the hub": f"curl -fsS -m 5 http://{HUB}:8470/_log",
}


@pytest.fixture(scope="module")
def offline(host, bundle):
    """A host that had a mirror of its distribution until now, and reaches its controller alone from now."""
    node = host("offline1")
    node.sh(
        "apt-get update && apt-get install -y --no-install-recommends python3-venv procps ca-certificates"
    )
    for what, command in REACH.items():
        assert node.sh(command, check=False).returncode == 0, f"{what} must be reached before the cut"
    node.copy(bundle, "/srv/bundle")
    node.sh("mkdir -p /srv/models && cp -a /srv/bundle/models/. /srv/models")
    node.sh(f"ip route del default && ip route add unreachable {HUB}")
    return node


SOURCE = {"sglang_engine_bundle": "/srv/bundle", "model_store_bundle": "/srv/bundle"}


@pytest.mark.parametrize("what", REACH)
def test_the_host_reaches_nothing(offline, what):
    assert offline.sh(REACH[what], check=False).returncode != 0


def test_without_the_bundle_the_deploy_fails_there(offline):
    rc, _changed, said, _output = offline.play("deploy.yml", "--tags", "preflight,stage")
    assert rc != 0
    assert "No matching distribution found for uv" in said
    offline.sh("rm -rf /opt/sglang /var/cache/sglang-wheels")


def test_a_missing_and_a_damaged_wheel_are_refused_before_anything_is_changed(offline):
    idna, h11 = "idna-3.20-py3-none-any.whl", "h11-0.16.0-py3-none-any.whl"
    offline.sh(f"cd /srv/bundle/wheels && mv {idna} {h11} .. && head -c 1000 ../{h11} > {h11}")
    rc, changed, said, _output = offline.play("deploy.yml", **SOURCE)
    offline.sh(f"cd /srv/bundle && mv {idna} {h11} wheels")
    assert (rc != 0, changed) == (True, 0)
    assert "wheels/idna-3.20-py3-none-any.whl is missing" in said
    assert "wheels/h11-0.16.0-py3-none-any.whl is damaged: found sha256" in said
    assert "playbooks/bundle.yml" in said


def test_a_bundle_of_another_release_is_refused(offline):
    rc, changed, said, _output = offline.play("deploy.yml", **SOURCE, sglang_engine_version="0.5.9")
    assert (rc != 0, changed) == (True, 0)
    assert "it holds SGLang 0.5.21, expected 0.5.9" in said


def test_check_mode_ends_well_and_changes_nothing(offline):
    rc, changed, said, _output = offline.play("deploy.yml", "--check", "--diff", **SOURCE)
    assert rc == 0, said
    assert changed > 0
    assert offline.sh("ls -d /opt/sglang", check=False).returncode != 0


def test_the_deploy_from_the_bundle_serves(offline):
    rc, _changed, said, output = offline.play("deploy.yml", **SOURCE)
    assert rc == 0, said
    ask = "curl -fsS --json @- http://127.0.0.1:30000/v1/chat/completions"
    answer = offline.sh(f"{ask} <<< {shlex.quote(json.dumps(CHAT))}")
    # The checkpoint walks through the printable characters after every prompt.
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"] == "".join(map(chr, range(33, 49)))
    assert "Acceptance length 2.0" in output


def test_again_without_the_bundle_there_is_nothing_to_do(offline):
    """The tree has the name that it would have from the package index: the content is the same."""
    offline.sh("mv /srv/bundle /srv/away")
    for source in (SOURCE, {}):
        rc, changed, said, _output = offline.play("deploy.yml", **source)
        assert (rc, changed) == (0, 0), said


def git(folder, *words):
    return subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=test", "-c", "user.email=test@example.com", *words],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


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


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A repository in SGLang's layout, with the sources of 0.5.9, whose wheel is pure Python."""
    folder = tmp_path_factory.mktemp("checkout")
    tree = fetch_release.fetch("0.5.9")["tree"]
    shutil.copytree(tree, folder / "python/sglang")
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
def git_host(host, checkout):
    node = host("git1")
    node.sh("apt-get update && apt-get install -y --no-install-recommends python3-venv")
    node.copy(checkout, "/srv/sglang.git")
    return node


def from_git(node, lock, ref, *options, **extra):
    extra = {"sglang_engine_version": "0.5.9", "sglang_engine_lock": str(lock), **extra}
    where = {"url": "file:///srv/sglang.git", "ref": ref}
    return node.play("tests/scenarios/engine.yml", *options, sglang_engine_git=where, **extra)


def test_a_node_without_git_is_refused(git_host, lock):
    rc, changed, said, _output = from_git(git_host, lock, "main")
    assert (rc != 0, changed) == (True, 0)
    assert "git on the node" in said
    git_host.sh("apt-get install -y --no-install-recommends git")


def test_a_ref_that_is_not_there_is_refused(git_host, lock):
    rc, changed, said, _output = from_git(git_host, lock, "v9.9.9")
    assert (rc != 0, changed) == (True, 0)
    assert "v9.9.9 of file:///srv/sglang.git has no commit for this node" in said


def test_a_password_in_the_address_is_refused_and_not_kept(git_host, lock):
    where = {"url": "https://user:secret@example.com/sglang.git", "ref": "main"}
    rc, changed, said, _output = git_host.play(
        "tests/scenarios/engine.yml",
        sglang_engine_version="0.5.9",
        sglang_engine_lock=str(lock),
        sglang_engine_git=where,
    )
    assert (rc != 0, changed) == (True, 0)
    assert "holds a password" in said
    assert "secret" not in said


def test_a_release_with_rust_needs_its_compiler(git_host, lock):
    rc, changed, said, _output = from_git(git_host, lock, "main", sglang_engine_version="0.5.21")
    assert (rc != 0, changed) == (True, 0)
    assert "no cargo on the node" in said


def test_both_sources_at_once_are_refused(git_host, lock):
    rc, changed, said, _output = from_git(git_host, lock, "main", sglang_engine_bundle="/srv/bundle")
    assert (rc != 0, changed) == (True, 0)
    assert "expected one of them" in said


def test_check_mode_names_the_tree_and_changes_nothing(git_host, lock, checkout):
    commit = git(checkout, "rev-parse", "main")
    rc, _changed, said, output = from_git(git_host, lock, "main", "--check", "--diff")
    assert rc == 0, said
    assert f"/opt/sglang/engines/0.5.9+g{commit[:12]}-" in output
    assert git_host.sh("ls -d /opt/sglang", check=False).returncode != 0


@pytest.mark.parametrize(("ref", "fixed"), [("main", True), ("v0.5.9", False)])
def test_a_ref_is_built_patched_and_attested_with_its_commit(git_host, lock, checkout, ref, fixed):
    commit = git(checkout, "rev-parse", ref)
    rc, _changed, said, _output = from_git(git_host, lock, ref)
    assert rc == 0, said
    tree = git_host.sh(f"ls -d /opt/sglang/engines/0.5.9+g{commit[:12]}-*").stdout.strip()
    attested = json.loads(git_host.sh(f"cat {tree}/attestation.json").stdout)
    assert attested["inputs"]["git"] == {"url": "file:///srv/sglang.git", "commit": commit}
    assert sorted(attested["distributions"]) == [
        "distro-1.9.0",
        f"sglang-0.5.9+g{commit[:12]}",
        "sniffio-1.3.1",
    ]
    packages = f"{tree}/lib/python3.11/site-packages"
    assert (git_host.sh(f"ls {packages}/sglang/fix.py", check=False).returncode == 0) is fixed
    assert (
        "set_eagle3_layers_to_capture" in git_host.sh(f"cat {packages}/sglang/srt/models/kimi_k25.py").stdout
    )
    rc, changed, said, _output = from_git(git_host, lock, ref)
    assert (rc, changed) == (0, 0), said


def test_a_branch_that_moved_makes_another_tree(git_host, lock, checkout):
    (checkout / "python/sglang/fix.py").write_text("FIXED = 2\n")
    git(checkout, "commit", "--quiet", "--all", "--message=Fix again")
    git_host.copy(checkout, "/srv/sglang.git")
    commit = git(checkout, "rev-parse", "main")
    rc, _changed, said, _output = from_git(git_host, lock, "main")
    assert rc == 0, said
    tree = git_host.sh(f"ls -d /opt/sglang/engines/0.5.9+g{commit[:12]}-*").stdout.strip()
    assert git_host.sh(f"cat {tree}/lib/python3.11/site-packages/sglang/fix.py").stdout == "FIXED = 2\n"
    assert len(git_host.sh("ls /opt/sglang/engines").stdout.split()) == 3
