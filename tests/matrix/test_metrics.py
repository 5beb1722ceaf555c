# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The metrics that rules and dashboard read, against the sources of every published release."""

from __future__ import annotations

import pathlib
import re

import yaml
from ansible.module_utils.sglang_kit.releases_facts import version_key

ROLE = pathlib.Path(__file__).resolve().parents[2] / "roles/sglang_monitoring"
METRICS = yaml.safe_load((ROLE / "vars/main/metrics.yml").read_text(encoding="utf-8"))[
    "__sglang_monitoring_metrics"
]
# Of those that differ, what has to be there in one form or another.
START = {"sglang:engine_startup_time", "sglang:startup_time_seconds"}


def test_the_release_has_the_metrics_that_are_said_of_it(served):
    defined = set()
    for path in served.package.rglob("*.py"):
        defined |= set(re.findall(r'name="(sglang:\w+)"', path.read_text(encoding="utf-8")))
    version = version_key(served.version)
    for metric in METRICS:
        since, until = metric.get("since", "0.0"), metric.get("until", "99.0")
        expected = version_key(since) <= version <= version_key(until)
        assert (metric["name"] in defined) == expected, metric
    assert defined & START
