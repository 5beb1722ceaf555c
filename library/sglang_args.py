#!/usr/bin/python
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: put a server's configuration through its engine's own parser."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_args
short_description: Put a server's configuration through its engine's own parser
description:
  - Asks the parser of a staged SGLang release, and its reader of the YAML file, what they make of a
    configuration. Nothing is loaded, no GPU is used, and nothing is written into the engine's tree.
  - Reports all faults at once, each key on its own and then the whole, so that a renamed option is found,
    with its successor, while the old server still serves.
  - Judges what the parser lets pass against rules about the profile, the target and the drafter.
options:
  python:
    description: The engine's interpreter.
    type: path
    required: true
  content:
    description: Text of the configuration, in the YAML form that the engine's option C(--config) reads.
    type: str
  config:
    description: File with the configuration, in place of O(content).
    type: path
  environment:
    description: Environment that the engine will run in.
    type: dict
    default: {}
  named:
    description:
      - Options that variables of their own set, without dashes, and the names of these variables.
      - Another spelling of one of them is an error.
    type: dict
    default: {}
  profile:
    description: What the node is. Left out, no rule about hardware applies.
    type: str
    choices: [sm100, sm103, sm120, cpu]
  target_config:
    description: The target's C(config.json). Left out, no rule about it applies.
    type: path
  drafter_config:
    description: The drafter's C(config.json). Left out, no rule about it applies.
    type: path
  timeout:
    description: Longest time that the parser gets to answer, in seconds. Most of it goes into imports.
    type: int
    default: 300
notes:
  - In check mode an engine or a model that is not there yet is no error, as it would be staged first.
attributes:
  check_mode:
    support: full
    description: Reads only; check mode makes no difference but the one in the notes.
  diff_mode:
    support: none
    description: Changes nothing, so there is no difference to show.
author:
  - The sglang-kit contributors
"""

EXAMPLES = r"""
- name: Ask the staged engine whether it accepts the configuration
  sglang_args:
    python: "{{ sglang_engine_python }}"
    content: "{{ lookup('ansible.builtin.template', 'server.yaml.j2') }}"
    profile: sm100
    target_config: "{{ model_store_target_path }}/config.json"
    drafter_config: "{{ model_store_drafter_path }}/config.json"
    named:
      tp-size: sglang_server_tp_size
"""

RETURN = r"""
verdict:
  description: Whether the engine would start from it, as far as this can be known. V(not_staged) is for check
    mode only.
  returned: always, unless the parser cannot be asked
  type: str
  choices: [accepted, refused, not_staged]
version:
  description: The release that was asked.
  returned: when an engine was asked
  type: str
findings:
  description:
    - Every finding, with C(id), C(key) (empty where it is about the whole), C(severity) (error or warning),
      C(found), C(expected), C(remedy) and C(source) (V(parser), or where the knowledge comes from).
  returned: when an engine was asked
  type: list
  elements: dict
effective:
  description: The values that the configured options have after parsing, by the engine's own names for them;
    secrets are hidden.
  returned: when an engine was asked
  type: dict
unread:
  description: Files named in the parameters that are not there yet, in check mode.
  returned: when an engine was asked
  type: list
  elements: str
"""

import json
import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit.args import ArgsError, ask, effective, explain, judge, muddled
from ansible.module_utils.sglang_kit.args_rules import apply_rules, facts_of


def read_file(path):
    """Return the text of a file; ArgsError if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as source:
            return source.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgsError(f"{path} cannot be read: {error}") from error


def read_model(path):
    """Return a model's config.json, with its quantisation also where it lies in a file of its own."""
    config = _read_json(path)
    beside = os.path.join(os.path.dirname(path), "hf_quant_config.json")
    if "quantization_config" not in config and os.path.isfile(beside):
        config["quantization_config"] = _read_json(beside).get("quantization")
    return config


def _read_json(path):
    try:
        config = json.loads(read_file(path))
    except ValueError as error:
        raise ArgsError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ArgsError(f"{path} holds no JSON object")
    return config


def run(params, check_mode):
    """Carry out the examination. Returns the module's result; raises ArgsError if it cannot be made."""
    if check_mode and not os.path.exists(params["python"]):
        return {"verdict": "not_staged", "changed": False}
    models, unread = {}, []
    for name in ("target_config", "drafter_config"):
        path = params[name]
        if check_mode and path and not os.path.exists(path):
            unread.append(path)
            path = None
        models[name] = read_model(path) if path else None
    content = params["content"] if params["content"] is not None else read_file(params["config"])
    answer = ask(params["python"], content, sorted(params["named"]), params["environment"], params["timeout"])
    facts = facts_of(
        answer["values"],
        answer["attention"],
        params["profile"],
        params["environment"],
        models["target_config"],
        models["drafter_config"],
    )
    findings = judge(answer, params["named"])
    doubtful = muddled(answer, findings)
    findings += [f for f in apply_rules(facts, answer["version"]) if f["key"] not in doubtful]
    refused = any(finding["severity"] == "error" for finding in findings)
    return {
        "verdict": "refused" if refused else "accepted",
        "version": answer["version"],
        "findings": findings,
        "effective": effective(answer),
        "unread": unread,
        "changed": False,
    }


def main():
    module = AnsibleModule(
        argument_spec={
            "python": {"type": "path", "required": True},
            # It should hold no secret; where it does, the report must not spread it.
            "content": {"type": "str", "no_log": True},
            "config": {"type": "path"},
            "environment": {"type": "dict", "default": {}},
            "named": {"type": "dict", "default": {}},
            "profile": {"type": "str", "choices": ["sm100", "sm103", "sm120", "cpu"]},
            "target_config": {"type": "path"},
            "drafter_config": {"type": "path"},
            "timeout": {"type": "int", "default": 300},
        },
        required_one_of=[("content", "config")],
        mutually_exclusive=[("content", "config")],
        supports_check_mode=True,
    )
    try:
        result = run(module.params, module.check_mode)
    except ArgsError as error:
        module.fail_json(msg=str(error))
    for line in explain(result.get("findings", []), "warning"):
        module.warn(line)
    if result["verdict"] == "refused":
        heading = f"SGLang {result['version']} would not serve with this configuration:"
        module.fail_json(
            msg="\n- ".join([heading, *explain(result["findings"], "error")]),
            **result,
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
