"""A real Prometheus against the real engine: targets, rules, alerts, the dashboard, a collector, refusals."""

import json
import re
import urllib.parse

import pytest
import yaml
from ansible.module_utils.sglang_kit.releases_facts import version_key

from tests import lab_hosts
from tests.lab_hosts import ROOT, wait_until
from tests.support.alert_cases import promtool_test

ROLE = ROOT / "roles/sglang_monitoring"
CASES = yaml.safe_load((ROOT / "tests/scenarios/data/alerts.yml").read_text(encoding="utf-8"))
METRICS = yaml.safe_load((ROLE / "vars/main/metrics.yml").read_text(encoding="utf-8"))[
    "__sglang_monitoring_metrics"
]
DASHBOARD = json.loads((ROLE / "files/dashboard.json").read_text(encoding="utf-8"))
# Answered only where there are GPUs, or requests that were taken back.
UNANSWERED = re.compile(r"sglang_node_gpu|retracted_requests")
RULES = "/etc/prometheus/sglang.rules.yml"
PASSWORD = "not-secret-in-the-lab"
PASSWORD_HASH = "$2b$05$Y.RGFgoS7Po4Ialetz9Fge4NCxAX/h3Hn7o0KIKYgUC4RoXeCX5FC"
EXTRA = {
    "sglang_monitoring_nodes": ["eyes1"],
    "sglang_monitoring_interval": "5s",
    "sglang_gate_timer": "1h",
    "sglang_edge_enabled": True,
    "sglang_edge_self_signed": True,
    "sglang_edge_clients": [{"name": "eyes", "key": "a-key-of-the-lab-that-is-not-secret"}],
}


@pytest.fixture(scope="module")
def node():
    yield from lab_hosts.host("scenarios", "eyes1", "58")


@pytest.fixture(scope="module")
def collector():
    yield from lab_hosts.host("scenarios", "eyes2", "59")


def api(node, path, **query):
    """Ask Prometheus on the node; returns the data of its answer."""
    url = f"http://127.0.0.1:9090/api/v1/{path}?{urllib.parse.urlencode(query)}"
    answer = json.loads(node.sh(f"curl -sS {json.dumps(url)}").stdout)
    assert answer["status"] == "success", answer
    return answer["data"]


def value(node, expression):
    """The first value that an expression has now, None without one."""
    result = api(node, "query", query=expression)["result"]
    return float(result[0]["value"][1]) if result else None


def firing(node):
    return {
        alert["labels"]["alertname"] for alert in api(node, "alerts")["alerts"] if alert["state"] == "firing"
    }


def put(node, path, text):
    node.sh(f"cat >{path} <<'END-OF-FILE'\n{text}\nEND-OF-FILE")


def test_check_mode_on_an_empty_host(node, play):
    run = play("playbooks/monitoring.yml", "--check", "--diff", extra=EXTRA)
    assert run.rc == 0, run.message
    assert node.sh("ls /etc/prometheus /etc/default/prometheus /usr/bin/prometheus", check=False).stdout == ""
    node.sh("test ! -e /etc/systemd/system/sglang-node.timer")


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"sglang_monitoring_listen": "0.0.0.0:9090"}, "anybody who reaches it could read"),
        (
            {
                "sglang_monitoring_listen": "0.0.0.0:9090",
                "sglang_monitoring_web_config": {"basic_auth_users": {}},
            },
            "Give sglang_monitoring_web_config with tls_server_config",
        ),
    ],
)
def test_an_open_prometheus_is_refused(node, play, extra, message):
    run = play("playbooks/monitoring.yml", extra={**EXTRA, **extra})
    assert run.rc != 0 and message in run.message
    node.sh("test ! -e /etc/prometheus")


def test_somebody_s_prometheus_is_refused(node, play):
    node.sh("mkdir /etc/prometheus; echo 'global: {}' >/etc/prometheus/prometheus.yml")
    run = play("playbooks/monitoring.yml", extra=EXTRA)
    node.sh("rm -r /etc/prometheus")
    assert run.rc != 0 and "was written by somebody else" in run.message
    node.sh("test ! -e /etc/default/prometheus")


