# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Wait for a start of the server: short probes in a row, a line for each step, an end with a cause."""

from __future__ import annotations

import contextlib
import pathlib
import time

import ansible.constants
import ansible.module_utils
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

# Ansible ships the project's module_utils to the nodes, but plugins on the controller do not see them.
PROJECT_UTILS = str(pathlib.Path(__file__).resolve().parents[2] / "module_utils")
if PROJECT_UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(PROJECT_UTILS)

from ansible.module_utils.sglang_kit import diagnoses, gate

# Eight ranks say each their own last words.
DEATH_LINES = 1500
# A line that only the clock changed is not worth printing; progress within a phase is, this often.
SHOW_EVERY_S = 10.0
# While it starts, the node waits by itself for news: what runs there takes from the start that is watched.
WAIT_S = 8.0
# The connection may come and go while a node is busy; longer silence is the caller's to see.
DEAF_S = 120.0
HELLO = {"name": "hello", "text": "Hello", "max_tokens": 8}


ARGUMENTS = {
    "unit": {"type": "str", "default": "sglang.service"},
    "url": {"type": "str", "default": "http://127.0.0.1:30000"},
    "model": {"type": "str", "default": ""},
    "release": {"type": "path", "default": "/opt/sglang/current"},
    "previous": {"type": "str"},
    "answers": {"type": "bool", "default": True},
    "companions": {"type": "list", "elements": "str", "default": []},
    "budget": {"type": "int", "default": 3600},
    "patience": {"type": "dict", "default": {}},
    "poll": {"type": "float", "default": 2.0},
    "diagnoses": {"type": "list", "elements": "dict", "default": []},
}


