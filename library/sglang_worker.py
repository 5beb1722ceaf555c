#!/usr/bin/python
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_worker
short_description: Add a worker to a router of SGLang servers, hold it out, or remove it
description:
  - Runs on the router's host, for one worker. It asks the router for its workers, decides, and waits until
    what was wanted is true. Added is a worker that the router calls ready; removed is one that the router
    does not list any more.
  - Requests that run through a removed worker go on to their end. The router does not count them any longer,
    so ask the engine itself.
  - The last healthy worker is not removed.
  - Written for C(smg) 1.13, the SGLang Model Gateway.
author: sglang-kit contributors
options:
  url:
    description: Address of the worker, as the router reaches it.
    type: str
    required: true
  state:
    description:
      - V(present) registers the worker.
      - V(held) removes it, and notes in O(remember) that it is out on purpose.
      - V(absent) removes it, and forgets it.
    type: str
    choices: [present, held, absent]
    default: present
  router:
    description: Address of the router.
    type: str
    default: http://127.0.0.1:30100
  key_file:
    description: File on the host with the router's control key.
    type: path
    required: true
  worker_key_file:
    description: File on the host with the key that the worker asks for. The router's own clients need it too.
    type: path
  ca_file:
    description: >-
      File on the host with certificates that may vouch for the worker, in PEM format, beside the system's.
    type: path
  remember:
    description: >-
      File on the host with the list of workers, which the router's launcher keeps the router to. The list is
      written before the router is told. Without it, the router forgets the worker when it is restarted.
    type: path
  keep_last:
    description: Whether to refuse to remove the last healthy worker.
    type: bool
    default: true
  wait:
    description: Seconds until the worker must be ready, or gone. 0 does not wait.
    type: int
    default: 60
  prove:
    description:
      - Also ask for an answer, since health alone does not show a key that the worker refuses.
      - First the worker itself is asked, with O(worker_key_file), then the router, until an answer comes from
        this worker.
    type: bool
    default: false
attributes:
  check_mode:
    description: Asks the router, decides and refuses as it would. Nothing is proved.
    support: full
  diff_mode:
    description: Shows the list of workers, before and after.
    support: full
notes:
  - A router that is not running cannot be asked. A worker is then only taken from the list in O(remember), so
    that the router does not know it when it starts.
"""

EXAMPLES = r"""
- name: Take this node out of the router
  sglang_worker:
    url: https://node1.example.net
    state: held
    key_file: /etc/sglang-gateway/credentials/control-key
    remember: /etc/sglang-gateway/workers.json
  delegate_to: gateway1.example.net

- name: Put it back, and see it answer
  sglang_worker:
    url: https://node1.example.net
    key_file: /etc/sglang-gateway/credentials/control-key
    worker_key_file: /etc/sglang-gateway/credentials/worker-key
    ca_file: /etc/sglang-gateway/ca.pem
    remember: /etc/sglang-gateway/workers.json
    prove: true
  delegate_to: gateway1.example.net
"""

RETURN = r"""
workers:
  description: >-
    The router's workers at the end, with C(url), C(id), C(status), C(healthy), and C(load), the requests in
    flight.
  returned: when the router answers
  type: list
  elements: dict
ready:
  description: Whether the router sends requests to this worker.
  returned: success
  type: bool
held:
  description: The workers that are out on purpose.
  returned: success
  type: list
  elements: str
waited:
  description: Seconds until what was wanted was true.
  returned: success
  type: float
timed_out:
  description: Whether O(wait) was over before.
  returned: when it was
  type: bool
asked:
  description: Questions to the router until this worker answered.
  returned: with O(prove)
  type: int
"""

import contextlib
import fcntl
import json
import os
import tempfile
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit import gateway, gateway_http, probe_http

POLL_S = 0.5
# A model may have a long queue before it.
ANSWER_S = 300
QUESTIONS = 60


def read(path):
    """Return the text of a file, or None if there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def write(path, text):
    """Write a file at once. Everybody may read it: the launcher does, under a user of its own."""
    descriptor, part = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".")
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        os.fchmod(descriptor, 0o644)
        stream.write(text)
    os.replace(part, path)