def test_a_deploy_watches_its_node(node, play):
    run = play("deploy.yml", extra=EXTRA)
    assert run.rc == 0, run.message
    node.sh("systemctl start sglang-gate.service")
    wanted = {"sglang-engine": "up", "sglang-node": "up", "sglang-edge": "up"}

    def seen():
        targets = api(node, "targets")["activeTargets"]
        return {target["labels"]["job"]: target["health"] for target in targets}

    wait_until(lambda: seen() == wanted, 60, f"{wanted} in {seen()}")
    assert {target["labels"]["instance"] for target in api(node, "targets")["activeTargets"]} == {"eyes1"}
    listening = node.sh("ss -Hltn 'sport >= 9090 and sport <= 9120'").stdout.split("\n")
    assert {line.split()[3] for line in listening if line} == {
        "127.0.0.1:9090",
        "127.0.0.1:9100",
        "127.0.0.1:9115",
    }


def test_watching_again_changes_nothing(play):
    run = play("playbooks/monitoring.yml", extra=EXTRA)
    assert (run.rc, run.changed) == (0, 0), run.stdout


def test_the_engine_exposes_what_the_rules_read(node):
    # The second answers a stream, which alone shows the time between tokens.
    for stream in (False, True, False):
        body = {
            "model": "kimi-k2.5-tiny",
            "messages": [{"role": "user", "content": "Say something."}],
            "max_tokens": 64,
            "stream": stream,
        }
        ask = f"curl -fsS -H @<({lab_hosts.ENGINE_KEY}) --json @- http://127.0.0.1:30000/v1/chat/completions"
        node.sh(f"{ask} <<'BODY'\n{json.dumps(body)}\nBODY")
    version = version_key(node.ask("/server_info")["version"])
    exposed = set(
        re.findall(r"^(sglang:\w+)", node.sh("curl -fsS http://127.0.0.1:30000/metrics").stdout, re.MULTILINE)
    )
    for metric in METRICS:
        known = version_key(metric.get("since", "0.0")) <= version <= version_key(metric.get("until", "99.0"))
        name = metric["name"] + ("_bucket" if metric.get("histogram") else "")
        if not metric.get("rare"):
            assert (name in exposed) == known, metric


def test_every_rule_and_every_panel_has_an_answer(node):
    # Rates need two readings of a series that is there, and the rules that build on each other some rounds.
    wait_until(lambda: value(node, "instance:sglang_accept_length:avg"), 90, "a recorded acceptance length")
    assert value(node, "instance:sglang_accept_length:avg") == pytest.approx(2.0, abs=0.2)
    groups = api(node, "rules")["groups"]
    wait_until(
        lambda: all(
            rule["health"] == "ok" for group in api(node, "rules")["groups"] for rule in group["rules"]
        ),
        60,
        "all rules evaluated",
    )
    recorded = [rule["name"] for group in groups for rule in group["rules"] if rule["type"] == "recording"]
    assert len(recorded) > 10
    queries = recorded + [
        target["expr"].replace("$instance", ".+").replace("$__rate_interval", "5m")
        for panel in DASHBOARD["panels"]
        if panel["type"] != "row" and panel["title"] != "Alerts"
        for target in panel["targets"]
    ]
    silent = [query for query in queries if value(node, query) is None]
    assert [query for query in silent if not UNANSWERED.search(query)] == []
    assert firing(node) == set()


