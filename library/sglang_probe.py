#!/usr/bin/python
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_probe
short_description: Take one observation of the SGLang server
description:
  - Says in what state the server's unit is, in which phase its start is and how far, and what it answers
    over HTTP. It makes the server generate nothing, and returns at once unless it is told to O(wait).
  - A closed port is no sign of failure. SGLang listens only after the weights are loaded.
  - Works where the unit, the port or systemd do not exist; it then says so.
author: sglang-kit contributors
options:
  unit:
    description: Name of the server's systemd unit.
    type: str
    default: sglang.service
  url:
    description: Where the server listens, as seen from the node.
    type: str
    default: http://127.0.0.1:30000
  key_file:
    description: File on the node with the engine's own key, which is sent along. Without the file none is.
    type: path
    default: /etc/sglang/credentials/engine-key
  invocation:
    description:
      - systemd's invocation id of the start to read from the journal.
      - Without it, the unit's present or last one is read. systemd forgets that after a clean stop.
    type: str
  release:
    description: Directory of the release, or a link to it, whose weight files are counted.
    type: path
    default: /opt/sglang/current
  node:
    description:
      - Whether to look at the node as well, which takes some seconds where a GPU is ill.
      - Who holds the GPUs' memory, how full /dev/shm is, and what the kernel has said since the start about
        killed processes, GPUs and disks.
    type: bool
    default: false
  log_lines:
    description: How many of the last lines of this start to return, without progress bars.
    type: int
    default: 0
  seen:
    description:
      - What an earlier observation returned as RV(unit). It waits for as long as systemd says no other.
    type: dict
  wait:
    description:
      - Seconds to wait, at most, before the observation. A node that waits by itself spends a hundredth of a
        processor, and sees the end of a start within half a second.
    type: float
    default: 0
attributes:
  check_mode:
    description: Changes nothing, so it runs in check mode as well.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: Look at the server
  sglang_probe:
  register: server

- name: Say how far it is
  ansible.builtin.debug:
    msg: "{{ server.unit.active_state }}: {{ server.start.described }}"
"""

RETURN = r"""
unit:
  description: What systemd says.
  returned: always
  type: dict
  contains:
    exists: {description: Whether systemd knows a unit of this name., type: bool}
    load_state: {description: "C(loaded), C(not-found), C(masked), or C(unknown) without systemd.", type: str}
    active_state: {description: "C(active), C(activating), C(deactivating), C(inactive) ...", type: str}
    sub_state: {description: "For example C(running), C(start), C(auto-restart).", type: str}
    result: {description: "Of the last run: C(success), C(exit-code), C(signal), C(oom-kill) ...", type: str}
    exit_code: {description: "1 if the main process exited, 2 or 3 if a signal ended it, else 0.", type: int}
    exit_status: {description: Exit status or signal of the main process., type: int}
    restarts: {description: How often systemd started it again by itself., type: int}
    main_pid: {description: Process id of the launcher; 0 if there is none., type: int}
    invocation: {description: Id of the present or last run; empty after a clean stop., type: str}
    status_text: {description: What the launcher told systemd last., type: str}
    enabled: {description: Whether it starts at boot., type: bool}
    needs_reload: {description: Whether the unit file is newer than what systemd has loaded., type: bool}
    age_s: {description: Seconds since the main process was started; null if it never was., type: float}
start:
  description: What the journal says of the start that was read.
  returned: always
  type: dict
  contains:
    phase:
      description:
        - C(starting), C(distributed), C(loading_weights), C(weights_loaded), C(kv_cache), C(autotune),
          C(graph_capture), C(warm_up), C(serving) or C(draining); null if the journal knows of no start.
      type: str
    part: {description: "C(target) or C(drafter), null before any weights.", type: str}
    described: {description: The phase in words with its progress., type: str}
    bar: {description: "Its progress bar: name, percent, done, total, elapsed_s, remaining_s.", type: dict}
    progress: {description: A count that grows with each step forward., type: int}
    progress_age_s: {description: Seconds since the last step forward., type: float}
    phase_s: {description: Seconds since the phase was entered., type: float}
    history: {description: "The phases so far: phase, part, at (seconds since 1970).", type: list}
http:
  description: What the port says.
  returned: always
  type: dict
  contains:
    listening: {description: Whether the port accepts connections., type: bool}
    models_status: {description: "HTTP status of /v1/models; null if it did not answer in time.", type: int}
    models: {description: The served model names., type: list}
weights:
  description: "The release's weight files, for target and drafter: files, bytes, largest_bytes."
  returned: always
  type: dict
