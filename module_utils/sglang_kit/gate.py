# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Judge a start from a row of observations: does it get on, is it up, is it dead? No input or output here."""

from __future__ import annotations

from collections import namedtuple

from ansible.module_utils.sglang_kit.startup_log import patience

# A restart that was just asked for can leave the unit inactive for a moment.
GRACE_S = 5.0
# systemd holds it for started, but its health endpoint does not say 200.
UNHEALTHY_S = 120.0

GIB = 1 << 30
# Bytes a second that the whole budget allows for the weights: a quarter of what a plain disk of today reads.
SLOW_LOAD = 256 << 20
# A rate is not worth telling before that.
RATE_AFTER_S = 5.0

# kind: "up", "wrong", "dead", "gone", "stalled", "late", "absent". text: what is so, in a few words.
Verdict = namedtuple("Verdict", ["kind", "text"])


class Watch:
    """Watches one start of the server.

    budget_s: seconds in all beside the weights, which get one for each SLOW_LOAD bytes.
    stall_s: seconds without progress by phase, over patience().
    previous: invocation id of the run that this start replaces, or None.
    """

    def __init__(self, budget_s, stall_s=None, previous=None):
        self.budget_s = budget_s
        self.stall_s = stall_s or {}
        self.previous = previous
        self.invocation = None
        self._restarts = 0
        self._began = None
        self._unhealthy_since = None

    def judge(self, observation, now):
        """Take in one observation at monotonic second `now`: a Verdict, or None to go on waiting."""
        if self._began is None:
            self._began = now
        unit = observation["unit"]
        if not unit["exists"]:
            return Verdict("absent", "the node has no such unit")
        if unit["load_state"] == "masked":
            return Verdict("absent", "the unit is masked")
        ended = self._ended(unit, now)
        if ended:
            return ended
        if self.invocation and unit["active_state"] == "active" and observation["http"]["listening"]:
            return Verdict("up", "the unit is active and the port is open")
        return self._patience(observation, now)

    def see_health(self, status, now):
        """Take in the health endpoint's answer (HTTP status or None): a Verdict, or None to go on waiting."""
        if status == 200:
            return Verdict("up", "the server answers")
        if self._unhealthy_since is None:
            self._unhealthy_since = now
        if now - self._unhealthy_since > UNHEALTHY_S:
            said = "gives no answer" if status is None else f"says {status}"
            text = f"it is started, but its health endpoint {said} for {UNHEALTHY_S:.0f} s"
            return Verdict("stalled", text)
        return None

    def _ended(self, unit, now):
        """Follow the unit's run; return how it came to an end (Verdict), or None."""
        state, invocation = unit["active_state"], unit["invocation"]
        if self.invocation is None:
            return self._find_run(unit, now)
        if unit["sub_state"] == "auto-restart" or unit["restarts"] > self._restarts:
            return Verdict("dead", "it died (systemd starts it again)")
        if state == "failed" or (state == "deactivating" and unit["result"] != "success"):
            return Verdict("dead", "it died")
        if state == "inactive":
            return Verdict("gone", "it was stopped")
        if state != "deactivating" and invocation != self.invocation:
            return Verdict("gone", "it was replaced by another start")
        return None

    def _find_run(self, unit, now):
        """Find the run to watch: not the previous one, nor one that is just ending.

        A run that is over is judged at once if it must be the new one, else when none begins for a moment.
        """
        state, invocation = unit["active_state"], unit["invocation"]
        alive = state in ("activating", "active", "deactivating")
        if state == "deactivating" or (alive and self.previous and invocation == self.previous):
            return None
        if unit["sub_state"] == "auto-restart":
            self.invocation = invocation
            return Verdict("dead", "it died (systemd starts it again)")
        if alive:
            self.invocation, self._restarts = invocation, unit["restarts"]
        elif now - self._began >= GRACE_S or (self.previous and invocation and invocation != self.previous):
            self.invocation = invocation
            if state == "failed":
                return Verdict("dead", "it has failed")
            return Verdict("gone", "it is not running")
        return None

    def _patience(self, observation, now):
        start, weights = observation["start"], observation["weights"]
        largest = max(part["largest_bytes"] for part in weights.values())
        whole = sum(part["bytes"] for part in weights.values())
        limits = patience(largest, 0 if start["leads"] else whole)
        limit = dict(limits, **self.stall_s).get(start["phase"])
        starting = observation["unit"]["active_state"] == "activating" or start["phase"] != "serving"
        if self.invocation and starting and limit is not None and start["progress_age_s"] > limit:
            text = f"no progress for {start['progress_age_s']:.0f} s (allowed: {limit:.0f} s)"
            return Verdict("stalled", text)
        budget = self.budget_s + whole / SLOW_LOAD
        if now - self._began > budget:
            return Verdict("late", f"it is not up after {budget:.0f} s")
        return None


