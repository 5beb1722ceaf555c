#!/usr/bin/python
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: audit what EAGLE-3 asks of a target model in a staged SGLang tree."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_contract
short_description: Audit what EAGLE-3 asks of a target model in a staged SGLang tree
description:
  - Reads the sources of an SGLang release, without importing them and without a GPU, and finds every method
    and attribute that the EAGLE-3 path asks of the target model, with file and line, and whether a guard
    protects it.
  - Says for each whether the model class has it, follows hidden states from their capture to the logits, and,
    given both C(config.json), whether the drafter fits the target in this release.
  - Call sites are found by their shape. One whose shape is unknown is reported as not understood, never as
    satisfied.
  - Run it with the engine's own interpreter, so that the grammar is the engine's.
options:
  path:
    description:
      - The engine's virtual environment, a folder that holds the C(sglang) package, or the package itself.
    type: path
    required: true
  class_name:
    description: Class of the target model.
    type: str
    required: true
  file:
    description:
      - File that defines O(class_name), below the package folder.
      - Left out, it is looked for under C(srt/models).
    type: str
  drafter_config:
    description: The drafter's C(config.json). Needs O(target_config).
    type: path
  target_config:
    description: The target's C(config.json). Needs O(drafter_config).
    type: path
  context_length:
    description:
      - Context length, in tokens, that the server will be started with.
      - Left out, it is the target's own.
    type: int
  enforce:
    description:
      - Whether to fail where RV(verdict) is not V(satisfied) or a finding has the severity V(error).
    type: bool
    default: true
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
- name: Audit the staged engine and the drafter that it will load
  sglang_contract:
    path: "{{ sglang_engine_tree }}"
    class_name: KimiK25ForConditionalGeneration
    drafter_config: "{{ model_store_drafter_path }}/config.json"
    target_config: "{{ model_store_target_path }}/config.json"
    context_length: 131072
  vars:
    ansible_python_interpreter: "{{ sglang_engine_python }}"
"""

RETURN = r"""
verdict:
  description: Whether the model class gives what this release asks for.
  returned: unless there is no tree or no such class
  type: str
  choices: [satisfied, missing, not_understood]
version:
  description: Version that the tree's metadata states; null where it has none.
  returned: as RV(verdict)
  type: str
package:
  description: Folder of the package that was read.
  returned: as RV(verdict)
  type: str
model:
  description: File and line of the model class.
  returned: as RV(verdict)
  type: str
satisfied:
  description:
    - What is asked without a guard and is there. Each entry has C(name), C(file), C(line) of the call,
      C(guard), C(why), and C(where), the place of the definition.
  returned: as RV(verdict)
  type: list
  elements: dict
missing:
  description: What is asked without a guard and is not there, as entries like those of RV(satisfied).
  returned: as RV(verdict)
  type: list
  elements: dict
optional:
  description: What is asked behind a guard, there or not, as entries like those of RV(satisfied).
  returned: as RV(verdict)
  type: list
  elements: dict
not_understood:
  description: Places whose shape the audit does not know, as entries like those of RV(satisfied).
  returned: as RV(verdict)
  type: list
  elements: dict
forward_path:
  description: The steps from capture of hidden states to logits, each with C(what), C(ok) and C(where).
  returned: as RV(verdict)
  type: list
  elements: dict
findings:
  description:
    - What was found about the drafter. Each has C(id), C(severity) (error, warning or note), C(what), C(why)
      and C(remedy). Empty where no configuration was given.
  returned: as RV(verdict)
  type: list
  elements: dict
"""

import json
import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit.contract import ContractError, audit, explain
from ansible.module_utils.sglang_kit.contract_drafter import check_drafter


def read_config(path):
    """Return a parsed config.json. Raises ContractError if it cannot be read or is no JSON object."""
    try:
        with open(path, encoding="utf-8") as source:
            config = json.load(source)
    except (OSError, ValueError) as error:
        raise ContractError(f"{path} cannot be read as a model configuration: {error}") from error
    if not isinstance(config, dict):
        raise ContractError(f"{path} holds no JSON object; a model's config.json was expected")
    return config


def run(params):
    """Carry out the audit. Returns the module's result; raises ContractError if there is nothing to audit."""
    if not os.path.isdir(params["path"]):
        raise ContractError("{} is not a folder; stage the engine before auditing it".format(params["path"]))
    report = audit(params["path"], params["class_name"], params["file"])
    findings = []
    if params["drafter_config"]:
        drafter, target = read_config(params["drafter_config"]), read_config(params["target_config"])
        findings = check_drafter(report, drafter, target, params["context_length"])
    names = (
        "verdict",
        "version",
        "package",
        "model",
        "satisfied",
        "missing",
        "optional",
        "not_understood",
        "forward_path",
    )
    return dict({name: report[name] for name in names}, findings=findings, changed=False)


def main():
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "class_name": {"type": "str", "required": True},
            "file": {"type": "str"},
            "drafter_config": {"type": "path"},
            "target_config": {"type": "path"},
            "context_length": {"type": "int"},
            "enforce": {"type": "bool", "default": True},
        },
        required_together=[("drafter_config", "target_config")],
        supports_check_mode=True,
    )
    try:
        result = run(module.params)
    except ContractError as error:
        module.fail_json(msg=str(error))
    problems = explain(result)
    if problems and module.params["enforce"]:
        module.fail_json(msg="\n".join(problems), **result)
    for finding in result["findings"]:
        if finding["severity"] == "warning":
            module.warn("{}: {}. Remedy: {}.".format(finding["what"], finding["why"], finding["remedy"]))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
