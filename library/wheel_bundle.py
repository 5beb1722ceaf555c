#!/usr/bin/python
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: gather the wheels of locks, for an installation without a network."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: wheel_bundle
short_description: Gather the wheels of locks, for an installation without a network
description:
  - Ensures that a folder holds a wheel for every distribution that the locks pin for one Python and platform,
    each with a hash that its lock names, and a manifest that comes last.
  - Downloads with the pip of the interpreter that runs the module, and with pip's own settings.
  - A run that was interrupted is gone on with. Wheels that no lock names are removed.
options:
  path:
    description: Folder of the bundle. It gets C(wheels/) and C(bundle.json).
    type: path
    required: true
  version:
    description: Version of the engine, which the manifest names.
    type: str
    required: true
  locks:
    description: Requirements files with versions and hashes, by a name for each.
    type: dict
    required: true
  python:
    description: Python of the machines that install, such as V(3.12).
    type: str
    required: true
  machine:
    description: Their machine, as C(uname -m) says it.
    type: str
    required: true
  glibc:
    description: The oldest glibc among them, such as V(2.35).
    type: str
    required: true
author: sglang-kit contributors
requirements:
  - pip and packaging
attributes:
  check_mode:
    description: Says whether anything would be gathered, and asks nobody for it.
    support: full
  diff_mode:
    description: Shows the manifest.
    support: full
"""

EXAMPLES = r"""
- name: Gather the wheels
  wheel_bundle:
    path: /srv/bundle
    version: 0.5.23
    locks:
      engine: roles/sglang_engine/files/locks/0.5.23.txt
    python: "3.12"
    machine: x86_64
    glibc: "2.35"
"""

RETURN = r"""
wheels:
  description: Number of wheels in the bundle.
  returned: when it is there
  type: int
bytes:
  description: Their size together.
  returned: when it is there
  type: int
"""

import json
import os
import sys
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit import attestation, bundle


def download(module, wheels, lock, selected, target):
    """Bring one wheel for each pin of a lock."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as chosen:
        # Without markers: pip judges them by its own interpreter, not by the one that the wheels are for.
        for pin, hashes in selected:
            chosen.write(" ".join([pin, *(f"--hash=sha256:{one}" for one in hashes)]) + "\n")
        chosen.flush()
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        command += ["--require-hashes", "--only-binary=:all:", f"--python-version={target['python']}"]
        command += [f"--platform={tag}" for tag in bundle.tags(target)]
        command += [f"--dest={wheels}", f"--requirement={chosen.name}"]
        rc, _out, err = module.run_command(command)
    if rc:
        errors = [line for line in err.splitlines() if line.startswith("ERROR")] or err.splitlines()
        module.fail_json(
            msg="The wheels of the {} for Python {}, {}, glibc {} could not be gathered: {}. See that "
            "`pip download` works here (proxy, certificates, package index), and that each distribution has "
            "a wheel for this target".format(
                lock,
                target["python"],
                target["machine"],
                target["glibc"],
                " ".join(line[:300] for line in errors[-3:]),
            )
        )


def write(module, path, manifest):
    handle, part = tempfile.mkstemp(dir=os.path.dirname(path))
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        json.dump(manifest, stream, indent=2, sort_keys=True)
        stream.write("\n")
    os.chmod(part, 0o644)
    module.atomic_move(part, path)


def result(folder, manifest):
    names = {name for lock in manifest["locks"].values() for name in lock["files"]}
    sizes = [os.path.getsize(os.path.join(folder, bundle.WHEELS, name)) for name in names]
    return {"wheels": len(names), "bytes": sum(sizes)}


def main():
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "version": {"type": "str", "required": True},
            "locks": {"type": "dict", "required": True},
            "python": {"type": "str", "required": True},
            "machine": {"type": "str", "required": True},
            "glibc": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    folder, version = module.params["path"], module.params["version"]
    target = {key: module.params[key] for key in ("python", "machine", "glibc")}
    wheels, path = os.path.join(folder, bundle.WHEELS), os.path.join(folder, bundle.MANIFEST)
    locks = {}
    try:
        for name, lock in module.params["locks"].items():
            with open(lock, encoding="utf-8") as stream:
                locks[name] = (attestation.sha256(lock), bundle.select(stream.read(), target))
    except OSError as error:
        module.fail_json(msg=f"There is no such lock: {error}. Make it with tools/lock")
    except bundle.BundleError as error:
        module.fail_json(msg=f"{lock}: {error}")

    digests = {name: digest for name, (digest, _selected) in locks.items()}
    if not bundle.problems(folder, version, digests, target):
        manifest = bundle.read(folder)
        if manifest["target"] == target and set(manifest["locks"]) == set(locks):
            module.exit_json(changed=False, **result(folder, manifest))
    if module.check_mode:
        module.exit_json(changed=True)

    os.makedirs(wheels, exist_ok=True)
    before = ""
    if os.path.exists(path):
        with open(path, encoding="utf-8") as stream:
            before = stream.read()
        # A bundle without its manifest is unfinished.
        os.unlink(path)
    for name, (_digest, selected) in locks.items():
        download(module, wheels, name, selected, target)
    manifest, missing = bundle.describe(folder, version, target, locks)
    if missing:
        module.fail_json(msg="pip brought no wheel for {}; see {}".format(", ".join(missing), wheels))
    wanted = {name for lock in manifest["locks"].values() for name in lock["files"]}
    for name in sorted(set(os.listdir(wheels)) - wanted):
        os.unlink(os.path.join(wheels, name))
    write(module, path, manifest)
    after = json.dumps(manifest, indent=2, sort_keys=True) + "\n"
    module.exit_json(
        changed=True,
        diff={"before": before, "after": after, "before_header": path, "after_header": path},
        **result(folder, manifest),
    )


if __name__ == "__main__":
    main()
