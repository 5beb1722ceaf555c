"""Fixtures of the lab: the host, and playbooks on it."""

import pytest

from tests import lab_hosts
from tests.lab_hosts import play, play_in_background  # noqa: F401


@pytest.fixture(scope="session")
def node():
    yield from lab_hosts.host("test", "test1", "41")
