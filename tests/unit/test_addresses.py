# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Addresses of hosts that are to form one server: who has them, and who answers."""

import json
import socket
import subprocess

import group_link
import pytest
from ansible.module_utils.sglang_kit.addresses import interface_of, own_addresses, unreachable

OWN = [
    ("lo", "127.0.0.1"),
    ("lo", "::1"),
    ("eno1", "192.0.2.11"),
    ("eno1", "fe80::1"),
    ("bond0.7", "198.51.100.11"),
    ("bond0.7", "2001:db8::b"),
]


@pytest.mark.parametrize(
    "address, expected",
    [
        ("198.51.100.11", "bond0.7"),
        ("2001:db8::b", "bond0.7"),
        ("2001:0db8:0:0::000b", "bond0.7"),
        ("192.0.2.11", "eno1"),
        ("192.0.2.1", None),
    ],
)
def test_interface_of_an_address(address, expected):
    assert interface_of(address, OWN) == expected
    assert interface_of(address, []) is None


def test_the_kernel_is_asked_for_all_addresses_of_this_machine():
    shown = subprocess.run(["ip", "-json", "address"], capture_output=True, text=True, check=True).stdout
    expected = [
        (interface["ifname"], address["local"])
        for interface in json.loads(shown)
        for address in interface["addr_info"]
    ]
    assert sorted(own_addresses()) == sorted(expected)
    assert ("lo", "127.0.0.1") in expected


def test_who_listens_and_who_refuses_both_answer():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert unreachable("127.0.0.1", port, 5) is None
    assert unreachable("127.0.0.1", port, 5) is None


def test_who_says_nothing_does_not():
    with socket.socket() as deaf:
        # A full queue of connections is as silent as a firewall.
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for caller in waiting:
            caller.setblocking(False)
            caller.connect_ex(deaf.getsockname())
        assert unreachable(*deaf.getsockname(), 0.2) == "no answer within 0.2 s"
        for caller in waiting:
            caller.close()
    # No connection can lead to a broadcast address.
    assert unreachable("255.255.255.255", 1, 0.2) is not None


def link(addresses, rank=0, timeout=0.2):
    return group_link.run({"addresses": addresses, "rank": rank, "port": 25000, "timeout": timeout}, OWN)


@pytest.mark.parametrize(
    "addresses, rank, message",
    [
        (["192.0.2.11", "node2"], 0, "'node2' does not appear to be an IPv4 or IPv6 address. Set"),
        (["127.0.0.1", "192.0.2.11"], 1, "127.0.0.1 is no address by which another host reaches it"),
        (["::1", "192.0.2.11"], 1, "::1 is no address by which another host reaches it"),
        (["192.0.2.11", "192.0.2.11"], 0, "192.0.2.11 stands for two hosts"),
        (["2001:db8::b", "2001:db8:0::b"], 0, "2001:db8:0::b stands for two hosts"),
        (["192.0.2.11", "192.0.2.12"], 1, "no interface of this host has 192.0.2.12"),
    ],
)
def test_addresses_that_cannot_be_used(addresses, rank, message):
    with pytest.raises(group_link.LinkError) as error:
        link(addresses, rank)
    assert message in str(error.value)
    assert "sglang_server_span_address" in str(error.value)


def test_hosts_that_answer_are_linked(monkeypatch):
    asked = []
    monkeypatch.setattr(group_link, "unreachable", lambda *args: asked.append(args[:2]))
    assert link(["192.0.2.1", "192.0.2.11", "192.0.2.3"], 1) == {"changed": False, "interface": "eno1"}
    # Rank 0 where they meet; all of them where the engines will choose.
    assert asked == [("192.0.2.1", 24999), ("192.0.2.1", 25000), ("192.0.2.1", 50000), ("192.0.2.3", 50000)]


def test_a_host_that_says_nothing_is_named_with_its_port(monkeypatch):
    silent = {("192.0.2.1", 50000): "no answer within 3 s"}
    monkeypatch.setattr(group_link, "unreachable", lambda *args: silent.get(args[:2]))
    with pytest.raises(group_link.LinkError) as error:
        link(["192.0.2.1", "192.0.2.11"], 1)
    assert "does not reach 192.0.2.1 (rank 0) at TCP port 50000: no answer within 3 s" in str(error.value)
    assert "at all TCP ports" in str(error.value)
