"""Releases under bad luck: deploys killed at every stage, and nodes that are not as they were left."""

import os
import signal
import subprocess

import pytest

from tests import lab_hosts
from tests.lab_hosts import ROOT, wait_until, watched


@pytest.fixture(scope="module")
def node():
    yield from lab_hosts.host("scenarios", "releases1", "51")


def deploy_killed_at(node, task, checkpoint, tmp_path):
    """Start a deploy, and kill ansible as soon as it begins the task; False if it ended before."""
    log = tmp_path / "killed.log"
    command = ["ansible-playbook", "deploy.yml", "-i", str(node.inventory), "--limit", node.name]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "-e", f"lab_checkpoint={checkpoint}"],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        wait_until(lambda: f": {task}" in log.read_text() or process.poll() is not None, 600, task)
        ended = process.poll() is not None
        if not ended:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return not ended


def serves(node):
    """The checkpoint that answers: its characters tell."""
    text = node.ask("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 4, "temperature": 0}})[
        "text"
    ]
    return "echo" if len(set(text)) == 1 else "cycle"


# Each is the start of something that writes; the checkpoint alternates, so that every deploy is an upgrade.
KILL_AT = [
    "Install the engine's distributions (several GB for a GPU node)",
    "Attest the engine",
    "Ensure that the models are there, complete and verified",
    "Write the configuration of the release",
    "Install the launcher",
    "Enable the unit",
    "Restart the unit",
    "Wait until the start has come to an end",
    "Ask the fixed prompts and measure the acceptance length",
    "Note the release as the one that passed last",
]


@pytest.mark.parametrize("number", range(len(KILL_AT)))
def test_deploy_after_a_killed_one_converges(node, play, tmp_path, number):
    checkpoint = ("cycle", "echo")[number % 2]
    killed = deploy_killed_at(node, KILL_AT[number], checkpoint, tmp_path)
    run = play("deploy.yml", extra={"lab_checkpoint": checkpoint})
    assert run.rc == 0, run.message
    assert serves(node) == checkpoint
    assert killed or number > 1, "the deploy ended before the task"
    again = play("deploy.yml", extra={"lab_checkpoint": checkpoint})
    assert (again.rc, again.changed) == (0, 0)


def test_current_that_points_nowhere_is_repaired(node, play):
    assert play("deploy.yml").rc == 0
    node.sh("ln -sfn /opt/sglang/releases/gone /opt/sglang/current")
    run = play("deploy.yml")
    assert run.rc == 0, run.message
    assert node.sh("readlink -e /opt/sglang/current").returncode == 0


def test_masked_unit_is_said(node, play):
    before = node.invocation()
    node.sh("rm /etc/systemd/system/sglang.service; systemctl mask sglang; systemctl daemon-reload")
    run = play("deploy.yml")
    assert run.rc != 0
    assert "masked" in run.message
    assert "systemctl unmask sglang" in run.message
    assert node.invocation() == before, "the server must serve on"
    node.sh("systemctl unmask sglang")
    assert play("deploy.yml").rc == 0


def test_half_removed_engine_is_refused_and_made_anew_once_told(node, play):
    engine = node.sh("readlink /opt/sglang/current/engine").stdout.strip()
    node.sh(f"rm -r {engine}/lib/python3.11/site-packages/torch-*.dist-info")
    run = play("deploy.yml")
    assert run.rc != 0
    assert "distributions are gone: torch-" in run.message
    before = node.invocation()
    node.sh(f"rm {engine}/attestation.json")
    with watched(node) as answers:
        run = play("deploy.yml")
    assert run.rc == 0, run.message
    assert node.sh(f"ls -d {engine}/lib/python3.11/site-packages/torch-*.dist-info").returncode == 0
    assert node.invocation() == before, "the server that runs from the tree goes on"
    assert "-" not in {version for _at, version in answers}


def test_full_disk_while_staging_leaves_the_server_alone(node, play):
    before = node.invocation()
    # The engines of another release go to a small file system of their own.
    node.sh("mkdir -p /opt/small && mount -t tmpfs -o size=300m tmpfs /opt/small")
    node.sh("mkdir /opt/small/engines /opt/small/tools")
    extra = {"sglang_engine_root": "/opt/small", "sglang_engine_version": "0.5.9"}
    run = play("deploy.yml", "--tags stage", extra=extra)
    assert run.rc != 0
    assert "No space left on device" in run.message
    assert "SGLang 0.5.9 was not installed on releases1" in run.message
    assert "Nothing that runs was touched" in run.message
    assert node.invocation() == before
    assert serves(node)
    node.sh("umount /opt/small")