class ActionModule(ActionBase):
    _supports_check_mode = True
    _supports_async = False
    _requires_connection = True

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        _result, self.args = self.validate_argument_spec(ARGUMENTS)
        self.task_vars = task_vars
        self.host = task_vars["inventory_hostname"]
        self.shown = None
        self.shown_at = float("-inf")
        if self._task.check_mode:
            return self.look_once()
        watch = gate.Watch(self.args["budget"], self.args["patience"], self.args["previous"])
        began = time.monotonic()
        verdict = answer = None
        polls, following = [], {}
        while verdict is None:
            polls = [*polls[-1:], time.time()]
            polled = time.monotonic()
            observation = self.probe(**following)
            self.show(observation)
            starts = observation["unit"]["active_state"] == "activating"
            following = {"seen": observation["unit"], "wait": WAIT_S} if starts else {}
            verdict = watch.judge(observation, time.monotonic()) or self.hear()
            if verdict is not None and verdict.kind == "up" and self.args["answers"]:
                proof = self.execute(
                    "sglang_acceptance",
                    {
                        "url": self.args["url"],
                        "model": self.args["model"],
                        "prompts": [HELLO],
                        "sensible": False,
                    },
                )
                verdict = watch.see_health(proof["health_status"], time.monotonic())
                if proof["health_status"] == 200 and not proof["passed"]:
                    verdict = gate.Verdict("wrong", "it is healthy, but " + "; ".join(proof["problems"]))
                answer = proof["answers"][0] if proof["answers"] else None
            if verdict is None:
                time.sleep(max(0.0, polled + self.args["poll"] - time.monotonic()))
        if verdict.kind != "up":
            self.tell(verdict)
        waited = round(time.monotonic() - began, 1)
        if verdict.kind == "up":
            observation = self.probe(node=True)
        result = {
            "changed": False,
            "verdict": verdict.kind,
            "waited_s": waited,
            # When the last two observations were begun: what the last one saw was not yet so in the other.
            "polled_at": polls,
            "phases": gate.phase_times(observation["start"]["history"], time.time()),
        }
        if verdict.kind == "up":
            said = f"the server is up, after {gate.clock(waited)} of waiting"
            return dict(result, msg=said, answer=answer, observation=observation)
        return dict(result, failed=True, **self.explain(watch, verdict))

    def told(self):
        """Where the hosts of one server tell each other of a bad end: the task is theirs together."""
        return pathlib.Path(ansible.constants.DEFAULT_LOCAL_TMP, f"sglang_ready-{self._task._uuid}")

    def tell(self, verdict):
        """Let the companions of this host know that its start has failed; the first one to fail is heard."""
        if self.args["companions"]:
            with contextlib.suppress(FileExistsError), self.told().open("x", encoding="utf-8") as stream:
                stream.write(f"{self.host}, which is part of the same server, has failed: {verdict.text}")

    def hear(self):
        """Return a Verdict if a companion has failed, or None: this host would be waited for in vain."""
        if self.args["companions"] and self.told().exists():
            text = self.told().read_text(encoding="utf-8")
            if text:
                return gate.Verdict("companion", text)
        return None

    def look_once(self):
        """Check mode: say what there is, wait for nothing."""
        observation = self.probe()
        unit = observation["unit"]
        if unit["exists"]:
            said = "the server is {} ({}); not waited for".format(unit["active_state"], unit["sub_state"])
        else:
            said = "the node has no server yet"
        self.say("check mode: " + said)
        return {"changed": False, "skipped": True, "msg": "check mode: " + said}

    def explain(self, watch, verdict):
        """Describe a bad end: msg, causes and log."""
        observation = self.probe(invocation=watch.invocation, log_lines=DEATH_LINES, node=True)
        unit, start, node = observation["unit"], observation["start"], observation["node"]
        lines = observation.pop("log")
        causes = diagnoses.diagnose(
            self.args["diagnoses"], unit, lines, node["kernel"], start["phase"], verdict.kind
        )
        telling = diagnoses.telling_lines(lines)
        text = [f"{self.args['unit']} on {self.host}: {verdict.text}"]
        if start["phase"] and start["phase"] != "serving":
            text[0] += " while " + start["described"]
        if verdict.kind == "dead":
            text[0] += ": " + gate.how_it_ended(unit)
        for entry in causes:
            text += ["Cause: " + entry["cause"], "Remedy: " + entry["remedy"]]
        if not causes and verdict.kind in ("dead", "stalled"):
            text.append("No known cause fits.")
        seen = gate.seen_on_node(node, dead=verdict.kind == "dead")
        if seen:
            text += ["Seen on the node:"] + ["  " + line for line in seen]
        # What the kernel said stands among what was seen on the node.
        speaks = {entry["line"] for entry in causes} - {None, *telling, *node["kernel"]}
        if speaks:
            text += ["What speaks for the cause:"] + ["  " + line for line in sorted(speaks)]
        if telling:
            text += ["The engine's last telling lines:"] + ["  " + line for line in telling]
        return {"msg": "\n".join(text), "causes": causes, "log": telling, "observation": observation}

    def probe(self, **options):
        """Take one observation; outlast a connection that is lost for a while."""
        arguments = {key: self.args[key] for key in ("unit", "url", "release")}
        arguments.update(options)
        lost = False
        deaf_until = time.monotonic() + DEAF_S
        while True:
            try:
                return self.execute("sglang_probe", arguments)
            except AnsibleConnectionFailure as error:
                if time.monotonic() >= deaf_until:
                    raise
                if not lost:
                    self.say(f"no connection, trying again: {error}")
                lost = True
                self._connection.reset()
                time.sleep(self.args["poll"])

    def execute(self, name, arguments):
        """Run a module on the node and return its result; raise if it fails."""
        result = self._execute_module(module_name=name, module_args=arguments, task_vars=self.task_vars)
        if result.get("unreachable"):
            raise AnsibleConnectionFailure(result.get("msg", "unreachable"))
        if result.get("failed"):
            raise RuntimeError(f"{name}: {result.get('msg', result)}")
        return result

    def show(self, observation):
        """Print a line if the start got on since the last one."""
        start = observation["start"]
        key = (start["phase"], start["part"], observation["unit"]["active_state"])
        step = (key, start["progress"])
        now = time.monotonic()
        if self.shown and (
            step == self.shown or (key == self.shown[0] and now - self.shown_at < SHOW_EVERY_S)
        ):
            return
        self.shown, self.shown_at = step, now
        self.say(gate.progress_line(observation))

    def say(self, text):
        Display().display(f"[{self.host}] {text}")
