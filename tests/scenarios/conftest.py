"""Fixtures of the scenarios: playbooks on the host that each module makes."""

from tests.lab_hosts import play, play_in_background  # noqa: F401