@contextlib.contextmanager
def alone(path):
    """Decide one after the other: two nodes that leave at once must not both count on each other."""
    if path is None or not os.path.isdir(os.path.dirname(path)):
        yield
        return
    with open(path + ".lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Task:
    """One run of the module."""

    def __init__(self, module):
        self.module = module
        params = module.params
        self.state = params["state"]
        self.remember = params["remember"]
        try:
            self.url = gateway.normal_url(params["url"])
            self.router_url = gateway.normal_url(params["router"])
        except ValueError as error:
            module.fail_json(msg=str(error))
        self.worker_key = self._key(params["worker_key_file"])
        self.router = gateway_http.Router(self.router_url, self._key(params["key_file"]), self.worker_key)
        self.added = -gateway.PENDING_S
        self.result = {"changed": False, "ready": False, "held": [], "waited": 0.0}

    def _key(self, path):
        if path is None:
            return None
        try:
            key = probe_http.read_key(path)
        except (OSError, UnicodeDecodeError) as error:
            self.module.fail_json(msg=f"the key cannot be read from {path}: {error}")
        if key is None and not self.module.check_mode:
            self.module.fail_json(msg=f"there is no key in {path}, where the role sglang_gateway puts it")
        return key

    def fail(self, message):
        self.module.fail_json(msg=message, **self.result)

    def workers(self):
        """Return the router's workers; None where no router listens. Fails on any other answer."""
        answer = self.router.workers()
        if answer.error == gateway_http.REFUSED:
            return None
        if answer.status in (401, 403):
            self.fail(
                f"router {self.router_url} does not take the key of {self.module.params['key_file']} "
                f"({answer.status}). A router that was started with another key has to be restarted"
            )
        if answer.status != 200:
            self.fail(
                f"router {self.router_url} does not tell its workers: {gateway_http.in_words(answer)}. "
                "See on its host: journalctl -u sglang-gateway"
            )
        try:
            found = gateway.read_workers(answer.text)
        except ValueError as error:
            self.fail(f"router {self.router_url}: {error}")
        self.result["workers"] = [worker._asdict() for worker in found]
        self.result["ready"] = gateway.is_ready(gateway.find(found, self.url))
        return found

    def kept(self):
        """Return the kept list, and whether there is a place for it."""
        if self.remember is None:
            return gateway.parse_kept(None), False
        try:
            return gateway.parse_kept(read(self.remember)), os.path.isdir(os.path.dirname(self.remember))
        except ValueError as error:
            self.fail(f"{self.remember} is no list of workers: {error}")

    def run(self):
        wanted = self.state == "present"
        with contextlib.ExitStack() as stack:
            if not self.module.check_mode:
                stack.enter_context(alone(self.remember))
            before, has_place = self.kept()
            found = self.workers()
            action = gateway.decide(found or [], self.url, self.state)
            if found is None and wanted and not self.module.check_mode:
                self.fail(
                    f"no router listens at {self.router_url}, so {self.url} was not added. "
                    "Start it on its host: systemctl start sglang-gateway"
                )
            refusal = gateway.refusal(found or [], self.url)
            if action == "remove" and refusal and self.module.params["keep_last"]:
                self.fail(
                    f"router {self.router_url}: {refusal}. Nothing was changed. "
                    "Put another worker back first, or say that clients may be refused (keep_last: false)"
                )
            after = gateway.keep(before, self.url, self.state) if self.remember else before
            remembered = has_place and after != before
            self.result.update(
                changed=remembered or action is not None,
                held=after["out"],
                diff={"before": self.shown(before, found), "after": self.shown(after, found, action)},
            )
            if self.module.check_mode:
                return
            if remembered:
                write(self.remember, gateway.write_kept(after))
            if found is None:
                self.module.warn(
                    f"no router listens at {self.router_url}; it will not know {self.url} when it starts"
                )
                return
            if action is not None:
                self.act(action, found)
        if self.module.params["wait"] > 0:
            self.wait(wanted)
            if wanted and self.module.params["prove"]:
                self.prove()

    def shown(self, kept, found, action=None):
        urls = {worker.url for worker in found or [] if worker.status != "draining"}
        urls = urls | {self.url} if action == "add" else urls - {self.url} if action == "remove" else urls
        return json.dumps({"workers": sorted(urls), "held": kept["out"]}, indent=2) + "\n"

    def act(self, action, found):
        self.result["changed"] = True
        if action == "add":
            self.added = time.monotonic()
            answer, taken = self.router.add(self.url), (202, 409)
        else:
            answer, taken = self.router.remove(gateway.find(found, self.url).id), (202, 404)
        if answer.status not in taken:
            self.fail(
                f"router {self.router_url} refuses to {action} {self.url}: {gateway_http.in_words(answer)}"
            )

    def wait(self, wanted):
        began = time.monotonic()
        limit = began + self.module.params["wait"]
        while True:
            found = self.workers()
            if found is None:
                self.fail(
                    f"router {self.router_url} ended meanwhile. See on its host: journalctl -u sglang-gateway"
                )
            worker = gateway.find(found, self.url)
            self.result["waited"] = round(time.monotonic() - began, 1)
            if gateway.is_ready(worker) if wanted else worker is None:
                return
            if time.monotonic() > limit:
                self.result["timed_out"] = True
                self.fail(self.why_not(wanted, worker))
            if wanted and worker is None and time.monotonic() - self.added > gateway.PENDING_S:
                self.act("add", found)
            time.sleep(POLL_S)

    def why_not(self, wanted, worker):
        seconds = self.module.params["wait"]
        status = worker.status if worker else "not listed"
        if not wanted:
            return f"router {self.router_url} still lists {self.url} after {seconds} s ({status})"
        health, models = self.ask("GET", "/health"), self.ask("GET", "/v1/models")
        said = f"/health: {gateway_http.in_words(health)}; /v1/models: {gateway_http.in_words(models)}"
        if models.status in (401, 403):
            said += (
                ". The worker does not know the router's key: "
                "compare sglang_gateway_worker_key with sglang_edge_clients"
            )
        return (
            f"router {self.router_url} does not take {self.url} after {seconds} s ({status}). "
            f"Asked from here: {said}"
        )

    def ask(self, method, path, body=None, timeout_s=10):
        return gateway_http.ask(
            method, self.url + path, self.worker_key, body, self.module.params["ca_file"], timeout_s
        )

    def prove(self):
        """Fail unless the worker answers itself, and then through the router."""
        answer = self.ask("GET", "/v1/models")
        models = probe_http.served_models(answer.text) if answer.status == 200 else []
        if not models:
            self.fail(f"{self.url} does not name its model: {gateway_http.in_words(answer)}")
        answer = self.ask("POST", "/v1/chat/completions", gateway.question(models[0], 0), ANSWER_S)
        if answer.status != 200:
            self.fail(f"{self.url} does not answer the router's key: {gateway_http.in_words(answer)}")
        for number in range(1, QUESTIONS + 1):
            answer = gateway_http.ask(
                "POST",
                self.router_url + "/v1/chat/completions",
                self.worker_key,
                gateway.question(models[0], number),
                timeout_s=ANSWER_S,
            )
            self.result["asked"] = number
            if answer.status != 200:
                self.fail(f"router {self.router_url} does not answer a chat: {gateway_http.in_words(answer)}")
            if gateway.is_same(answer.headers.get(gateway.ROUTED_TO), self.url):
                return
        self.fail(
            f"{self.url} answers, but not one of {QUESTIONS} questions to router {self.router_url} went there"
        )


def main():
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "state": {"type": "str", "default": "present", "choices": ["present", "held", "absent"]},
            "router": {"type": "str", "default": "http://127.0.0.1:30100"},
            "key_file": {"type": "path", "required": True, "no_log": False},
            "worker_key_file": {"type": "path", "no_log": False},
            "ca_file": {"type": "path"},
            "remember": {"type": "path"},
            "keep_last": {"type": "bool", "default": True},
            "wait": {"type": "int", "default": 60},
            "prove": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    task = Task(module)
    task.run()
    module.exit_json(**task.result)


if __name__ == "__main__":
    main()
