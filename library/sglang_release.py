#!/usr/bin/python
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: what an SGLang release needs, accepts and is known for."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_release
short_description: Tell what an SGLang release needs, accepts and is known for
description:
  - Reads the unpacked files of a release, without importing them, and adds what the project knows about it.
  - Says what the release asks of a node, which of today's server arguments it renamed, dropped or takes no
    longer from a file, which EAGLE-3 drafters it can load, and the advisories and traps that it is known for.
options:
  version:
    description: Exact version of the release.
    type: str
    required: true
  path:
    description:
      - Folder with the package C(sglang) and its C(.dist-info), as in site-packages.
      - Left out, only what needs no sources is returned.
    type: path
  arguments:
    description: Today's server arguments by their long names, without the dashes.
    type: dict
    default: {}
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
- name: See what the next release would change
  sglang_release:
    version: 0.5.23
    path: .cache/releases/0.5.23
    arguments:
      cuda-graph-max-bs: 64
      kv-cache-dtype: fp8_e4m3
  register: release
  delegate_to: localhost

- name: Warn of what the pinned release is known for
  sglang_release:
    version: "{{ sglang_engine_version }}"
  register: release
  delegate_to: localhost
"""

RETURN = r"""
advisories:
  description: Published advisories about the release, each with C(id) and C(about).
  returned: success
  type: list
  elements: dict
traps:
  description: What bites in the release, each with C(what) and C(remedy).
  returned: success
  type: list
  elements: dict
needs:
  description:
    - What the release asks of a node, as its metadata states it. Has C(python), C(glibc), C(torch), C(cuda)
      (major version), C(driver) (oldest branch), C(kernels), C(flashinfer), C(transformers); null where it
      states nothing.
  returned: if O(path) is given
  type: dict
flags:
  description:
    - What becomes of O(arguments). Each entry has C(flag), C(problem) (unknown, deprecated, not in a file,
      value) and C(remedy).
  returned: if O(path) is given
  type: list
  elements: dict
drafters:
  description: Architectures of EAGLE-3 drafters that the release can load.
  returned: if O(path) is given
  type: list
  elements: str
"""

import glob
import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit.contract_tree import ContractError, Tree
from ansible.module_utils.sglang_kit.releases_facts import (
    ADVISORIES,
    RENAMED,
    TRAPS,
    VersionError,
    known_for,
    read_needs,
)
from ansible.module_utils.sglang_kit.releases_flags import FlagsError, compare, read_flags


def read_text(folder, name):
    """Return the text of a file in the release's .dist-info, empty if it is not there."""
    for path in glob.glob(os.path.join(glob.escape(folder), "sglang-*.dist-info", name)):
        with open(path, encoding="utf-8") as source:
            return source.read()
    return ""


def run(params):
    """Return the module's result; raises VersionError, ContractError or FlagsError with what to do."""
    result = {
        "changed": False,
        "advisories": known_for(ADVISORIES, params["version"]),
        "traps": known_for(TRAPS, params["version"]),
    }
    if params["path"]:
        tree = Tree(params["path"])
        if tree.version() not in (None, params["version"]):
            raise VersionError(
                "{} holds SGLang {}, not {}. Give the folder of that release.".format(
                    params["path"], tree.version(), params["version"]
                )
            )
        folder = os.path.dirname(tree.root)
        architectures, _unread = tree.architectures()
        result["needs"] = read_needs(read_text(folder, "METADATA"), read_text(folder, "WHEEL"))
        result["flags"] = compare(read_flags(tree.root), params["arguments"], RENAMED)
        result["drafters"] = sorted(name for name in architectures if "eagle3" in name.lower())
    return result


def main():
    module = AnsibleModule(
        argument_spec={
            "version": {"type": "str", "required": True},
            "path": {"type": "path"},
            "arguments": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**run(module.params))
    except (VersionError, ContractError, FlagsError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
