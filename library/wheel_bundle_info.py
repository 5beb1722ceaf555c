#!/usr/bin/python
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: can locks be installed from a bundle, on this machine?"""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: wheel_bundle_info
short_description: Say why locks cannot be installed from a bundle on this machine
description:
  - Holds a bundle that M(wheel_bundle) made against the locks that are to be installed and against the
    interpreter that runs the module, and reads every wheel of these locks.
options:
  path:
    description: Folder of the bundle.
    type: path
    required: true
  version:
    description: Version of the engine that is expected. Without it, any.
    type: str
    default: ""
  locks:
    description: The sha256 of each lock that is to be installed, by its name in the bundle.
    type: dict
    required: true
author: sglang-kit contributors
attributes:
  check_mode:
    description: Changes nothing.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: Look whether the bundle fits
  wheel_bundle_info:
    path: /srv/bundle
    version: 0.5.23
    locks:
      engine: "{{ lookup('ansible.builtin.file', 'locks/0.5.23.txt', rstrip=false) | hash('sha256') }}"
"""

RETURN = r"""
problems:
  description: A sentence for each reason why they cannot be installed. None if they can.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit import bundle


def main():
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "version": {"type": "str", "default": ""},
            "locks": {"type": "dict", "required": True},
        },
        supports_check_mode=True,
    )
    module.exit_json(
        changed=False,
        problems=bundle.problems(
            module.params["path"], module.params["version"], module.params["locks"], bundle.this_machine()
        ),
    )


if __name__ == "__main__":
    main()
