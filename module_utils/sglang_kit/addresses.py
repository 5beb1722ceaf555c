# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Addresses of hosts that form one server: whose interface is it, and does it answer?

Standard library only: the launcher imports this file from its own folder on the node, Ansible's modules
import it as module_utils.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct

# Of the kernel's <linux/netlink.h>, <linux/rtnetlink.h> and <linux/if_addr.h>.
NETLINK_ROUTE, RTM_NEWADDR, RTM_GETADDR, REQUEST_DUMP, DONE, ERROR = 0, 20, 22, 0x301, 3, 2
IFA_ADDRESS, IFA_LOCAL = 1, 2
HEADER, ADDRESS, ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")


def own_addresses():
    """Return [(interface, IP address as str)] of this host.

    Asked of the kernel itself: in a hardened unit `ip` may not do what it does before it asks.
    """
    found = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_ROUTE) as kernel:
        body = ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        kernel.send(HEADER.pack(HEADER.size + len(body), RTM_GETADDR, REQUEST_DUMP, 1, 0) + body)
        while True:
            data = kernel.recv(1 << 16)
            while data:
                length, kind = HEADER.unpack_from(data)[:2]
                if kind in (DONE, ERROR):
                    return found
                if kind == RTM_NEWADDR:
                    found.append(_read(data[HEADER.size : length]))
                data = data[_aligned(length) :]


def _read(message):
    index, place, parts = ADDRESS.unpack_from(message)[4], ADDRESS.size, {}
    while place < len(message):
        length, kind = ATTRIBUTE.unpack_from(message, place)
        parts[kind] = message[place + ATTRIBUTE.size : place + length]
        place += _aligned(length)
    # Between two points the first one is the other end's.
    packed = parts.get(IFA_LOCAL, parts.get(IFA_ADDRESS))
    return socket.if_indextoname(index), str(ipaddress.ip_address(packed))


def _aligned(length):
    return (length + 3) & ~3


def interface_of(address, own):
    """Return the name of the interface that has an IP address, or None. own: as own_addresses returns."""
    wanted = ipaddress.ip_address(address)
    return next((name for name, each in own if ipaddress.ip_address(each) == wanted), None)


def unreachable(address, port, timeout):
    """Return why nothing of a host answers at a TCP port within seconds (str), or None.

    A host that refuses the connection has answered: nobody listens there yet.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout)
        try:
            sock.connect((address, port))
        except socket.timeout:
            return f"no answer within {timeout:g} s"
        except OSError as error:
            return None if error.errno == errno.ECONNREFUSED else str(error.strerror or error)
    return None
