# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Fetch a snapshot with progress: short calls of the module start the fetch and look at it."""

from __future__ import annotations

import pathlib
import time

import ansible.module_utils
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

# Ansible ships the project's module_utils to the nodes, but plugins on the controller do not see them.
PROJECT_UTILS = str(pathlib.Path(__file__).resolve().parents[2] / "module_utils")
if PROJECT_UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(PROJECT_UTILS)

from ansible.module_utils.sglang_kit import snapshot_job

# Seconds that one call may wait for the end, and between two lines.
WAIT_S = 2.0
SHOW_EVERY_S = 10.0
# The connection may come and go while the node fetches; the fetch does not need it.
DEAF_S = 300.0
# A fetch that dies without a word, as often in a row without a new byte, is not begun again.
DEATHS = 3


class ActionModule(ActionBase):
    _supports_check_mode = True
    _supports_async = False
    _requires_connection = True

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        self.task_vars = task_vars
        args = dict(self._task.args)
        if self._task.check_mode or "wait" in args:
            return self.execute(args)
        args["wait"] = WAIT_S
        job, shown_at, deaths, most = None, time.monotonic() - SHOW_EVERY_S, 0, -1
        # The first call says what can be known beforehand: warnings, the commit of a branch, the plan.
        first = None
        while True:
            result = self.outlast(dict(args, job=job) if job else args)
            first = first or result
            if "revision" in result:
                args["revision"] = result["revision"]
            if result.get("lost"):
                deaths += 1
                if deaths == DEATHS:
                    return {"failed": True, "msg": self.died(args)}
                self.say(f"the fetch of {args['repo_id']} has ended without a word; it is begun again")
                job = None
                continue
            if "job" not in result:
                result.setdefault("warnings", []).extend(
                    warning for warning in first.get("warnings", []) if result is not first
                )
                return result
            job, progress = result["job"], result["progress"]
            if progress is None:
                continue
            if progress["bytes_done"] > most:
                most, deaths = progress["bytes_done"], 0
            if time.monotonic() - shown_at >= SHOW_EVERY_S:
                shown_at = time.monotonic()
                self.say(snapshot_job.line(args["repo_id"], progress))

    def outlast(self, args):
        """Call the module; go on after a connection that is lost for a while."""
        since = time.monotonic()
        lost = False
        while True:
            try:
                result = self.execute(args)
                if not result.get("unreachable"):
                    return result
                said = result.get("msg", "unreachable")
            except AnsibleConnectionFailure as error:
                said = str(error)
            if time.monotonic() - since > DEAF_S:
                raise AnsibleConnectionFailure(said)
            if not lost:
                self.say(f"no connection, trying again while the fetch goes on: {said}")
            lost = True
            self._connection.reset()
            time.sleep(WAIT_S)

    def execute(self, args):
        return self._execute_module(module_name="hf_snapshot", module_args=args, task_vars=self.task_vars)

    def died(self, args):
        return (
            f"the process that fetches {args['repo_id']} on the node ended without a word {DEATHS} times, "
            "with no new byte. Something kills it: look for the OOM killer in the kernel's log (journalctl "
            "-k), and for KillUserProcesses=yes in /etc/systemd/logind.conf. What has come is kept."
        )

    def say(self, text):
        Display().display(f"[{self.task_vars['inventory_hostname']}] {text}")
