# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Ties the launchers of hosts that are one server together: they start their engines, and end them, as one.

The engines themselves notice a dead rank only where they happen to wait for it on the CPU; a GPU that waits
for another one does so for minutes. And an engine that starts again alone meets what is left of the others.
So each launcher holds a connection to that of rank 0 for as long as its engine runs. Nothing is said on it
but who is there, and that all are: what counts is that it lasts.

Standard library only: the launcher imports this file from its own folder on the node.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time

# A host that is gone says nothing: after these seconds of silence it is asked, so often, and then given up.
IDLE_S, ASK_S, ASKED = 5, 5, 3
RETRY_S = 1.0
GO = b"go\n"


class Link:
    """The place of one launcher among those of a server.

    address: (host, port) where rank 0 listens; ranks: how many hosts there are; rank: which one this is.
    lost: who has gone, in words, since all were there; None as long as nobody has.
    """

    def __init__(self, address, ranks, rank):
        self.address = address
        self.ranks = ranks
        self.rank = rank
        self.lost = None
        self._peers = {}

    def gather(self, waiting):
        """Wait until all are there: True; or until `waiting`, asked every second, says False.

        waiting: is told who is missing (str). Raises OSError if rank 0 cannot listen.
        """
        return self._receive(waiting) if self.rank == 0 else self._join(waiting)

    def broken(self):
        """Return whether one of the others has gone; costs nothing and does not wait."""
        if self.lost is None and self._peers:
            for sock in select.select(list(self._peers), [], [], 0)[0]:
                if not _says(sock):
                    self.lost = self._peers[sock]
                    break
        return self.lost is not None

    def _receive(self, waiting):
        family = socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(self.address)
            listener.listen()
            strangers = []
            while len(self._peers) < self.ranks - 1:
                missing = [
                    f"rank {n}" for n in range(1, self.ranks) if f"rank {n}" not in self._peers.values()
                ]
                if not waiting(", ".join(missing)):
                    return False
                for sock in select.select([listener, *strangers, *self._peers], [], [], RETRY_S)[0]:
                    if sock is listener:
                        strangers.append(_keep_alive(listener.accept()[0]))
                        continue
                    said = _says(sock)
                    if sock in strangers:
                        strangers.remove(sock)
                        # Whoever says anything else has come to the wrong door.
                        if said.strip().decode("ascii", "replace") in missing:
                            self._peers[sock] = said.strip().decode("ascii")
                            continue
                    # Somebody who has not waited is let in again.
                    self._peers.pop(sock, None)
                    sock.close()
            for sock in strangers:
                sock.close()
        for sock in self._peers:
            with contextlib.suppress(OSError):
                sock.sendall(GO)
        return True

    def _join(self, waiting):
        while waiting("rank 0"):
            began = time.monotonic()
            with contextlib.suppress(OSError):
                sock = _keep_alive(socket.create_connection(self.address, timeout=RETRY_S))
                sock.sendall(f"rank {self.rank}\n".encode())
                said = None
                while said is None and waiting("the others"):
                    if select.select([sock], [], [], RETRY_S)[0]:
                        said = _says(sock)
                if said == GO:
                    self._peers = {sock: "rank 0"}
                    return True
                sock.close()
            time.sleep(max(0.0, began + RETRY_S - time.monotonic()))
        return False


def _keep_alive(sock):
    """Have the kernel notice, on a connection, a host that is gone without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, ASKED)
    return sock


def _says(sock):
    """Return what has come on a connection (bytes); nothing at its end."""
    try:
        return sock.recv(64)
    except OSError:
        return b""