def how_it_ended(unit):
    """Say how the main process ended, in systemd's terms (str)."""
    if unit["result"] not in ("success", "exit-code", "signal", "core-dump"):
        return f"systemd says {unit['result']}"
    if unit["exit_code"] in (2, 3):
        return f"killed by signal {unit['exit_status']}"
    return f"exit status {unit['exit_status']}"


def clock(seconds):
    """Seconds as "3m10s" or "42s"."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def progress_line(observation):
    """The line that is shown for an observation: phase, progress, GiB, time since the start, estimate."""
    unit, start = observation["unit"], observation["start"]
    if unit["active_state"] in ("activating", "active") and unit["sub_state"] != "auto-restart":
        text = start["described"]
    else:
        text = f"the unit is {unit['active_state']} ({unit['sub_state']})"
    bar = start["bar"]
    # Until the newest step forward; what came after it is of the next one.
    seconds = start["phase_s"] - start["progress_age_s"]
    measured = bool(bar and bar["done"]) and seconds >= RATE_AFTER_S
    size = observation["weights"].get(start["part"], {}).get("bytes", 0)
    if bar and start["phase"] == "loading_weights" and size >= GIB:
        done = size * bar["done"] / bar["total"]
        text += f", {done / GIB:.0f} of {size / GIB:.0f} GiB"
        if measured:
            text += f" at {done / seconds / GIB:.2f} GiB/s"
    if unit["age_s"] is not None and unit["main_pid"]:
        text += ", " + clock(unit["age_s"])
    left = seconds * (bar["total"] - bar["done"]) / bar["done"] if measured else bar and bar["remaining_s"]
    if left:
        text += f", about {clock(left)} left"
    return text


def seen_on_node(node, dead):
    """Return what of a node's part of an observation can have to do with a bad end (list of str).

    dead: whether the engine has ended; as long as it lives, the GPUs' memory is its own.
    """
    said = ["kernel: " + line for line in node["kernel"][-5:]]
    for gpu in (node["gpus"] or []) if dead else []:
        for holder in gpu["holders"]:
            said.append(
                "GPU {}: {} MiB held by {name} (pid {pid}, user {user}, {unit})".format(
                    gpu["index"], holder["memory_mib"], **dict(holder, unit=holder["unit"] or "no unit")
                )
            )
    shm = node["shm"]
    if shm and shm["free_bytes"] < shm["total_bytes"] / 10:
        said.append("/dev/shm: {} of {} MiB free".format(shm["free_bytes"] >> 20, shm["total_bytes"] >> 20))
    return said


def phase_times(history, now):
    """Turn a start's history into [{phase, part, at, seconds}] up to serving; `now` ends an open one."""
    times = []
    for step, following in zip(history, [*history[1:], {"at": now}]):
        if step["phase"] == "serving":
            break
        seconds = round(following["at"] - step["at"], 1)
        times.append(dict(step, seconds=seconds))
    return times
