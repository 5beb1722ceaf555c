# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Judge the facts of a node by rules that are data.

A rule has
  id, what      its name, and what it looks at in a few words
  fact          where the fact lies, by dots; `*` stands for every entry of a list or of a dict
  test          one of TESTS
  expected      the value to compare with; or {of: name}, a value of the caller; or {fact: path}, another fact
  severity      `error` or `warning`
  remedy        what to do
  source        where the rule comes from
and may have
  profiles      the profiles that it is for; all without it
  after         ids of rules that explain its failure: it is not judged if one of them failed
  unknown       `fail` if a fact that is not known fails, `skip` (as without it) if it is left out
  part          the part of the provisioning that makes it good
"""

from __future__ import annotations

import re


class RuleError(Exception):
    """A rule is not as it has to be; the message names it."""


def version_numbers(text):
    """Return the numbers of a version as a tuple: `580.159.04` is (580, 159, 4)."""
    return tuple(int(number) for number in re.findall(r"\d+", str(text)))


TESTS = {
    "equals": lambda found, expected: found == expected,
    "at_least": lambda found, expected: found >= expected,
    "at_most": lambda found, expected: found <= expected,
    "version_at_least": lambda found, expected: version_numbers(found) >= version_numbers(expected),
    "version_below": lambda found, expected: version_numbers(found) < version_numbers(expected),
    "one_of": lambda found, expected: found in expected,
    "none_of": lambda found, expected: found not in expected,
    "starts_with": lambda found, expected: str(found).startswith(expected),
    "empty": lambda found, expected: not found,
}
_PHRASES = {
    "equals": "{}",
    "at_least": "at least {}",
    "at_most": "at most {}",
    "version_at_least": "{} or newer",
    "version_below": "below {}",
    "one_of": "one of {}",
    "none_of": "none of {}",
    "starts_with": "{}…",
    "empty": "none",
}


def values_at(facts, path):
    """Return what lies at a path as ``[(labels, value)]``; a missing entry is None.

    labels: tuple of the names that `*` stood for; an entry of a list is named after its number.
    """
    found = [((), facts)]
    for part in path.split("."):
        following = []
        for labels, value in found:
            if part == "*":
                entries = value.items() if isinstance(value, dict) else enumerate(value or [])
                following.extend(((*labels, str(name)), entry) for name, entry in entries)
            else:
                following.append((labels, value.get(part) if isinstance(value, dict) else None))
        found = following
    return found


def _show(value):
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(_show(entry) for entry in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_show(entry)}" for name, entry in value.items())
    return str(value)


def _show_found(found, path):
    """Return values with their labels, equal ones together: `In Progress on GPU 3; ...`."""
    grouped = {}
    for labels, value in found:
        grouped.setdefault(_show(value), []).append(labels)
    kind = "GPU " if path.startswith("gpus.") else ""
    texts = []
    for value, places in grouped.items():
        names = ", ".join(" ".join(labels) for labels in places if labels)
        texts.append(f"{value} on {kind}{names}" if names else value)
    return "; ".join(texts)


def _expected(rule, facts, values):
    """Return the value to compare with, None if it is not known."""
    expected = rule.get("expected")
    if isinstance(expected, dict) and "of" in expected:
        return values.get(expected["of"])
    if isinstance(expected, dict) and "fact" in expected:
        return values_at(facts, expected["fact"])[0][1]
    return expected


def judge_one(rule, facts, values):
    """Judge one rule by itself; returns status (`ok`, `failed`, `unknown`) and texts of found and expected.

    An expectation for each entry, such as the free space of each folder, is a dict with the entries' names.
    """
    test = TESTS.get(rule.get("test"))
    if test is None:
        raise RuleError(
            f"The rule {rule.get('id')} has the test {rule.get('test')}; expected one of {sorted(TESTS)}"
        )
    expected = _expected(rule, facts, values)
    if expected is None and rule["test"] != "empty":
        return "unknown", "", ""
    found = values_at(facts, rule["fact"])
    known = [(labels, value) for labels, value in found if value is not None]
    bad = []
    for labels, value in known:
        wanted = expected.get(labels[-1]) if isinstance(expected, dict) and labels else expected
        if (wanted is not None or rule["test"] == "empty") and not test(value, wanted):
            bad.append((labels, value))
    if rule.get("unknown") == "fail":
        bad += [(labels, value) for labels, value in found if value is None]
        known = found
    phrase = _PHRASES[rule["test"]].format(_show(expected))
    if bad:
        return "failed", _show_found(bad, rule["fact"]), phrase
    if not known and rule["test"] != "empty":
        return "unknown", "", phrase
    return "ok", _show_found(known, rule["fact"]), phrase


def judge(rules, facts, values, profile, provisions=(), accepted=()):
    """Judge a node; returns one dict a rule, in the rules' order, those for other profiles left out.

    values: what the rules compare with, by name. provisions: the parts of the provisioning that are switched
    on. accepted: ids of rules whose failure the caller accepts.
    Each has `id`, `what`, `status`, `found`, `expected`, `remedy`, `source` and `message`; the status is
    `ok`, `failed`, `warning`, `pending` (the provisioning makes it good), `accepted`, or `unknown` (the node
    does not tell, or an earlier failure hides it). Raises RuleError for rules that cannot be used.
    """
    unknown_ids = set(accepted) - {rule["id"] for rule in rules}
    if unknown_ids:
        raise RuleError("There are no rules called {}".format(", ".join(sorted(unknown_ids))))
    checks, hidden = [], set()
    for rule in rules:
        if profile not in rule.get("profiles", [profile]):
            continue
        status, found, expected = judge_one(rule, facts, values)
        if hidden & set(rule.get("after", [])):
            status = "unknown"
            hidden.add(rule["id"])
        elif status == "failed":
            hidden.add(rule["id"])
            if rule.get("part") in provisions:
                status = "pending"
            elif rule["id"] in accepted:
                status = "accepted"
            elif rule["severity"] == "warning":
                status = "warning"
        message = f"{rule['what']}: found {found}, expected {expected}. {rule['remedy']}"
        checks.append(
            {
                "id": rule["id"],
                "what": rule["what"],
                "status": status,
                "found": found,
                "expected": expected,
                "remedy": rule["remedy"],
                "source": rule["source"],
                "message": message if status not in ("ok", "unknown") else "",
            }
        )
    return checks
