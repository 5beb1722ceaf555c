# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""One server over several hosts: what is rendered for each, what is refused, and who restarts with whom."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = pathlib.Path(__file__).parent / "data/group"


def serial_of(playbook):
    """The batches of the play that restarts servers."""
    (serial,) = [play["serial"] for play in yaml.safe_load((ROOT / playbook).read_text()) if "serial" in play]
    return serial


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """What was found of every host: refused (why), rendered, batch (who goes with it)."""
    folder = tmp_path_factory.mktemp("group")
    (folder / "templates").symlink_to(ROOT / "roles/sglang_server/templates")
    plays = yaml.safe_load((DATA / "play.yml").read_text())
    plays[2]["serial"] = serial_of("playbooks/deploy.yml")
    (folder / "play.yml").write_text(yaml.safe_dump(plays, sort_keys=False))
    done = subprocess.run(
        [
            *(pathlib.Path(sys.executable).parent / "ansible-playbook", folder / "play.yml"),
            *("-i", DATA / "hosts.yml", "--limit", "!limited2"),
            *("-e", json.dumps({"playbooks": str(ROOT / "playbooks"), "out": str(folder / "out.json")})),
        ],
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (folder / "out.json").exists(), done.stdout[-4000:] + done.stderr
    return json.loads((folder / "out.json").read_text())


OPTIONS = ("nnodes", "node-rank", "dist-init-addr", "tp-size")


@pytest.mark.parametrize(
    "host, expected",
    [
        ("alone1", [None, None, None, 8]),
        ("twin1", [2, 0, "192.0.2.11:25000", 16]),
        ("twin2", [2, 1, "192.0.2.11:25000", 16]),
        ("mixed2", [2, 1, "[2001:db8::1]:25000", 8]),
    ],
)
def test_each_host_is_told_its_rank_and_where_they_meet(hosts, host, expected):
    assert [hosts[host]["rendered"]["config"].get(name) for name in OPTIONS] == expected


@pytest.mark.parametrize("host, own", [("alone1", []), ("twin1", ["192.0.2.11"]), ("twin2", ["192.0.2.12"])])
def test_each_host_is_told_its_own_address(hosts, host, own):
    lines = hosts[host]["rendered"]["environment"].splitlines()
    assert [line for line in lines if "HOST_IP" in line] == [f'SGLANG_HOST_IP="{address}"' for address in own]


@pytest.mark.parametrize(
    "host, allowed", [("alone1", "localhost"), ("twin2", "localhost 192.0.2.11 192.0.2.12")]
)
def test_the_unit_lets_the_hosts_of_the_group_in_and_nobody_else(hosts, host, allowed):
    lines = hosts[host]["rendered"]["unit"].splitlines()
    assert [line for line in lines if line.startswith("IPAddress")] == [
        "IPAddressDeny=any",
        f"IPAddressAllow={allowed}",
    ]


def test_a_group_has_one_release_on_all_its_hosts(hosts):
    one, other, alone = (hosts[name]["rendered"] for name in ("twin1", "twin2", "alone1"))
    assert one["id"] == other["id"] != alone["id"]
    assert one["statement"] == other["statement"]
    assert one["statement"]["group"] == ["192.0.2.11", "192.0.2.12"]


def test_a_host_on_its_own_has_the_release_that_it_always_had(hosts):
    # The name covers the texts as they are, and nothing of groups.
    assert set(hosts["alone1"]["rendered"]["statement"]) == {
        "engine",
        "model",
        "drafter",
        "config",
        "environment",
    }


@pytest.mark.parametrize(
    "host, message",
    [
        # Nothing but the last check is against them: they are not this machine.
        ("twin1", "no interface of this host has 192.0.2.11. Set sglang_server_span_address"),
        ("twin2", "no interface of this host has 192.0.2.12. Set sglang_server_span_address"),
        (
            "mixed1",
            "has other hosts between those of mixed, or has them in another order. Write mixed1, mixed2",
        ),
        (
            "named2",
            "the addresses of named1, named2 are named1.example.net, named2; expected an IP address for each",
        ),
        ("strange1", "strange2: expected sglang_server_span: strange there, too"),
        ("open2", "sglang_edge_enabled on open2: only open1, rank 0, answers clients"),
        ("limited1", "limited2: left out by --limit, or no host of the inventory group sglang"),
        ("limited1", "A group is deployed as one: --limit limited."),
        ("lonely1", "expected an inventory group with this host and at least one more. It has: lonely1."),
    ],
)
def test_a_group_that_cannot_be_one_server_is_refused(hosts, host, message):
    assert message in " ".join(hosts[host]["refused"].split())


def test_rank_0_may_have_the_edge(hosts):
    assert "sglang_edge_enabled" not in hosts["open1"]["refused"]


def test_a_group_goes_through_a_restart_as_one_server(hosts):
    alike = {"twin1": "twin2", "named1": "named2", "open1": "open2"}
    for one, other in alike.items():
        assert hosts[one]["batch"] == hosts[other]["batch"] == [one, other]
    for host in ("alone1", "alone2", "lonely1", "limited1"):
        assert hosts[host]["batch"] == [host]


def test_all_plays_that_restart_servers_go_through_them_in_the_same_batches():
    assert serial_of("playbooks/rollback.yml") == serial_of("playbooks/deploy.yml")
