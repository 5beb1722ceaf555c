"""Turn the cases of tests/scenarios/data/alerts.yml into a test of promtool's own format."""

import copy

MINUTES = 90


def _series(values, instance):
    return [
        {
            "series": f'{name[:-1]},instance="{instance}"}}'
            if name.endswith("}")
            else f'{name}{{instance="{instance}"}}',
            "values": text,
        }
        for name, text in values.items()
    ]


def _judged(healthy, changed, at, alerts):
    """One test: of all alerts, exactly these fire at that minute."""
    return {
        "interval": "1m",
        "input_series": _series({**healthy, **changed}, "n1"),
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{at}m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(alerts)],
            }
        ],
    }


def promtool_test(cases, rule_file):
    """Return the content of a file for `promtool test rules`.

    cases: {"healthy": {series: values}, "cases": [{"alert", "fires", "silent", "at"}]}, of one node n1.
    """
    healthy = cases["healthy"]
    tests = [_judged(healthy, {}, MINUTES, [])]
    for case in cases["cases"]:
        at = case.get("at", MINUTES)
        tests.append(_judged(healthy, case["fires"], at, [case["alert"]]))
        tests.append(_judged(healthy, case["silent"], at, []))
    return {"rule_files": [rule_file], "evaluation_interval": "1m", "tests": copy.deepcopy(tests)}
