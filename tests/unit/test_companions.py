# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The launchers of one server's hosts: all there, or none; and who has gone."""

import socket
import threading
import time

import pytest
from ansible.module_utils.sglang_kit import companions

ALWAYS = lambda missing: True  # noqa: E731


@pytest.fixture
def address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()


class Waiting:
    """One launcher that waits for the others, in a thread of its own."""

    def __init__(self, address, ranks, rank):
        self.link = companions.Link(address, ranks, rank)
        self.missing, self.stop, self.result = [], False, None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        self.result = self.link.gather(lambda missing: (self.missing.append(missing), not self.stop)[1])

    def done(self):
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.result

    def gone(self):
        for sock in self.link._peers:
            sock.close()


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_all_start_when_the_last_one_is_there(address):
    first = [Waiting(address, 3, rank) for rank in (0, 2)]
    until(lambda: "rank 1" in first[0].missing and "the others" in first[1].missing)
    assert not first[1].result
    last = Waiting(address, 3, 1)
    assert [each.done() for each in (*first, last)] == [True, True, True]
    assert not any(each.link.broken() for each in (*first, last))


def test_the_order_in_which_they_come_is_all_the_same(address):
    early = Waiting(address, 2, 1)
    until(lambda: "rank 0" in early.missing)
    rank_0 = Waiting(address, 2, 0)
    assert early.done() and rank_0.done()


def test_who_has_gone_is_named(address):
    servers = [Waiting(address, 3, rank) for rank in range(3)]
    assert all(each.done() for each in servers)
    servers[2].gone()
    until(servers[0].link.broken)
    assert servers[0].link.lost == "rank 2"
    # The third one hears of it when rank 0 has ended, too.
    assert not servers[1].link.broken()
    servers[0].gone()
    until(servers[1].link.broken)
    assert servers[1].link.lost == "rank 0"


@pytest.mark.parametrize("said", [b"GET / HTTP/1.0\r\n\r\n", b"", b"rank 7\n", b"\xff\n"])
def test_strangers_are_not_taken_for_companions(address, said):
    rank_0 = Waiting(address, 2, 0)
    until(lambda: rank_0.missing)
    with socket.create_connection(address) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(8) == b""
    assert rank_0.result is None
    assert Waiting(address, 2, 1).done() and rank_0.done()


def test_a_launcher_that_did_not_wait_is_let_in_again(address):
    rank_0 = Waiting(address, 3, 0)
    first = Waiting(address, 3, 1)
    until(lambda: rank_0.missing and rank_0.missing[-1] == "rank 2")
    first.stop = True
    assert first.done() is False
    until(lambda: rank_0.missing[-1] == "rank 1, rank 2")
    others = [Waiting(address, 3, rank) for rank in (1, 2)]
    assert rank_0.done() and all(other.done() for other in others)


def test_rank_0_can_be_stopped_while_it_waits(address):
    rank_0 = Waiting(address, 2, 0)
    rank_0.stop = True
    assert rank_0.done() is False


def test_a_host_that_is_gone_without_a_word_is_given_up_in_less_than_half_a_minute(address):
    rank_0, other = Waiting(address, 2, 0), Waiting(address, 2, 1)
    assert rank_0.done() and other.done()
    for each in (rank_0, other):
        (sock,) = each.link._peers
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, every, times = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + every * times < 30


def test_a_port_that_is_taken_is_told(address):
    with socket.socket() as taken:
        taken.bind(address)
        taken.listen()
        with pytest.raises(OSError, match="Address already in use"):
            companions.Link(address, 2, 0).gather(ALWAYS)
