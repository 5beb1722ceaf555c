#!/usr/bin/python
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_acceptance
short_description: Prove that a SGLang server answers, and measure its speculation
description:
  - Asks the health endpoint, then sends fixed prompts one after the other as chat requests, and judges the
    answers.
  - Sends the same prompts to the native endpoint and measures the acceptance length, which is the number of
    tokens for each verify step of the target model. A length of about 1 means that speculation is silently
    off.
  - A failed proof is data, not a failed task. See RV(problems).
author: sglang-kit contributors
options:
  url:
    description: Where the server listens, as seen from the node.
    type: str
    default: http://127.0.0.1:30000
  key_file:
    description: File on the node with the engine's own key, which is sent along. Without the file none is.
    type: path
    default: /etc/sglang/credentials/engine-key
  model:
    description: The served model name that is expected. Empty takes the one that the server names.
    type: str
    default: ''
  prompts:
    description: The prompts. At temperature 0.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Name in the report.
        type: str
        required: true
      text:
        description: What the user says.
        type: str
        required: true
      max_tokens:
        description: Longest answer in tokens, thinking included.
        type: int
        default: 256
      expect:
        description: Regular expression that the answer must contain.
        type: str
      language:
        description: Language of the answer. Only what is clearly another one is refused.
        type: str
        choices: [en]
  sensible:
    description: Whether answers must make sense. V(false) takes any text, for checkpoints without training.
    type: bool
    default: true
  native_format:
    description:
      - The chat template for the native endpoint, with C({prompt}) in the place of the prompt.
      - Raw prompts without a template are accepted far less often than chat.
    type: str
    default: "{prompt}"
  band:
    description:
      - Lowest and highest plausible acceptance length.
      - Without it nothing is measured.
    type: list
    elements: float
  timeout:
    description: Seconds to wait for one answer. Above the engine's own health timeout of 20.
    type: int
    default: 120
attributes:
  check_mode:
    description: Changes nothing on the node, but makes the server generate, so it is skipped in check mode.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: Ask one question
  sglang_acceptance:
    prompts:
      - name: capital
        text: What is the capital of France?
        expect: Paris
    band: [1.7, 4.0]
  register: proof
  failed_when: not proof.passed
"""

RETURN = r"""
passed:
  description: Whether nothing was found wrong.
  returned: when it asked
  type: bool
problems:
  description: What was found wrong, one sentence each.
  returned: when it asked
  type: list
health_status:
  description: HTTP status of the health endpoint; null if there was no answer.
  returned: when it asked
  type: int
model:
  description: The served model name.
  returned: when it asked
  type: str
server:
  description: "Version and settings that the server tells. Empty if nothing was measured."
  returned: when it asked
  type: dict
answers:
  description: "One for each prompt: name, prompt, text, thinking, finish_reason, tokens, seconds, problem."
  returned: when it asked
  type: list
acceptance:
  description: >-
    length, tokens, verify_steps, requests, speculated, tokens_per_s; accepted and proposed (draft tokens);
    server (the server's own average over all it served), metrics (its present gauge, where metrics are on)
    and remark (if the average is far from what was measured). Null if it was not measured.
  returned: when it asked
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit import acceptance
from ansible.module_utils.sglang_kit.probe_http import Server, read_key, served_models


def main():
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "default": "http://127.0.0.1:30000"},
            "key_file": {"type": "path", "default": "/etc/sglang/credentials/engine-key"},
            "model": {"type": "str", "default": ""},
            "prompts": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "name": {"type": "str", "required": True},
                    "text": {"type": "str", "required": True},
                    "max_tokens": {"type": "int", "default": 256},
                    "expect": {"type": "str"},
                    "language": {"type": "str", "choices": sorted(acceptance.COMMON_WORDS)},
                },
            },
            "sensible": {"type": "bool", "default": True},
            "native_format": {"type": "str", "default": "{prompt}"},
            "band": {"type": "list", "elements": "float"},
            "timeout": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    params = module.params
    if module.check_mode:
        module.exit_json(changed=False, skipped=True, msg="check mode: the server was not asked")
    if params["band"] and (len(params["band"]) != 2 or params["band"][0] > params["band"][1]):
        module.fail_json(msg="band is {}, expected the lowest and the highest length".format(params["band"]))
    try:
        server = Server(params["url"], params["timeout"], read_key(params["key_file"]))
    except (OSError, ValueError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **acceptance.prove(server, served_models, params))


if __name__ == "__main__":
    main()
