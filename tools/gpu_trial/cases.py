# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The starts of the trial: what each is, and what has to come of it."""

from __future__ import annotations

import collections

# name, what: words for the report. checkpoint: of checkpoints.make_all. speculate: with EAGLE-3.
# launcher: by the launcher, or the engine alone. tree: "patched", or "without" the methods.
# port_holder: None, "before" the start, or once it is "loading". end: how a start that serves is ended,
# "stop" or "kill" (a scheduler, by SIGKILL). serves: whether it must. length: acceptance it must measure,
# lowest and highest; None where nothing is speculated. passes: the gate's judgement of it.
# diagnoses: ids of which the first diagnosis of its death must be one.
Case = collections.namedtuple(
    "Case",
    "name what checkpoint speculate launcher tree port_holder end serves length passes diagnoses",
)


def case(name, what, checkpoint, **changed):
    """Return a Case: one that serves with EAGLE-3 by the launcher, unless it says otherwise."""
    usual = {
        "speculate": True,
        "launcher": True,
        "tree": "patched",
        "port_holder": None,
        "end": "stop",
        "serves": True,
        "length": None,
        "passes": None,
        "diagnoses": (),
    }
    return Case(name=name, what=what, checkpoint=checkpoint, **dict(usual, **changed))


def dies(name, what, checkpoint, *diagnoses, **changed):
    """Return a Case that must die with one of these diagnoses."""
    return case(name, what, checkpoint, serves=False, diagnoses=diagnoses, **changed)


# In waves, since cases of one share the machine. What shows most stands in the first.
WAVES = (
    (
        dies(
            "methods_missing",
            "EAGLE-3 without the three methods",
            "cycle",
            "eagle3_methods_missing",
            launcher=False,
            tree="without",
        ),
        case(
            "cycle",
            "EAGLE-3, patched; first draft right; then a scheduler is killed",
            "cycle",
            length=(1.9, 2.1),
            passes=True,
            end="kill",
            diagnoses=("child_killed",),
        ),
        case("echo", "EAGLE-3, patched; every draft right", "echo", length=(3.9, 4.0), passes=True),
        dies("port_taken", "The port is taken before the start", "echo", "port_taken", port_holder="before"),
        dies("truncated_shard", "A weight file of half its length", "truncated", "shard_truncated"),
    ),
    (
        case(
            "random",
            "EAGLE-3, patched; a drafter that is never right",
            "random",
            launcher=False,
            length=(1.0, 1.1),
            passes=False,
        ),
        case("plain", "No speculation", "echo", launcher=False, speculate=False, passes=False),
        dies(
            "drafter_mismatch",
            "A drafter for twice the hidden size",
            "other_drafter",
            "drafter_of_another_model",
        ),
        dies(
            "port_taken_late",
            "The port is taken while the weights load",
            "echo",
            "port_taken",
            launcher=False,
            port_holder="loading",
        ),
    ),
)
