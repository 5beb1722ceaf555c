"""An engine from a bundle, on a host that reaches its controller alone; its models came with the bundle."""

import os
import subprocess

import pytest
import yaml

from tests import lab_hosts
from tests.lab_hosts import ROOT
from tests.scenarios.source_support import copy, said

HUB = "10.99.7.2"
REACH = {
    "the package index": "python3 -m venv /tmp/reach && "
    "/tmp/reach/bin/pip download --quiet --retries 0 --dest /tmp/reach idna",
    "the distribution": "apt-get -o APT::Update::Error-Mode=any update",
    "the hub": f"curl -fsS -m 5 http://{HUB}:8470/_log",
}
CHAT = {
    "model": "kimi-k2.5-tiny",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 16,
    "temperature": 0,
}
SOURCE = {"sglang_engine_bundle": "/srv/bundle"}


@pytest.fixture(scope="module")
def bundle():
    """The bundle of the lab's engine and models, made by its playbook as a user makes it."""
    path = ROOT / ".lab/bundle"
    command = ["ansible-playbook", "playbooks/bundle.yml", "--inventory=inventories/scenarios"]
    command += [f"--extra-vars=bundle_path={path} bundle_python=3.11 bundle_models=true"]
    links = f"{ROOT}/.lab/wheels {os.environ.get('PIP_FIND_LINKS', '')}"
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PIP_FIND_LINKS": links}, check=True, timeout=600)
    return path


@pytest.fixture(scope="module")
def host():
    yield from lab_hosts.host("scenarios", "offline1", "61")


@pytest.fixture(scope="module")
def node(host, bundle):
    """The host had a mirror of its distribution until now, and reaches its controller alone from now."""
    packages = yaml.safe_load((ROOT / "roles/gpu_node/defaults/main.yml").read_text())["gpu_node_packages"]
    host.sh(f"apt-get update && apt-get install -y --no-install-recommends {' '.join(packages)}")
    for what, command in REACH.items():
        assert host.sh(command, check=False).returncode == 0, f"{what} must be reached before the cut"
    copy(host, bundle, "/srv/bundle")
    host.sh("mkdir -p /srv/models && cp -a /srv/bundle/models/. /srv/models")
    host.sh(f"ip route del default && ip route add unreachable {HUB}")
    return host


@pytest.mark.parametrize("what", REACH)
def test_the_host_reaches_nothing(node, what):
    assert node.sh(REACH[what], check=False).returncode != 0


def test_without_the_bundle_the_deploy_fails_there(node, play):
    run = play("deploy.yml", "--tags", "preflight,stage")
    assert run.rc != 0
    assert "No matching distribution found for uv" in said(run)
    node.sh("rm -rf /opt/sglang /var/cache/sglang-wheels")


def test_a_missing_and_a_damaged_wheel_are_refused_before_anything_is_changed(node, play):
    idna, h11 = "idna-3.20-py3-none-any.whl", "h11-0.16.0-py3-none-any.whl"
    node.sh(f"cd /srv/bundle/wheels && mv {idna} {h11} .. && head -c 1000 ../{h11} > {h11}")
    run = play("deploy.yml", extra=SOURCE)
    node.sh(f"cd /srv/bundle && mv {idna} {h11} wheels")
    assert (run.rc != 0, run.changed) == (True, 0)
    assert f"wheels/{idna} is missing" in run.message
    assert f"wheels/{h11} is damaged: found sha256" in run.message
    assert "playbooks/bundle.yml" in run.message


def test_a_bundle_of_another_release_is_refused(node, play):
    run = play("deploy.yml", extra={**SOURCE, "sglang_engine_version": "0.5.9"})
    assert (run.rc != 0, run.changed) == (True, 0)
    assert "it holds SGLang 0.5.21, expected 0.5.9" in run.message


def test_check_mode_ends_well_and_changes_nothing(node, play):
    run = play("deploy.yml", "--check", "--diff", extra=SOURCE)
    assert run.rc == 0, said(run)
    assert run.changed > 0
    assert node.sh("ls -d /opt/sglang", check=False).returncode != 0


def test_the_deploy_from_the_bundle_serves(node, play):
    run = play("deploy.yml", extra=SOURCE)
    assert run.rc == 0, said(run)
    answer = node.ask("/v1/chat/completions", CHAT)["choices"][0]["message"]["content"]
    # The checkpoint walks through the printable characters after every prompt.
    assert answer == "".join(map(chr, range(33, 49)))
    assert "Acceptance length 2.0" in run.stdout


@pytest.mark.parametrize("source", [SOURCE, {}], ids=["bundle", "index"])
def test_again_there_is_nothing_to_do_from_either_source(node, play, source):
    """Once the tree stands, the bundle may go; from the index it would have the same name."""
    node.sh("[ ! -e /srv/bundle ] || mv /srv/bundle /srv/away")
    run = play("deploy.yml", extra=source)
    assert (run.rc, run.changed) == (0, 0), said(run)
