#!/usr/bin/python
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: write down what a staged engine tree is made of, or hold it against what was written."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: engine_attestation
short_description: Attest a staged engine tree, or hold it against its attestation
description:
  - An attestation names what a virtual environment was made from, the digests of files that matter, and the
    digest of the list of files of each installed distribution. A tree without one is unfinished.
  - A tree that was made in another folder gets its name when it is attested. An unfinished one that has the
    name already is replaced; a process that runs from it goes on with the same paths.
  - A tree that has an attestation is only held against it, and the module fails if anything differs. The
    attestation of a tree is never replaced.
options:
  tree:
    description: Directory that the virtual environment has once it is attested.
    type: path
    required: true
  made_in:
    description: >-
      Directory where it was made, on the same file system; O(tree) itself if it is left out.
      Looked at only if O(tree) is not attested.
    type: path
  files:
    description: Files whose content is attested, relative to O(tree).
    type: list
    elements: str
    required: true
  inputs:
    description: What the tree was made from, to be written down with the rest.
    type: dict
    default: {}
author: sglang-kit contributors
attributes:
  check_mode:
    description: Says whether a tree would be attested. A tree that does not exist yet would be.
    support: full
  diff_mode:
    description: Shows the attestation that is written.
    support: full
"""

EXAMPLES = r"""
- name: Attest the engine
  engine_attestation:
    tree: /opt/sglang/engines/0.5.9-0123456789ab
    made_in: /opt/sglang/engines/0.5.9-0123456789ab.part
    files:
      - lib/python3.11/site-packages/sglang/srt/models/kimi_k25.py
    inputs:
      version: 0.5.9
"""

RETURN = r"""
path:
  description: The file of the attestation.
  returned: always
  type: str
attestation:
  description: >-
    What is attested: inputs, files (path to sha256), distributions (name and version to the sha256 of their
    list of files).
  returned: when the tree exists
  type: dict
"""

import json
import os
import shutil
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit import attestation


def write(module, path, text):
    """Put the text in place atomically."""
    handle, part = tempfile.mkstemp(dir=os.path.dirname(path))
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.chmod(part, 0o644)
    module.atomic_move(part, path)


def put_in_place(made_in, tree):
    """Give the attested tree its name; what had it before is removed."""
    replaced = tree + ".replaced"
    if os.path.isdir(replaced):
        shutil.rmtree(replaced)
    if os.path.isdir(tree):
        os.rename(tree, replaced)
    os.rename(made_in, tree)
    if os.path.isdir(replaced):
        shutil.rmtree(replaced)


def main():
    module = AnsibleModule(
        argument_spec={
            "tree": {"type": "path", "required": True},
            "made_in": {"type": "path"},
            "files": {"type": "list", "elements": "str", "required": True},
            "inputs": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    tree = module.params["tree"]
    path = os.path.join(tree, attestation.NAME)
    if attestation.read(tree) is not None:
        problems = attestation.verify(tree)
        if problems:
            module.fail_json(
                msg="{} is not what was attested: {}. Somebody ran pip inside it or edited it. "
                "Remove {} and deploy again: the tree is then made anew, while a server that runs from it "
                "goes on".format(tree, "; ".join(problems), path),
                path=path,
            )
        module.exit_json(changed=False, path=path, attestation=attestation.read(tree))

    made_in = module.params["made_in"] or tree
    if not os.path.isdir(made_in):
        if module.check_mode:
            module.exit_json(changed=True, path=path)
        module.fail_json(msg=f"There is no {made_in} to attest; stage the engine first", path=path)
    found = attestation.look(made_in, module.params["files"])
    missing = [name for name, digest in found["files"].items() if digest is None]
    if missing:
        module.fail_json(
            msg="{} lacks {}, which it must have to be attested; the install did not end well".format(
                made_in, ", ".join(missing)
            ),
            path=path,
        )
    statement = {"inputs": module.params["inputs"], **found}
    text = json.dumps(statement, indent=2, sort_keys=True) + "\n"
    if not module.check_mode:
        write(module, os.path.join(made_in, attestation.NAME), text)
        if made_in != tree:
            put_in_place(made_in, tree)
    module.exit_json(
        changed=True,
        path=path,
        attestation=statement,
        diff={"before": "", "after": text, "before_header": path, "after_header": path},
    )


if __name__ == "__main__":
    main()
