#!/usr/bin/python
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: what a node is, and whether it can serve."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_facts
short_description: Tell what a GPU node is, and judge it by rules
description:
  - Reads the GPUs, the driver, the fabric and the system from C(nvidia-smi) in its machine formats, from
    C(/proc), C(/sys), the package database and the kernel's log, all in one call.
  - A node without any NVIDIA software is a fact, not a failure.
  - Given O(rules), it judges the facts. It does not fail for what it finds; RV(checks) and RV(failures) say
    it.
options:
  root:
    description: Folder that stands for C(/); every file and program is looked for below it.
    type: path
    default: /
  unit:
    description: The unit that may hold GPUs and ports.
    type: str
    default: sglang.service
  disks:
    description: Folders whose file systems are told, even if they are not there yet.
    type: list
    elements: path
    default: []
  ports:
    description: TCP ports whose listeners are told.
    type: list
    elements: int
    default: []
  interpreters:
    description: Python interpreters whose versions are told.
    type: list
    elements: path
    default: []
  tools:
    description: Programs that are looked for.
    type: list
    elements: str
    default: [nvcc, ninja, gcc, g++]
  sysctl:
    description: Kernel settings that are told, by their dotted names.
    type: list
    elements: str
    default: []
  files:
    description: Paths whose kind, owner, mode and SHA-256 are told.
    type: list
    elements: path
    default: []
  packages:
    description: Distribution packages whose versions are told; those that are not installed are left out.
    type: list
    elements: str
    default: []
  user:
    description: User whose entry is told.
    type: str
    default: sglang
  group:
    description: Group whose entry is told.
    type: str
    default: sglang
  data_disk:
    description: UUID of a file system that has to be there; empty for none.
    type: str
    default: ""
  release:
    description: Release of SGLang whose need of a driver the rules compare with, as the value C(driver).
    type: str
    default: ""
  rules:
    description: Rules to judge by; their fields stand in C(module_utils/sglang_kit/node_rules.py).
    type: list
    elements: dict
    default: []
  values:
    description: Values that rules compare with, by name; null for one that is not known.
    type: dict
    default: {}
  profile:
    description: What the node is meant to be; rules for other profiles are left out.
    type: str
    default: cpu
  provisions:
    description: Parts of the provisioning that are switched on; what they make good is pending, not failed.
    type: list
    elements: str
    default: []
  accepted:
    description: Rules whose failure is accepted, by id.
    type: list
    elements: str
    default: []
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
- name: See what the node is
  gpu_facts:
    disks: [/opt, /srv/models]
    ports: [30000]
  register: node

- name: Judge it
  gpu_facts:
    release: 0.5.23
    profile: sm100
    rules: "{{ __gpu_node_rules }}"
    values: "{{ __gpu_node_values }}"
  register: node
  failed_when: node.failures | length > 0
"""

RETURN = r"""
facts:
  description:
    - "What the node is: C(gpus) (one dict a GPU), C(readable_gpus), C(gpu_kinds), C(gpu_memory_gib),
      C(driver), C(fabric), C(topology), C(os), C(kernel), C(memory), C(cpu), C(pci), C(shm), C(limits),
      C(time), C(disks), C(ports), C(interpreters), C(tools), C(sysctl), C(xids), C(files), C(packages),
      C(accounts), C(data_disk)."
    - Sizes carry their unit in their names. What the node does not tell is null.
  returned: success
  type: dict
checks:
  description:
    - One entry a rule, with C(id), C(what), C(status), C(found), C(expected), C(remedy), C(source) and
      C(message).
    - The status is C(ok), C(failed), C(warning), C(pending), C(accepted) or C(unknown).
  returned: success
  type: list
  elements: dict
failures:
  description: The messages of the checks that failed.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit import node_facts
from ansible.module_utils.sglang_kit.gpu_stack import read_stack
from ansible.module_utils.sglang_kit.node_needs import needs_of
from ansible.module_utils.sglang_kit.node_packages import read_status
from ansible.module_utils.sglang_kit.node_rules import RuleError, judge
from ansible.module_utils.sglang_kit.releases_facts import VersionError

TOOL_FOLDERS = ("usr/local/cuda/bin",)


def gather(source, params):
    """Return the facts of a node as a dict; `source` is a node_facts.Source."""
    packages = read_status(source.read("var/lib/dpkg/status") or "")
    facts = read_stack(source, packages, params["unit"])
    uuid = params["data_disk"]
    facts.update(
        gpu_kinds=len({gpu["name"] for gpu in facts["gpus"]}),
        os=node_facts.read_os(source),
        kernel=node_facts.read_kernel(source),
        memory=node_facts.read_memory(source),
        cpu=node_facts.read_cpu(source),
        pci=node_facts.read_pci(source),
        shm=node_facts.read_shm(source),
        limits=node_facts.read_limits(source),
        time=node_facts.read_time(source),
        disks=node_facts.read_disks(source, params["disks"]),
        ports=node_facts.read_ports(source, params["ports"]),
        interpreters=node_facts.read_interpreters(source, params["interpreters"]),
        tools=node_facts.read_tools(source, params["tools"], TOOL_FOLDERS),
        sysctl=node_facts.read_sysctl(source, params["sysctl"]),
        # The log of a node without GPUs has nothing to say of them.
        xids=node_facts.read_xids(source) if facts["driver"]["module_version"] else [],
        files=node_facts.read_files(source, params["files"]),
        packages={name: packages[name] for name in params["packages"] if name in packages},
        accounts=node_facts.read_accounts(source, params["user"], params["group"]),
        data_disk=source.block_device(uuid) if uuid else None,
    )
    return facts


def run(params, run_command):
    """Return the module's result; raises RuleError or VersionError with what to do."""
    facts = gather(node_facts.Source(params["root"], run_command), params)
    values = dict(params["values"])
    if params["release"]:
        values["driver"] = needs_of(params["release"])["driver"]
    checks = judge(
        params["rules"], facts, values, params["profile"], params["provisions"], params["accepted"]
    )
    return {
        "changed": False,
        "facts": facts,
        "checks": checks,
        "failures": [check["message"] for check in checks if check["status"] == "failed"],
    }


def main():
    strings = {"type": "list", "elements": "str", "default": []}
    paths = {"type": "list", "elements": "path", "default": []}
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/"},
            "unit": {"type": "str", "default": "sglang.service"},
            "disks": paths,
            "ports": {"type": "list", "elements": "int", "default": []},
            "interpreters": paths,
            "tools": {"type": "list", "elements": "str", "default": ["nvcc", "ninja", "gcc", "g++"]},
            "sysctl": strings,
            "files": paths,
            "packages": strings,
            "user": {"type": "str", "default": "sglang"},
            "group": {"type": "str", "default": "sglang"},
            "data_disk": {"type": "str", "default": ""},
            "release": {"type": "str", "default": ""},
            "rules": {"type": "list", "elements": "dict", "default": []},
            "values": {"type": "dict", "default": {}},
            "profile": {"type": "str", "default": "cpu"},
            "provisions": strings,
            "accepted": strings,
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**run(module.params, module.run_command))
    except (RuleError, VersionError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