node:
  description: What the node says.
  returned: if asked for
  type: dict
  contains:
    gpus:
      description: >-
        index, used_mib, total_mib and holders (pid, name, memory_mib, user, unit) of each GPU; null if
        nvidia-smi is not there or does not answer.
      type: list
    shm: {description: total_bytes and free_bytes of /dev/shm; null if there is none., type: dict}
    kernel_readable: {description: Whether the kernel's log could be read., type: bool}
    kernel: {description: "Its lines since the start about killed processes, GPUs and disks.", type: list}
log:
  description: The last lines of this start.
  returned: always
  type: list
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit import gpu_smi, node_facts, probe
from ansible.module_utils.sglang_kit.probe_http import Server, read_key, served_models
from ansible.module_utils.sglang_kit.startup_log import weights

HTTP_TIMEOUT_S = 0.5
# systemd answers within milliseconds.
LOOK_S = 0.5
# nvidia-smi can hang for ever on a GPU that is gone.
SMI_TIMEOUT_S = 10
# A death and its kernel line are written by different clocks.
KERNEL_MARGIN_S = 5


def observe_unit(module, unit):
    """Return the unit's part of an observation."""
    systemctl = module.get_bin_path("systemctl")
    text = ""
    if systemctl:
        properties = ",".join(probe.UNIT_PROPERTIES)
        _rc, text, _err = module.run_command([systemctl, "show", "--property=" + properties, unit])
    return probe.parse_unit(text, time.clock_gettime(time.CLOCK_MONOTONIC))


def wait_for_unit(module):
    """Return the unit's part of an observation, as soon as it is news or the wait is over."""
    until = time.monotonic() + module.params["wait"]
    while True:
        unit = observe_unit(module, module.params["unit"])
        if probe.is_news(unit, module.params["seen"]) or time.monotonic() >= until:
            return unit
        time.sleep(LOOK_S)


def read_journal(module, invocation):
    """Return the records of one start, the engine's and systemd's own."""
    journalctl = module.get_bin_path("journalctl")
    if not journalctl or not invocation:
        return []
    _rc, text, _err = module.run_command(
        [
            journalctl,
            "--output=json",
            "--output-fields=MESSAGE",
            "--all",
            "--no-pager",
            f"--lines={probe.JOURNAL_LINES}",
            "_SYSTEMD_INVOCATION_ID=" + invocation,
            "+",
            "INVOCATION_ID=" + invocation,
        ]
    )
    return probe.parse_journal(text)


def read_kernel(module, since):
    """Return the kernel's records since then (seconds since 1970), or None if they cannot be read."""
    journalctl = module.get_bin_path("journalctl")
    if not journalctl:
        return None
    rc, text, _err = module.run_command(
        [journalctl, "--dmesg", "--output=json", "--all", "--no-pager", f"--since=@{int(since)}"]
    )
    return None if rc else probe.parse_journal(text)


def observe_gpus(module):
    """Return what is held of the GPUs' memory, or None if nvidia-smi does not say."""
    smi, limit = module.get_bin_path("nvidia-smi"), module.get_bin_path("timeout")
    if not smi or not limit:
        return None
    rc, text, _err = module.run_command([limit, str(SMI_TIMEOUT_S), smi, "-q", "-x"])
    try:
        gpus = [] if rc else gpu_smi.read_xml(text)["gpus"]
    except gpu_smi.SmiError:
        return None
    source = node_facts.Source("/", module.run_command)
    for process in (process for gpu in gpus for process in gpu["processes"]):
        process.update(
            user=node_facts.owner_of(source, process["pid"]), unit=node_facts.unit_of(source, process["pid"])
        )
    return None if rc else probe.gpu_memory(gpus)


def observe_node(module, since):
    """Return the node's part of an observation."""
    shm = None
    if os.path.ismount("/dev/shm"):
        found = os.statvfs("/dev/shm")
        shm = {"total_bytes": found.f_blocks * found.f_frsize, "free_bytes": found.f_bavail * found.f_frsize}
    kernel = read_kernel(module, since)
    return {
        "gpus": observe_gpus(module),
        "shm": shm,
        "kernel_readable": kernel is not None,
        "kernel": probe.kernel_lines(kernel or []),
    }


def observe_http(server):
    """Return the HTTP part of an observation."""
    answer = server.get("/v1/models")
    return {
        "listening": answer.status is not None or answer.error == "timeout",
        "models_status": answer.status,
        "models": served_models(answer.text) if answer.status == 200 else [],
    }


def main():
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "default": "sglang.service"},
            "url": {"type": "str", "default": "http://127.0.0.1:30000"},
            "key_file": {"type": "path", "default": "/etc/sglang/credentials/engine-key"},
            "invocation": {"type": "str"},
            "release": {"type": "path", "default": "/opt/sglang/current"},
            "node": {"type": "bool", "default": False},
            "log_lines": {"type": "int", "default": 0},
            "seen": {"type": "dict"},
            "wait": {"type": "float", "default": 0},
        },
        supports_check_mode=True,
    )
    try:
        server = Server(module.params["url"], HTTP_TIMEOUT_S, read_key(module.params["key_file"]))
    except (OSError, ValueError) as error:
        module.fail_json(msg=str(error))
    unit = wait_for_unit(module)
    records = read_journal(module, module.params["invocation"] or unit["invocation"])
    active = unit["active_state"] == "active" and module.params["invocation"] in (None, unit["invocation"])
    now = time.time()
    result = {
        "changed": False,
        "unit": unit,
        "start": probe.read_start(records, now, active),
        "http": observe_http(server),
        "weights": {
            part: weights(os.path.join(module.params["release"], folder))
            for part, folder in (("target", "model"), ("drafter", "drafter"))
        },
        "log": probe.tail(records, module.params["log_lines"]),
    }
    if module.params["node"]:
        began = records[0][0] if records else now - (unit["age_s"] or 0)
        result["node"] = observe_node(module, began - KERNEL_MARGIN_S)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
