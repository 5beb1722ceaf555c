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
  returned: always
  type: bool
problems:
  description: What was found wrong, one sentence each.
  returned: always
  type: list
health_status:
  description: HTTP status of the health endpoint; null if there was no answer.
  returned: always
  type: int
model:
  description: The served model name.
  returned: always
  type: str
answers:
  description: "One for each prompt: name, prompt, text, thinking, finish_reason, tokens, seconds, problem."
  returned: always
  type: list
acceptance:
  description: >-
    length, tokens, verify_steps, requests, speculated, tokens_per_s; server (the server's own average) and
    remark (if the two are far apart). Null if it was not measured.
  returned: always
  type: dict
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit import acceptance
from ansible.module_utils.sglang_kit.probe_http import Server, served_models


def failure(reply):
    """Say in a line why there is no usable answer (str)."""
    return reply.error or "HTTP {}: {}".format(reply.status, " ".join(reply.text.split())[:200])


def ask_chat(server, prompt, model, sensible):
    """Send one chat request: the answer with its problem, a dict."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt["text"]}],
        "max_tokens": prompt["max_tokens"],
        "temperature": 0,
    }
    began = time.monotonic()
    reply = server.post("/v1/chat/completions", body)
    answer = acceptance.chat_answer(reply.text) if reply.status == 200 else None
    if answer is None:
        problem = "no chat completion, but " + failure(reply)
    else:
        problem = acceptance.judge_answer(prompt, answer, model, sensible)
    return dict(
        answer or {},
        name=prompt["name"],
        prompt=prompt["text"],
        seconds=round(time.monotonic() - began, 2),
        problem=problem,
    )


def measure(server, prompts, native_format, band):
    """Send the prompts to the native endpoint: (the measurement, list of problems)."""
    metas, problems = [], []
    began = time.monotonic()
    for prompt in prompts:
        body = {
            "text": native_format.replace("{prompt}", prompt["text"]),
            "sampling_params": {"temperature": 0, "max_new_tokens": prompt["max_tokens"]},
        }
        reply = server.post("/generate", body)
        meta = acceptance.meta_info(reply.text) if reply.status == 200 else None
        if meta is None:
            problems.append("{}: /generate gave no meta_info, but {}".format(prompt["name"], failure(reply)))
        else:
            metas.append(meta)
    seconds = time.monotonic() - began
    measured = acceptance.acceptance(metas)
    measured["tokens_per_s"] = round(sum(meta.get("completion_tokens") or 0 for meta in metas) / seconds, 1)
    info = server.get("/server_info")
    measured["server"] = acceptance.server_acceptance(info.text) if info.status == 200 else None
    measured["remark"] = acceptance.compare_with_server(measured["length"], measured["server"])
    if metas:
        problem = acceptance.judge_acceptance(measured, band)
        if problem:
            problems.append(problem)
    return measured, problems


def main():
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "default": "http://127.0.0.1:30000"},
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
    result = {
        "changed": False,
        "passed": False,
        "problems": [],
        "health_status": None,
        "model": params["model"],
        "answers": [],
        "acceptance": None,
    }
    if module.check_mode:
        module.exit_json(skipped=True, msg="check mode: the server was not asked", **result)
    if params["band"] and (len(params["band"]) != 2 or params["band"][0] > params["band"][1]):
        module.fail_json(msg="band is {}, expected the lowest and the highest length".format(params["band"]))
    try:
        server = Server(params["url"], params["timeout"])
    except ValueError as error:
        module.fail_json(msg=str(error))

    health = server.get("/health")
    result["health_status"] = health.status
    if health.status != 200:
        said = health.error or f"HTTP {health.status}"
        result["problems"] = [f"the health endpoint does not say 200, but {said}"]
        module.exit_json(**result)
    models = served_models(server.get("/v1/models").text)
    if params["model"] and params["model"] not in models:
        result["problems"] = ["the server serves {}, expected {}".format(models, params["model"])]
        module.exit_json(**result)
    model = params["model"] or (models[0] if models else "")
    answers = [ask_chat(server, prompt, model, params["sensible"]) for prompt in params["prompts"]]
    problems = ["{name}: {problem}".format(**answer) for answer in answers if answer["problem"]]
    measured = None
    if params["band"]:
        measured, found = measure(server, params["prompts"], params["native_format"], params["band"])
        problems += found
    result.update(model=model, answers=answers, acceptance=measured, problems=problems, passed=not problems)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
