# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The traps that the engine's parser does not know: every rule with what makes it hold and what does not."""

from __future__ import annotations

import pathlib
import string

import pytest
import yaml
from ansible.module_utils.sglang_kit.args_rules import OPERATORS, RULES, apply_rules, facts_of

DATA = yaml.safe_load((pathlib.Path(__file__).parent / "data" / "args" / "rules.yml").read_text())
BASE, CASES = DATA["base"], DATA["cases"]
ATTENTION = [
    "cutedsl_mla",
    "fa3",
    "flashinfer",
    "tokenspeed_mla",
    "torch_native",
    "triton",
    "trtllm_mha",
    "trtllm_mla",
]


def case_id(case):
    return ",".join(case["holds"]) or "none"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_case(case):
    given = dict(BASE, **case)
    values = dict(BASE["values"], **case.get("values", {}))
    facts = facts_of(
        values, ATTENTION, given["profile"], given.get("environment"), given["target"], given["drafter"]
    )
    findings = apply_rules(facts, given["version"])
    assert [finding["id"] for finding in findings] == case["holds"]
    for finding in findings:
        assert set(finding) == {"id", "key", "severity", "found", "expected", "remedy", "source"}
        assert "None" not in finding["found"] and "{" not in finding["found"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["id"])
def test_every_rule_is_tested_and_well_formed(rule):
    assert any(rule["id"] in case["holds"] for case in CASES)
    assert rule["severity"] in ("error", "warning")
    assert all(word in OPERATORS for _fact, word, _operand in rule["when"])
    # A message shows facts that the rule has looked at, or that stand in the configuration for certain.
    shown = {name for _text, name, _spec, _conversion in string.Formatter().parse(rule["found"]) if name}
    asked = {fact for fact, _word, _operand in rule["when"]} | set(BASE["values"]) | {"target-quantization"}
    assert shown <= asked


def test_ids_are_unique():
    assert len({rule["id"] for rule in RULES}) == len(RULES)


def test_nothing_is_known_of_an_empty_configuration():
    assert apply_rules(facts_of({}, []), "0.5.23") == []
