# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The published releases: what is expected of each, and its sources, fetched once into .cache/releases."""

from __future__ import annotations

import functools
import pathlib
import types

import yaml
from ansible.module_utils.sglang_kit.contract import audit_class
from ansible.module_utils.sglang_kit.contract_calls import find_sites
from ansible.module_utils.sglang_kit.contract_tree import Tree
from ansible.module_utils.sglang_kit.delegate import plan_present
from ansible.module_utils.sglang_kit.releases_facts import version_key

from tools.fetch_release import FetchError, fetch, published

EXPECTED = yaml.safe_load((pathlib.Path(__file__).parent / "releases.yml").read_text())
KNOWN = sorted(EXPECTED["releases"], key=version_key)


@functools.lru_cache(maxsize=None)
def registry():
    """Return ``(versions from the first expected one on, None)``, or ``(None, why they are not known)``."""
    try:
        first = version_key(EXPECTED["first_release"])
        return [version for version in published() if version_key(version) >= first], None
    except FetchError as error:
        return None, str(error)


def expected(version):
    """Return what is expected of a release; one that is not described must be like the newest that is."""
    return types.SimpleNamespace(**EXPECTED["releases"].get(version, EXPECTED["releases"][KNOWN[-1]]))


def versions():
    """Return every release to test, the described ones and those that the registry has besides."""
    return sorted({*KNOWN, *(registry()[0] or [])}, key=version_key)


class Release:
    """One release in the cache; its sources are read when they are asked for, and once."""

    def __init__(self, version):
        self.version = version
        self.expected = expected(version)
        self._audits = {}
        self.package = pathlib.Path(fetch(version)["tree"])

    @functools.cached_property
    def tree(self):
        return Tree(str(self.package))

    @functools.cached_property
    def sites(self):
        return find_sites(self.tree)

    def audit(self, class_name, changed=None):
        """Audit a class, with the texts in `changed` in place of files (path below the package: text)."""
        changed = {file: text for file, text in (changed or {}).items() if text != self.tree.texts[file]}
        if not changed:
            if class_name not in self._audits:
                self._audits[class_name] = audit_class(self.tree, self.sites, class_name)
            return self._audits[class_name]
        tree = Tree(str(self.package))
        tree.texts.update(changed)
        return audit_class(tree, self.sites, class_name)

    def plan(self, file, class_name, delegate, methods, source_file, source_class):
        """Plan the patch of a class, without writing it."""
        path, source = str(self.package / file), str(self.package / source_file)
        return plan_present(path, class_name, delegate, methods, source, source_class)


@functools.lru_cache(maxsize=2)
def release_of(version):
    return Release(version)
