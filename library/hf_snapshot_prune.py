#!/usr/bin/python
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: remove the revisions of a model that nothing needs."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: hf_snapshot_prune
short_description: Remove the revisions of a model that nothing needs
description:
  - Removes snapshots that M(hf_snapshot) made of one model, and what is left of its unfinished ones.
  - A revision that is asked for, or that a link leads to, always stays, and so does what has no manifest.
options:
  repo_id:
    description: The repository, as organisation/name.
    type: str
    required: true
  dest:
    description: Folder of all models.
    type: path
    default: /srv/models
  wanted:
    description: Revisions that stay.
    type: list
    elements: str
    required: true
  in_use:
    description: Shell patterns of links to revisions that stay.
    type: list
    elements: str
    default: [/opt/sglang/releases/*/model, /opt/sglang/releases/*/drafter]
  keep:
    description: Number of other revisions that stay, the newest ones.
    type: int
    required: true
author: sglang-kit contributors
attributes:
  check_mode:
    description: Says what would be removed.
    support: full
  diff_mode:
    description: Shows the folders.
    support: full
"""

EXAMPLES = r"""
- name: Remove the revisions that no release needs
  hf_snapshot_prune:
    repo_id: nvidia/Kimi-K2.5-NVFP4
    wanted: ["{{ model_store_target.revision }}"]
    keep: 0
"""

RETURN = r"""
removed:
  description: Folders that were removed.
  type: list
  elements: str
  returned: success
freed_bytes:
  description: Size of their files, in bytes; files that another revision shares are counted too.
  type: int
  returned: success
in_use:
  description: Revisions that a link leads to.
  type: list
  elements: str
  returned: success
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit import snapshot
from ansible.module_utils.sglang_kit.snapshot_store import Store, prunable, remove_tree


def run(module):
    params = module.params
    snapshot.check_repo_id(params["repo_id"])
    if params["keep"] < 0:
        raise snapshot.SnapshotError(f"keep is {params['keep']}; expected a number of revisions, or 0")
    asked = [params[name] for name in ("dest", "repo_id", "wanted", "in_use", "keep")]
    going, size, needed = prunable(*asked)
    if going and not module.check_mode:
        with Store(params["dest"], params["repo_id"], "").lock():
            # A link may have come in the meantime.
            going, size, needed = prunable(*asked)
            for path in going:
                remove_tree(path)
    lines = "".join(path + "\n" for path in going)
    return {
        "changed": bool(going),
        "removed": going,
        "freed_bytes": size,
        "in_use": needed,
        "diff": {"before": lines, "after": ""},
    }


def main():
    module = AnsibleModule(
        argument_spec={
            "repo_id": {"type": "str", "required": True},
            "dest": {"type": "path", "default": "/srv/models"},
            "wanted": {"type": "list", "elements": "str", "required": True},
            "in_use": {
                "type": "list",
                "elements": "str",
                "default": ["/opt/sglang/releases/*/model", "/opt/sglang/releases/*/drafter"],
            },
            "keep": {"type": "int", "required": True},
        },
        supports_check_mode=True,
    )
    module.params["dest"] = os.path.abspath(module.params["dest"])
    try:
        result = run(module)
    except (snapshot.SnapshotError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
