#!/usr/bin/python
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: whether hosts that are to form one server reach each other."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: group_link
short_description: See whether hosts that are to form one server reach each other
description:
  - Looks, on one host of a group, for the interface that has this host's address, and asks the other hosts at
    theirs. What stands between two of them would otherwise be found when the engines meet, after the switch.
  - Nobody needs to listen there. A host that refuses a connection has answered; one that says nothing has a
    firewall before it, or is not there.
options:
  addresses:
    description: IP addresses of the hosts on the network that they share, in the order of their ranks.
    type: list
    elements: str
    required: true
  rank:
    description: Place of this host in O(addresses), from 0.
    type: int
    required: true
  port:
    description: TCP port at which the engines meet on rank 0. Their launchers do so at the one before it.
    type: int
    required: true
  timeout:
    description: Seconds that one answer may take.
    type: float
    default: 3
attributes:
  check_mode:
    support: full
    description: Reads only; check mode makes no difference.
  diff_mode:
    support: none
    description: Changes nothing, so there is no difference to show.
author:
  - The sglang-kit contributors
"""

EXAMPLES = r"""
- name: See whether the hosts of the group reach each other
  group_link:
    addresses: [192.0.2.11, 192.0.2.12]
    rank: 1
    port: 25000
"""

RETURN = r"""
interface:
  description: Name of the interface that has this host's address.
  returned: success
  type: str
"""

import ipaddress

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit.addresses import interface_of, own_addresses, unreachable

# Beside the port of the meeting, one of those that the engines open between each other as they need them.
ANY_PORT = 50000


class LinkError(Exception):
    """The hosts cannot form one server over these addresses; the message says why and what to do."""


def parse(addresses):
    """Return the addresses in their usual spelling; LinkError for one that cannot be used, or comes twice."""
    found = []
    for address in addresses:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError as error:
            raise LinkError(f"{error}. Set sglang_server_span_address of that host.") from None
        if parsed.is_loopback or parsed.is_unspecified:
            raise LinkError(
                f"{address} is no address by which another host reaches it. Set sglang_server_span_address "
                "of that host to its address on the network that the group shares."
            )
        if str(parsed) in found:
            raise LinkError(
                f"{address} stands for two hosts of the group. Correct sglang_server_span_address."
            )
        found.append(str(parsed))
    return found


def run(params, own_addresses):
    """Return the module's result; raises LinkError. own_addresses: those of this host."""
    addresses = parse(params["addresses"])
    own = addresses[params["rank"]]
    interface = interface_of(own, own_addresses)
    if interface is None:
        raise LinkError(
            f"no interface of this host has {own}. Set sglang_server_span_address to the address of its "
            "interface on the network that the group shares."
        )
    silent = []
    for rank, address in enumerate(addresses):
        if address != own:
            ports = (params["port"] - 1, params["port"], ANY_PORT) if rank == 0 else (ANY_PORT,)
            answers = [(port, unreachable(address, port, params["timeout"])) for port in ports]
            silent += [f"{address} (rank {rank}) at TCP port {port}: {why}" for port, why in answers if why]
    if silent:
        raise LinkError(
            "this host does not reach "
            + "; ".join(silent)
            + ". Let the hosts of a group reach each other at all TCP ports: the engines choose theirs."
        )
    return {"changed": False, "interface": interface}


def main():
    module = AnsibleModule(
        argument_spec={
            "addresses": {"type": "list", "elements": "str", "required": True},
            "rank": {"type": "int", "required": True},
            "port": {"type": "int", "required": True},
            "timeout": {"type": "float", "default": 3},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**run(module.params, own_addresses()))
    except LinkError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