def test_rules_fire_and_stay_silent_as_they_should(node):
    test = promtool_test(CASES, RULES)
    put(node, "/tmp/alerts.test.yml", json.dumps(test))
    done = node.sh(
        f"promtool check rules {RULES} && promtool test rules /tmp/alerts.test.yml", check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_case_that_is_wrong_is_noticed(node):
    wrong = {"healthy": CASES["healthy"], "cases": [dict(CASES["cases"][0], alert="SGLangErrors")]}
    put(node, "/tmp/wrong.test.yml", json.dumps(promtool_test(wrong, RULES)))
    done = node.sh("promtool test rules /tmp/wrong.test.yml", check=False, timeout=120)
    assert done.returncode != 0 and "SGLangServerDown" in done.stdout + done.stderr


def test_a_changed_engine_and_a_dead_one_are_told(node):
    patched = (
        "$(readlink -f /opt/sglang/current/engine)/lib/python3.11/site-packages/sglang/srt/models/kimi_k25.py"
    )
    node.sh(f"cp -a {patched} /run/kept; echo '# changed' >>{patched}; systemctl start sglang-node.service")
    try:
        wait_until(lambda: "SGLangAttestationBroken" in firing(node), 60, "the alert on a changed engine")
        (said,) = [alert["annotations"]["summary"] for alert in api(node, "alerts")["alerts"]]
        assert said.startswith("The engine tree on eyes1 is not what was staged")
        assert "kimi_k25.py has sha256" in node.sh("journalctl -u sglang-node --no-pager -n 20").stdout
    finally:
        node.sh(f"cp -a /run/kept {patched}; systemctl start sglang-node.service")
    node.sh("systemctl stop sglang")
    wait_until(lambda: "SGLangServerDown" in firing(node), 120, "the alert on a server that is down")


def test_a_collector_is_sent_what_its_nodes_see(node, collector, play):
    collector.sh(
        "mkdir -p /etc/lab && cd /etc/lab && openssl req -x509 -newkey rsa:2048 -nodes -days 2 "
        "-subj /CN=eyes2 -keyout key.pem -out cert.pem 2>/dev/null && chmod 644 key.pem"
    )
    web = {
        "tls_server_config": {"cert_file": "/etc/lab/cert.pem", "key_file": "/etc/lab/key.pem"},
        "basic_auth_users": {"node": PASSWORD_HASH},
    }
    collects = {
        **EXTRA,
        "sglang_monitoring_listen": "0.0.0.0:9090",
        "sglang_monitoring_web_config": web,
        "sglang_edge_enabled": False,
    }
    assert play("playbooks/monitoring.yml", "--check", extra=collects, on="eyes2").rc == 0
    run = play("playbooks/monitoring.yml", extra=collects, on="eyes2")
    assert run.rc == 0, run.message
    run = play("playbooks/monitoring.yml", extra=collects, on="eyes2")
    assert (run.rc, run.changed) == (0, 0), run.stdout
    entry = {
        "url": f"https://{collector.sh('hostname -I').stdout.split()[0]}:9090/api/v1/write",
        "basic_auth": {"username": "node", "password": PASSWORD},
        "tls_config": {"insecure_skip_verify": True},
    }
    run = play(
        "playbooks/monitoring.yml", "--diff", extra={**EXTRA, "sglang_monitoring_remote_write": [entry]}
    )
    assert run.rc == 0, run.message
    assert PASSWORD not in run.stdout

    def ask(user, expression):
        query = urllib.parse.quote(expression)
        return collector.sh(
            f"curl -sk -o /tmp/answer -w '%{{http_code}}' -u {user} "
            f"'https://127.0.0.1:9090/api/v1/query?query={query}'; cat /tmp/answer"
        ).stdout

    assert ask("node:wrong", "up").startswith("401")
    mine = 'up{instance="eyes1",job="sglang-node"}'
    wait_until(lambda: '"1"]' in ask(f"node:{PASSWORD}", mine), 120, "what the node saw, on the collector")
    # The node judges its own alerts, and the collector judges them again.
    down = 'ALERTS{alertname="SGLangServerDown",alertstate="firing"}'
    wait_until(lambda: '"1"]' in ask(f"node:{PASSWORD}", down), 120, "the node's alert on the collector")


def test_a_collector_notices_a_node_that_is_gone(collector):
    silent = [{"labels": '{alertname="SGLangNodeSilent"}', "value": 1}]
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": 'up{job="sglang-engine",instance="eyes1"}', "values": "1x10"}],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertname="SGLangNodeSilent"})',
                    "eval_time": f"{at}m",
                    "exp_samples": expected,
                }
                for at, expected in ((9, []), (14, []), (17, silent))
            ],
        }
    ]
    put(collector, "/tmp/silent.test.yml", json.dumps({"rule_files": [RULES], "tests": tests}))
    done = collector.sh("promtool test rules /tmp/silent.test.yml", check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_uninstall_takes_the_eyes_with_it(node, play):
    run = play("playbooks/uninstall.yml", extra={**EXTRA, "uninstall_confirm": True})
    assert run.rc == 0, run.message
    for unit in (
        "prometheus",
        "prometheus-node-exporter",
        "prometheus-blackbox-exporter",
        "sglang-node.timer",
    ):
        assert node.sh(f"systemctl is-active {unit}", check=False).stdout == "inactive\n", unit
    left = "ls /etc/prometheus/prometheus.yml /etc/prometheus/sglang* /usr/local/lib/sglang/monitoring"
    assert node.sh(left, check=False).stdout == ""
    run = play("playbooks/uninstall.yml", extra={**EXTRA, "uninstall_confirm": True})
    assert (run.rc, run.changed) == (0, 0), run.stdout
