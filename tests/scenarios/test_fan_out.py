# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Two hosts and one hub: what the hub has to send, with and without the hosts sharing their models."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import yaml

from tests.lab_hosts import ROOT, Node

sys.path.insert(0, str(ROOT / "tests/unit"))
from hub_server import HubServer

CONTROLLER = "10.99.7.1"
HOSTS = {"store1": "55", "store2": "56"}
PAIR = {"org/target": "target", "org/drafter": "draft"}
MIB = 1 << 20
# A file that no check of content looks at, so that there is something to measure.
BALLAST = 256 * MIB


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    for name in PAIR.values():
        shutil.copytree(ROOT / ".lab/checkpoints/cycle" / name, folder / name)
    with (folder / "target" / "ballast").open("wb") as content:
        for _ in range(BALLAST // MIB):
            content.write(os.urandom(MIB))
    with HubServer(*((repo, folder / name) for repo, name in PAIR.items()), address=CONTROLLER) as server:
        server.size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        yield server


@pytest.fixture(scope="module")
def nodes():
    for name, octet in HOSTS.items():
        subprocess.run([ROOT / "lab/hosts", "down", name], check=True)
        subprocess.run([ROOT / "lab/hosts", "up", name, octet], check=True)
    yield {name: Node(name, "scenarios") for name in HOSTS}
    for name in HOSTS:
        subprocess.run([ROOT / "lab/hosts", "down", name], check=True)


@pytest.fixture
def play(hub, nodes, tmp_path):
    """Run the role on both hosts; returns (exit status, what it said, bytes of files that the hub sent)."""
    playbook = [
        {
            "hosts": "store1:store2",
            "gather_facts": False,
            "tasks": [{"name": "Bring the models", "ansible.builtin.include_role": {"name": "model_store"}}],
        }
    ]
    (tmp_path / "play.yml").write_text(yaml.safe_dump(playbook))
    pair = zip(("model_store_target", "model_store_drafter"), PAIR)
    models = {name: {"repo": repo, "revision": hub.revisions[repo]} for name, repo in pair}

    def run(*options, **variables):
        hub.order(rules=[], clear_log=True)
        since = time.monotonic()
        extra = {"model_store_endpoint": hub.url, **models, **variables}
        command = [ROOT / ".venv/bin/ansible-playbook", "-i", ROOT / "inventories/scenarios"]
        done = subprocess.run(
            [*command, tmp_path / "play.yml", "-e", json.dumps(extra), *options],
            env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        print(done.stdout[-5000:], done.stderr[-2000:])
        sent = sum(e["sent"] for e in hub.log() if "/_cdn/" in e["path"] or "/resolve/" in e["path"])
        print(f"{time.monotonic() - since:.0f} s, the hub sent {sent / MIB:.0f} MiB")
        return done.returncode, done.stdout, sent

    return run


SHARED = "{{ {'store1': '10.99.7.55', 'store2': '10.99.7.56'}[inventory_hostname] }}"


def are_right(nodes, hub):
    """Say whether both hosts have both models, byte by byte as the hub has them."""
    script = (
        "cd /srv/models/org && find . -type f ! -name manifest.json ! -name '.*' | sort | xargs sha256sum"
    )
    found = {node.sh(script).stdout for node in nodes.values()}
    return len(found) == 1 and len(found.pop().splitlines()) > 10


def forget(*nodes):
    for node in nodes:
        node.sh("rm -rf /srv/models/org")


def at_rest(nodes):
    """Say whether no host shares any more."""
    return all(
        node.sh("systemctl is-active sglang-model-share; ss -Hltn 'sport = 8471'", check=False).stdout.strip()
        == "inactive"
        for node in nodes.values()
    )


def test_each_for_itself_takes_everything_from_the_hub_twice(play, hub, nodes):
    rc, said, sent = play()
    assert rc == 0, said
    assert sent == 2 * hub.size
    assert are_right(nodes, hub)


def test_shared_the_hub_sends_everything_once(play, hub, nodes):
    forget(*nodes.values())
    rc, said, sent = play(model_store_share_address=SHARED)
    assert rc == 0, said
    assert sent == hub.size
    assert are_right(nodes, hub)
    assert at_rest(nodes)
    rc, said, sent = play(model_store_share_address=SHARED)
    assert (rc, sent, said.count("changed=0")) == (0, 0, 2), said


def test_a_node_that_has_all_gives_whatever_its_place(play, hub, nodes):
    forget(nodes["store1"])
    rc, said, sent = play(model_store_share_address=SHARED)
    assert (rc, sent) == (0, 0), said
    assert are_right(nodes, hub)
    assert at_rest(nodes)


def test_check_mode_shares_nothing(play, hub, nodes):
    forget(nodes["store1"])
    rc, said, sent = play("--check", model_store_share_address=SHARED)
    assert (rc, sent) == (0, 0), said
    assert nodes["store1"].sh("ls /srv/models/org", check=False).returncode != 0


def test_wrong_bytes_of_the_giver_are_fetched_from_the_hub(play, hub, nodes):
    forget(nodes["store1"])
    # As a disk does it: size, time and inode stay.
    nodes["store2"].sh(
        "cd /srv/models/org/target/*/ && touch -r ballast /tmp/time && chmod 644 ballast && "
        "printf x | dd of=ballast bs=1 seek=1000 conv=notrunc status=none && "
        "chmod 444 ballast && touch -r /tmp/time ballast"
    )
    rc, said, sent = play(model_store_share_address=SHARED)
    assert (rc, sent) == (0, BALLAST), said
    assert not are_right(nodes, hub)
    rc, said, sent = play(model_store_share_address=SHARED, model_store_verify="full")
    assert rc == 0, said
    assert are_right(nodes, hub)


def test_a_giver_that_cannot_be_reached_is_done_without(play, hub, nodes):
    forget(nodes["store1"])
    # Where nobody but the node itself can come to.
    rc, said, sent = play(model_store_share_address="127.0.0.1")
    assert (rc, sent) == (0, hub.size), said
    assert are_right(nodes, hub)
    assert at_rest(nodes)


def test_what_an_interrupted_deploy_left_sharing_is_stopped(play, nodes):
    nodes["store1"].sh("systemd-run --quiet --collect --unit=sglang-model-share sleep 1000")
    rc, said, sent = play(model_store_share_address=SHARED)
    assert (rc, sent) == (0, 0), said
    assert at_rest(nodes)
