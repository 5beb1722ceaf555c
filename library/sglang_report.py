#!/usr/bin/python
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_report
short_description: Gather in one archive what a report of a fault needs
description:
  - Puts the state of the unit, its journal, the configuration and the evidence of the present release,
    versions and the state of the node into one archive, which only root may read.
  - Takes secrets out of all of it. These are what the files of O(secrets) hold, and what looks like a key, a
    token or a password.
  - What is not there is named in C(missing.txt), and is no failure.
author: sglang-kit contributors
options:
  dest:
    description: The archive, a C(.tar.gz). Its folder must be there.
    type: path
    required: true
  unit:
    description: Name of the server's systemd unit.
    type: str
    default: sglang.service
  release:
    description: Directory of the release, or a link to it.
    type: path
    default: /opt/sglang/current
  journal_lines:
    description: How many lines of the unit's journal to take, the newest.
    type: int
    default: 20000
  documents:
    description: More to put into the archive, by file name. Maps become JSON.
    type: dict
    default: {}
  secrets:
    description: Files on the node whose words appear nowhere in the archive.
    type: list
    elements: path
    default:
      - /etc/sglang/credentials/engine-key
      - /etc/nginx/sglang/clients.map
      - /etc/nginx/sglang_gateway/clients.map
      - /etc/sglang-gateway/credentials/control-key
      - /etc/sglang-gateway/credentials/worker-key
attributes:
  check_mode:
    description: In check mode nothing is gathered.
    support: full
  diff_mode:
    description: There is nothing to compare.
    support: none
"""

EXAMPLES = r"""
- name: Gather a report
  sglang_report:
    dest: /run/report.tar.gz
"""

RETURN = r"""
files:
  description: Names of the files in the archive.
  returned: when it gathered
  type: list
missing:
  description: What was not there, with the reason.
  returned: when it gathered
  type: list
"""

import io
import json
import os
import tarfile
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit.redaction import redact, words_of

# A hung GPU or disk must not hang the report on it.
LIMIT_S = "60"
# Keys of the engine, of clients, and of a router on the same host.
SECRET_FILES = [
    "/etc/sglang/credentials/engine-key",
    "/etc/nginx/sglang/clients.map",
    "/etc/nginx/sglang_gateway/clients.map",
    "/etc/sglang-gateway/credentials/control-key",
    "/etc/sglang-gateway/credentials/worker-key",
]
# Of each release, beside what the unit says.
RELEASE_FILES = (
    "release.json",
    "server.yaml",
    "environment",
    "gate.json",
    "gate.md",
    "engine/attestation.json",
    "model/config.json",
    "model/manifest.json",
    "drafter/config.json",
)
NODE_FILES = (
    "/run/sglang/started.json",
    "/etc/nginx/conf.d/sglang.conf",
    "/etc/os-release",
    "/proc/meminfo",
    "/proc/driver/nvidia/version",
)


def commands(unit, lines):
    """Return what is asked on the node: {file name: argument list}. Never other programs' arguments."""
    return {
        "unit.txt": ["systemctl", "cat", unit],
        "unit-state.txt": ["systemctl", "show", unit],
        "unit-security.txt": ["systemd-analyze", "--no-pager", "security", unit],
        "journal.txt": [
            *("journalctl", "--all", "--no-pager", "--output=short-iso-precise"),
            *("--unit=" + unit, f"--lines={lines}"),
        ],
        "kernel.txt": ["journalctl", "--dmesg", "--no-pager", "--output=short-iso-precise", "--lines=2000"],
        "processes.txt": ["ps", "-eo", "pid,ppid,user,lstart,rss,stat,comm", "--forest"],
        "ports.txt": ["ss", "--listening", "--tcp", "--numeric", "--processes"],
        "disks.txt": ["df", "--human-readable", "--print-type"],
        "system.txt": ["uname", "--all"],
        "packages.txt": ["dpkg-query", "--list", "*nvidia*", "nginx*", "python3*", "systemd*"],
        "nvidia-smi.txt": ["nvidia-smi", "-q"],
        "nvidia-topology.txt": ["nvidia-smi", "topo", "-m"],
    }


def main():
    module = AnsibleModule(
        argument_spec={
            "dest": {"type": "path", "required": True},
            "unit": {"type": "str", "default": "sglang.service"},
            "release": {"type": "path", "default": "/opt/sglang/current"},
            "journal_lines": {"type": "int", "default": 20000},
            "documents": {"type": "dict", "default": {}},
            "secrets": {
                "type": "list",
                "elements": "path",
                "no_log": False,
                "default": SECRET_FILES,
            },
        },
        supports_check_mode=True,
    )
    params = module.params
    if module.check_mode:
        module.exit_json(changed=False, skipped=True, msg="check mode: nothing was gathered")
    secrets, found, missing = [], {}, []
    for path in params["secrets"]:
        # Without the file there is no such secret; a file that cannot be read must not be passed over.
        if os.path.exists(path):
            with open(path, encoding="utf-8") as stream:
                secrets += words_of(stream.read())

    for name, document in params["documents"].items():
        found[name] = (
            document if isinstance(document, str) else json.dumps(document, indent=2, sort_keys=True)
        )
    for name, argv in commands(params["unit"], params["journal_lines"]).items():
        tool, limit = module.get_bin_path(argv[0]), module.get_bin_path("timeout", required=True)
        if not tool:
            missing.append(f"{name}: {argv[0]} is not installed")
            continue
        rc, out, err = module.run_command([limit, LIMIT_S, tool, *argv[1:]], errors="surrogate_then_replace")
        found[name] = out + err
        if rc:
            missing.append(f"{name}: {argv[0]} ended with {rc}")
    for path in [*(os.path.join(params["release"], name) for name in RELEASE_FILES), *NODE_FILES]:
        try:
            with open(path, encoding="utf-8", errors="replace") as stream:
                found["files" + path] = stream.read()
        except OSError as error:
            missing.append(f"{path}: {error.strerror}")
    found["missing.txt"] = "\n".join(missing) + "\n"

    folder = os.path.basename(params["dest"])[: -len(".tar.gz")]
    part = params["dest"] + ".part"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, text in sorted(found.items()):
            data = redact(text, secrets).encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(data))
    os.replace(part, params["dest"])
    module.exit_json(changed=True, files=sorted(found), missing=missing)


if __name__ == "__main__":
    main()
