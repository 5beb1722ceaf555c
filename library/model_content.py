#!/usr/bin/python
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: does a model's folder hold what an engine needs to serve it?"""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: model_content
short_description: Say why an engine could not serve the model in a folder
description:
  - Reads the configuration, and says whether architecture and quantisation are those that are expected.
  - Reads the headers of all safetensors files, without the tensors, and holds them against each other and
    against the index. Every tensor must be where the index says, and the tensors of a file must fill it
    without a gap and without an overlap.
  - Looks for the files of the tokenizer and for the Python files that the configuration leads to, and renders
    the chat template with a greeting. That needs Jinja in the interpreter that runs the module, such as the
    engine's.
  - Nothing of the model is run.
options:
  path:
    description: Folder of the model.
    type: path
    required: true
  architecture:
    description: Architecture that C(config.json) must name. Without it, any.
    type: str
  quantizations:
    description:
      - What the checkpoint's quantisation must be one of, such as C(NVFP4); C(none) is one without. An empty
        list accepts any.
    type: list
    elements: str
    default: []
  tokenizer:
    description: Whether the model needs a tokenizer and a chat template of its own. A drafter does not.
    type: bool
    default: true
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
- name: Look whether the model can be served
  model_content:
    path: "{{ model_store_target_path }}"
    architecture: KimiK25ForConditionalGeneration
    quantizations: [NVFP4]
  vars:
    ansible_python_interpreter: "{{ sglang_engine_python }}"
"""

RETURN = r"""
problems:
  description: A sentence for each reason why it could not be served. None if there is none.
  returned: always
  type: list
  elements: str
architecture:
  description: What C(config.json) names.
  returned: always
  type: str
quantization:
  description: What the checkpoint says of its quantisation, or C(none).
  returned: always
  type: str
template:
  description: C(renders), or C(not rendered) where the interpreter has no Jinja.
  returned: always
  type: str
weights:
  description: A dict with the number of tensors and files, and the bytes of all tensors.
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit import model_content, safetensors_headers


def main():
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "architecture": {"type": "str"},
            "quantizations": {"type": "list", "elements": "str", "default": []},
            "tokenizer": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        found, facts = model_content.examine(
            params["path"], params["architecture"], params["quantizations"], params["tokenizer"]
        )
        wrong, weights = safetensors_headers.problems(params["path"])
    except OSError as error:
        module.fail_json(msg=f"{error}. Expected the folder of a model: check path.")
    module.exit_json(changed=False, problems=found + wrong, weights=weights, **facts)


if __name__ == "__main__":
    main()
