# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Faults on order: rules that say which request goes wrong, how, and how often."""

import dataclasses
import os
import re
import socket
import struct
import threading
import time

WHOLE_ANSWER = ("status", "delay")
IN_BODY = ("truncate", "reset", "stall", "corrupt")
OTHER_FILE = ("resize", "whole")
ALL = WHOLE_ANSWER + IN_BODY + OTHER_FILE


@dataclasses.dataclass
class Rule:
    """One fault.

    path: regular expression, searched in the request's path and query
    do: status    answer with `code` and `headers`, without a body
        delay     wait `seconds` before the answer
        truncate  close the connection in order, after `after` bytes of the body
        reset     drop the connection after `after` bytes
        stall     wait `seconds` after `after` bytes, then go on
        corrupt   turn the byte behind the first `after` bytes into another
        resize    serve only the first `after` bytes of the file, as if it had no more
        whole     serve the whole file whatever range was asked for
    method: only requests of this method
    skip: leave alone that many matching requests first
    times: act that often; None is for ever
    """

    path: str
    do: str
    method: "str | None" = None
    skip: int = 0
    times: "int | None" = None
    code: int = 503
    headers: dict = dataclasses.field(default_factory=dict)
    after: int = 0
    seconds: float = 0

    def __post_init__(self):
        if self.do not in ALL:
            raise ValueError(f"do is {self.do!r}; expected one of {', '.join(ALL)}")
        re.compile(self.path)

    def matches(self, method, path):
        """Say whether this request is hit; counts `skip` and `times` down."""
        if self.times == 0 or self.method not in (None, method) or not re.search(self.path, path):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return True


class Rules:
    """The rules in force; the first that matches acts."""

    def __init__(self):
        self._lock = threading.Lock()
        self._rules = []

    def replace(self, rules):
        """Set the rules from dicts of Rule's fields; raises TypeError or ValueError."""
        parsed = [Rule(**rule) for rule in rules]
        with self._lock:
            self._rules = parsed

    def pick(self, method, path):
        with self._lock:
            return next((rule for rule in self._rules if rule.matches(method, path)), None)


PIECE = 1 << 22


def send(handler, content, start, end, record):
    """Send bytes [start, end) of a file, and keep record["sent"] up to date meanwhile."""
    while start < end:
        sent = handler.connection.sendfile(content, start, min(PIECE, end - start))
        start += sent
        record["sent"] += sent


def send_body(handler, content, start, end, rule, record):
    """Send bytes [start, end) of a file the way the rule says."""
    connection = handler.connection
    middle = min(start + rule.after, end)
    send(handler, content, start, middle, record)
    if rule.do in ("truncate", "reset"):
        handler.close_connection = True
        if rule.do == "truncate":
            connection.shutdown(socket.SHUT_WR)
        else:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # Closed by its number: an orderly shutdown before the close would send no reset.
            os.close(connection.detach())
        return
    if rule.do == "stall":
        time.sleep(rule.seconds)
    elif middle < end:
        content.seek(middle)
        connection.sendall(bytes([content.read(1)[0] ^ 0xFF]))
        middle += 1
        record["sent"] += 1
    send(handler, content, middle, end, record)
