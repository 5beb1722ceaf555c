# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin of this name, which does the work on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_ready
short_description: Wait until a start of the SGLang server has come to an end, good or bad
description:
  - Repeats M(sglang_probe), prints a line whenever the start gets on, and ends with the truth.
  - Succeeds when the health endpoint says 200 and the expected model gives real tokens.
  - Fails within O(poll) when the unit has died, restarts in a loop, was stopped or was replaced by another
    start. Names how it ended, the phase, the last telling lines and the known cause with its remedy.
  - Fails when a phase makes no progress for longer than its patience, and when the whole budget is used up.
  - A closed port is no failure, since SGLang listens only after the load. A long load with progress never
    fails before the budget.
  - In check mode it takes one observation and does not wait.
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
  model:
    description: The served model name that is expected. Empty takes any.
    type: str
    default: ''
  release:
    description: Directory of the release, or a link to it, whose weight files decide what time a load gets.
    type: path
    default: /opt/sglang/current
  previous:
    description: systemd's invocation id of the run that this start replaces, if a restart was only queued.
    type: str
  answers:
    description:
      - Whether the host answers requests. Of one server over several hosts only rank 0 does; of the others
        nothing is asked once systemd holds them for started, which is the word of the launcher.
    type: bool
    default: true
  companions:
    description:
      - All hosts that are one server together, this one among them. When the start of one of them has failed,
        the others are not waited for.
    type: list
    elements: str
    default: []
  budget:
    description: Seconds in all, beside one for each 256 MiB of weights.
    type: int
    default: 3600
  patience:
    description:
      - Seconds without progress that a phase is allowed, by phase. Over the built-in ones, of which that of
        loading weights grows with the largest weight file.
    type: dict
    default: {}
  poll:
    description:
      - Seconds between two observations, at least.
      - While systemd says that the unit is starting, the node waits by itself for other news, for up to 8 s.
    type: float
    default: 2
  diagnoses:
    description: Known causes, most specific first. See the role sglang_gate.
    type: list
    elements: dict
    default: []
attributes:
  check_mode:
    description: Changes nothing. In check mode it does not wait.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: Wait for the server
  sglang_ready:
    model: kimi-k2.5
    budget: 3600
"""

RETURN = r"""
verdict:
  description: "C(up), C(wrong) (no tokens), C(dead), C(gone) (stopped), C(stalled), C(late), C(absent) or
    C(companion) (the start of another host of the same server has failed)."
  returned: when it waited
  type: str
waited_s:
  description: Seconds from the first observation to the verdict.
  returned: when it waited
  type: float
phases:
  description: "The phases of the start, up to serving: phase, part, at (seconds since 1970), seconds."
  returned: when it waited
  type: list
observation:
  description: The last observation, as M(sglang_probe) returns it, without the log where there is one below.
  returned: when it waited
  type: dict
answer:
  description: The answer that proved it ready.
  returned: success
  type: dict
causes:
  description: "Known causes that fit, at most two: id, cause, remedy, source, line."
  returned: failure
  type: list
log:
  description: The last telling lines of the engine.
  returned: failure
  type: list
"""
