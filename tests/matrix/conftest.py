# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Tests that ask for `release` run on every published one, those for `served` where the model is known."""

from __future__ import annotations

import pytest
from matrix_support import EXPECTED, FetchError, expected, release_of, versions


@pytest.fixture
def release(version):
    """A release in the cache. Where it cannot be had the test fails: a matrix with holes proves nothing."""
    try:
        return release_of(version)
    except FetchError as error:
        pytest.fail(str(error))


@pytest.fixture
def served(release):
    return release


def pytest_generate_tests(metafunc):
    if "wrapper" in metafunc.fixturenames:
        cases = [(version, w) for version, wrappers in EXPECTED["wrappers"].items() for w in wrappers]
        names = ["{}-{}".format(version, w["class"]) for version, w in cases]
        metafunc.parametrize("version, wrapper", cases, ids=names)
    elif "version" in metafunc.fixturenames:
        refused = [] if "served" not in metafunc.fixturenames else ["refuse"]
        chosen = [version for version in versions() if expected(version).outcome not in refused]
        # By module: the tests of one release run together, and its syntax trees can go when they are done.
        metafunc.parametrize("version", chosen, scope="module")


@pytest.fixture(scope="module")
def sources():
    """A function that returns all sources of a release as one text; that of one release is kept."""
    kept = {}

    def read(release):
        if release.version not in kept:
            kept.clear()
            files = sorted(release.package.glob("srt/**/*.py"))
            kept[release.version] = "\n".join(path.read_text(encoding="utf-8") for path in files)
        return kept[release.version]

    return read
