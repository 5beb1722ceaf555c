"""Rules are data: how they are judged, and that those of the role can be used."""

import gpu_nodes
import pytest
import yaml
from ansible.module_utils.sglang_kit.node_needs import needs_of
from ansible.module_utils.sglang_kit.node_rules import TESTS, RuleError, judge, judge_one, values_at

FIELDS = {"id", "what", "fact", "test", "severity", "remedy", "source"}
MORE = {"expected", "profiles", "after", "unknown", "part"}
CASES = yaml.safe_load(
    """
- [equals, 3, 3, ok]
- [equals, 4, 3, failed]
- [at_least, 3, 3, ok]
- [at_least, 2.5, 3, failed]
- [at_most, 3, 3, ok]
- [at_most, 4, 3, failed]
- [version_at_least, 580.159.04, 580, ok]
- [version_at_least, "580.159.04", "580.159.05", failed]
- [version_at_least, "3.9.2", "3.10", failed]
- [version_below, "3.13.5", "3.14", ok]
- [version_below, "3.14.0", "3.14", failed]
- [one_of, b, [a, b], ok]
- [one_of, c, [a, b], failed]
- [none_of, 13, [79, 48], ok]
- [none_of, 79, [79, 48], failed]
- [starts_with, /usr/bin/nvcc, /, ok]
- [starts_with, nvcc, /, failed]
- [empty, [], null, ok]
- [empty, [a], null, failed]
- [equals, null, 3, unknown]
"""
)


def rule(**fields):
    base = {"id": "a", "what": "A", "fact": "a", "test": "equals", "expected": 1, "severity": "error"}
    return {**base, "remedy": "Mend it.", "source": "test", **fields}


@pytest.mark.parametrize(("test", "found", "expected", "status"), CASES)
def test_each_test_both_ways(test, found, expected, status):
    assert judge_one(rule(test=test, expected=expected), {"a": found}, {})[0] == status


def test_a_test_that_is_none_is_refused():
    with pytest.raises(RuleError, match="The rule a has the test is_fine"):
        judge_one(rule(test="is_fine"), {"a": 1}, {})


def test_paths():
    facts = {"gpus": [{"ecc": {"n": 0}}, {"ecc": {"n": 2}}], "disks": {"/a.b": {"free": 1}}, "x": None}
    assert values_at(facts, "gpus.*.ecc.n") == [(("0",), 0), (("1",), 2)]
    assert values_at(facts, "disks.*.free") == [(("/a.b",), 1)]
    assert values_at(facts, "x.y") == [((), None)]
    assert values_at(facts, "nothing.*.y") == []


def test_equal_values_are_told_together():
    facts = {"gpus": [{"n": 1}, {"n": 2}, {"n": 2}, {"n": None}]}
    assert judge_one(rule(fact="gpus.*.n"), facts, {}) == ("failed", "2 on GPU 1, 2", "1")
    assert judge_one(rule(fact="gpus.*.n", unknown="fail"), facts, {}) == (
        "failed",
        "2 on GPU 1, 2; unknown on GPU 3",
        "1",
    )


def test_expectations_of_the_caller_and_of_other_facts():
    assert judge_one(rule(expected={"of": "n"}), {"a": 1}, {"n": 1})[0] == "ok"
    assert judge_one(rule(expected={"of": "n"}), {"a": 1}, {"n": None})[0] == "unknown"
    assert judge_one(rule(expected={"fact": "b.c"}), {"a": 1, "b": {"c": 2}}, {})[0] == "failed"
    free = {"d": {"/a": {"free": 5}, "/b": {"free": 5}}}
    assert judge_one(rule(fact="d.*.free", test="at_least", expected={"of": "n"}), free, {"n": {"/a": 9}})[
        1
    ] == ("5 on /a")


def test_what_a_failure_explains_is_not_judged():
    rules = [rule(), rule(id="b", after=["a"]), rule(id="c", after=["b"]), rule(id="d")]
    assert [check["status"] for check in judge(rules, {"a": 2}, {}, "cpu")] == [
        "failed",
        "unknown",
        "unknown",
        "failed",
    ]


def test_rules_for_other_profiles_are_left_out():
    assert judge([rule(profiles=["sm100"])], {"a": 2}, {}, "cpu") == []


def test_severity_part_and_acceptance():
    rules = [rule(), rule(id="b", severity="warning"), rule(id="c", part="shm")]
    statuses = [check["status"] for check in judge(rules, {"a": 2}, {}, "cpu", ["shm"], ["a"])]
    assert statuses == ["accepted", "warning", "pending"]


def test_the_message_has_all_that_is_needed():
    (check,) = judge([rule()], {"a": 2}, {}, "cpu")
    assert check["message"] == "A: found 2, expected 1. Mend it."


def test_rules_of_the_role_are_complete():
    ids = [entry["id"] for entry in gpu_nodes.RULES]
    assert len(set(ids)) == len(ids)
    for number, entry in enumerate(gpu_nodes.RULES):
        assert set(entry) >= FIELDS and not set(entry) - FIELDS - MORE, entry["id"]
        assert entry["test"] in TESTS and entry["severity"] in ("error", "warning"), entry["id"]
        assert ("expected" in entry) == (entry["test"] != "empty"), entry["id"]
        assert entry["remedy"].endswith("."), entry["id"]
        # What hides a rule is judged before it.
        assert set(entry.get("after", [])) <= set(ids[:number]), entry["id"]


def test_every_rule_about_gpus_and_drivers_is_seen_failing():
    seen = {
        key
        for node in gpu_nodes.NODES.values()
        for key in (*node.get("failed", ()), *node.get("warning", ()))
    }
    judged = {
        entry["id"] for entry in gpu_nodes.RULES if entry["id"].startswith(("gpu.", "driver.", "fabric."))
    }
    assert judged == seen


@pytest.mark.parametrize(
    ("release", "cuda", "driver"),
    [("0.5.9", 12, 570), ("0.5.10.post1", 12, 570), ("0.5.11", 13, 580), ("0.5.23", 13, 580)],
)
def test_driver_that_a_release_needs(release, cuda, driver):
    assert needs_of(release) == {"cuda": cuda, "driver": driver}
