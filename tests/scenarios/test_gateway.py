"""The real router before the real engine: who gets in, what stays secret, nodes taken out and put back."""

import http.client
import json
import re
import secrets
import ssl
import threading
import time

import pytest

from tests import lab_hosts
from tests.lab_hosts import wait_until, workers

GATEWAY, NODE = "gate-way1", "gate-node1"
MODEL = "kimi-k2.5-tiny"
URL, SECOND = f"https://{NODE}", f"https://{NODE}:8443"
# Planted, and searched wherever they have no business.
KEYS = {name: f"marked_{name}_" + secrets.token_hex(16) for name in ("worker", "alice")}
VARS = {"lab_worker_key": KEYS["worker"], "lab_alice_key": KEYS["alice"]}


@pytest.fixture(scope="module")
def node():
    yield from lab_hosts.host("scenarios", NODE, "71")


@pytest.fixture(scope="module")
def gateway():
    for made in lab_hosts.host("scenarios", GATEWAY, "72"):
        made.sh(f"echo 10.99.7.71 {NODE} >>/etc/hosts")
        yield made


@pytest.fixture
def route(play):
    """Run a playbook with the keys: route("drain", on=NODE)."""

    def run(name, *options, on=GATEWAY, extra=None):
        path = name if name.endswith(".yml") else f"playbooks/{name}.yml"
        return play(path, *options, extra={**VARS, **(extra or {})}, on=on)

    return run


@pytest.fixture
def ask(gateway):
    """Ask the gateway's edge as a client: ask(method, path, key, body) gives (status, headers, text)."""
    trust = ssl.create_default_context(
        cadata=gateway.sh("cat /etc/nginx/sglang_gateway/certificate.pem").stdout
    )

    class Connection(http.client.HTTPSConnection):
        def connect(self):
            http.client.HTTPConnection.connect(self)
            self.sock = trust.wrap_socket(self.sock, server_hostname=GATEWAY)

    def run(method, path, key=KEYS["alice"], body=None):
        connection = Connection("10.99.7.72", timeout=300, context=trust)
        headers = {"Host": GATEWAY, "Content-Type": "application/json"}
        if key:
            headers["Authorization"] = "Bearer " + key
        try:
            connection.request(method, path, json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode()
        finally:
            connection.close()

    return run


def chat(tokens=4, **more):
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": secrets.token_hex(8)}],
        "max_tokens": tokens,
        "ignore_eos": True,
        **more,
    }


def complete(ask, tokens=4, **more):
    return ask("POST", "/v1/chat/completions", body=chat(tokens, **more))


def started(gateway):
    return gateway.sh("systemctl show -P InvocationID sglang-gateway").stdout.strip()


def test_check_mode_on_an_empty_host_ends_well(gateway, node, route):
    run = route("gateway", "--check", "--diff")
    assert run.rc == 0, run.message
    assert gateway.sh("ls -d /etc/sglang-gateway /opt/sglang-gateway /etc/nginx", check=False).stdout == ""


def test_nodes_that_do_not_know_the_router_are_named(gateway, route):
    run = route("gateway", extra={"sglang_gateway_worker_key": "another_" * 5})
    assert run.rc != 0
    assert f"- {NODE}: none of its sglang_edge_clients has the key" in run.message
    assert gateway.sh("ls -d /etc/sglang-gateway", check=False).stdout == ""


def test_a_node_and_its_router_are_deployed(gateway, node, route):
    run = route("deploy.yml", on=NODE)
    assert run.rc == 0, run.message
    # What any user of the host could see meanwhile: all arguments, and all environments.
    gateway.sh(
        "systemd-run --quiet --unit=watch bash -c 'cd /run; touch watched; while sleep 0.2; do "
        'cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr "\\0" "\\n" | '
        "sort -u - watched >watched.new; mv watched.new watched; done'"
    )
    run = route("gateway", "--diff", "-vvv")
    assert run.rc == 0, run.message
    watched = gateway.sh("systemctl stop watch; cat /run/watched; rm /run/watched*").stdout
    assert "router.py" in watched
    secret = [*KEYS.values(), gateway.sh("cat /etc/sglang-gateway/credentials/control-key").stdout.strip()]
    assert len(secret[-1]) == 64
    for text in (watched, gateway.sh("journalctl --no-pager -o cat --all").stdout):
        assert not any(mark in text for mark in secret)
    # The test hands the keys over as extra variables, which ansible shows with -vvv.
    told = [line for line in run.stdout.splitlines() if "lab_worker_key" not in line]
    assert not any(mark in line for line in told for mark in secret)
    readable = gateway.sh(
        "find /etc /home /opt/sglang-gateway /run /srv /tmp /usr/local /var/log /var/lib/nginx -xdev "
        "-type f -perm /o+r -size -1M "
        f"-exec grep -lF {' '.join('-e ' + mark for mark in secret)} {{}} +",
        check=False,
    ).stdout
    assert readable == ""


def test_second_run_changes_nothing(gateway, route):
    before = started(gateway)
    for options in ([], ["--check"]):
        run = route("gateway", "--diff", *options)
        assert (run.rc, run.changed) == (0, 0), run.stdout[-4000:]
    assert started(gateway) == before


def test_the_unit_is_hardened_and_listens_on_loopback(gateway):
    gateway.sh("systemd-analyze security --threshold=15 sglang-gateway.service")
    listening = gateway.sh("ss -Hltn | awk '{print $4}' | grep -v ':22$' | sort").stdout.split()
    assert listening == ["0.0.0.0:443", "127.0.0.1:29000", "127.0.0.1:30100"]
    metrics = gateway.sh("curl -fsS http://127.0.0.1:29000/metrics").stdout
    # What the alerts ask for, a series for each worker.
    assert re.search(r'^smg_worker_health\{worker="https://[^"]+"\} 1$', metrics, re.MULTILINE), metrics


def test_clients_are_answered_and_nothing_else_is_open(gateway, node, ask):
    status, headers, text = complete(ask)
    assert status == 200 and json.loads(text)["usage"]["completion_tokens"] == 4
    assert "x-smg-routed-worker-id" not in headers
    assert json.loads(ask("GET", "/v1/models")[2])["data"][0]["id"] == MODEL
    for key in (None, KEYS["worker"]):
        assert ask("GET", "/v1/models", key)[0] == 401
    for path in ("/workers", "/get_server_info", "/metrics", "/engine_metrics", "/get_loads", "/readiness"):
        assert ask("GET", path)[0] == 404, path
    status, _headers, text = ask("GET", "/health", None)
    assert (status, json.loads(text)["healthy_workers"]) == (200, 1)
    # On the host itself the router asks for a key too.
    script = "curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:30100/v1/chat/completions --json '{}'"
    assert gateway.sh(script).stdout == "401"


def test_flags_that_the_router_does_not_know_never_reach_it(gateway, route, ask):
    before = started(gateway), gateway.sh("cat /etc/sglang-gateway/arguments.json").stdout
    # The second passes its parser; only its core refuses it.
    for wrong, said in (
        ({"no-such-flag": 1}, "unrecognized arguments: --no-such-flag 1"),
        ({"balance-rel-threshold": 0.1}, "balance_rel_threshold"),
    ):
        run = route("gateway", extra={"sglang_gateway_arguments": wrong})
        assert run.rc != 0 and said in run.stdout, run.stdout[-3000:]
    assert before == (started(gateway), gateway.sh("cat /etc/sglang-gateway/arguments.json").stdout)
    assert complete(ask)[0] == 200


def test_the_last_node_is_never_taken_out(gateway, route):
    run = route("drain", on=NODE)
    assert run.rc != 0
    assert f"{URL} is the last healthy worker; the others: none. Nothing was changed" in run.message
    assert workers(gateway) == {URL: "ready"}


def test_a_drain_lets_go_on_what_runs_and_lasts(gateway, node, route, ask):
    added = route("tests/scenarios/gateway.yml", extra={"url": SECOND, "state": "present"})
    assert added.rc == 0, added.message
    assert workers(gateway) == {URL: "ready", SECOND: "ready"}
    box = []
    streams = [
        threading.Thread(target=lambda: box.append(complete(ask, 400, stream=True))) for _stream in range(4)
    ]
    for stream in streams:
        stream.start()
    wait_until(lambda: "num_running_reqs" in running(node) and requests(node) > 0, 30, "a request that runs")
    run = route("drain", on=NODE)
    assert run.rc == 0, run.message
    # The engine has nothing to do at the end of the drain: what was begun has been answered.
    for stream in streams:
        stream.join(5)
    assert [(status, text.rstrip().endswith("data: [DONE]")) for status, _headers, text in box] == [
        (200, True)
    ] * 4
    assert "stream_error" not in "".join(text for _status, _headers, text in box)
    assert workers(gateway) == {SECOND: "ready"}
    run = route("drain", on=NODE)
    assert (run.rc, run.changed) == (0, 0), run.stdout
    # Neither a router that is started anew, nor its role, brings back what is out on purpose.
    gateway.sh("systemctl restart sglang-gateway")
    wait_until(lambda: workers(gateway) == {SECOND: "ready"}, 30, "the second worker after a restart")
    run = route("gateway", extra={"sglang_gateway_keep_last": False})
    assert run.rc != 0 and "none is wanted, all are out" in run.message
    assert f"Stays out until playbooks/undrain.yml or a deploy puts it back: {URL}" in run.stdout
    # The role has removed the worker that no inventory names: now there is none at all.
    status, headers, text = complete(ask)
    assert (status, json.loads(text)["error"]["code"], headers["Retry-After"]) == (503, "unavailable", "30")
    assert ask("GET", "/health", None)[0] == 503


def running(node):
    return node.sh(
        "curl -fsS http://127.0.0.1:30000/metrics | grep -E '^sglang:num_(running|queue)_reqs'"
    ).stdout


def requests(node):
    return sum(float(line.split()[-1]) for line in running(node).splitlines())


def test_a_drain_that_takes_too_long_says_so_and_touches_nothing(gateway, node, route):
    # Clients that ask the node itself, past any router, go on.
    node.sh(
        "umask 077; sed 's/^/Authorization: Bearer /' /etc/sglang/credentials/engine-key >/run/header\n"
        "systemd-run --quiet --unit=long curl -fsS -H @/run/header "
        f"--json '{json.dumps(chat(1500))}' http://127.0.0.1:30000/v1/chat/completions"
    )
    wait_until(lambda: requests(node) > 0, 30, "a request that runs")
    before = node.invocation()
    run = route("drain", on=NODE, extra={"sglang_gateway_idle_seconds": 4})
    assert run.rc != 0 and "still has 1 requests that run or wait" in run.message
    assert node.invocation() == before
    node.sh("systemctl stop long")


def test_a_node_is_put_back_and_answers(gateway, node, route, ask):
    run = route("undrain", on=NODE)
    assert run.rc == 0, run.message
    assert workers(gateway) == {URL: "ready"}
    assert complete(ask)[0] == 200
    run = route("undrain", on=NODE)
    assert (run.rc, run.changed) == (0, 0), run.stdout


def test_a_node_that_does_not_know_the_key_is_not_taken_for_healthy(gateway, node, route):
    node.sh(
        "cp -a /etc/nginx/sglang/clients.map /run/kept; systemctl reload nginx; "
        "sed -i 's/marked_worker/marked_another/' /etc/nginx/sglang/clients.map; systemctl reload nginx"
    )
    try:
        run = route("undrain", on=NODE)
        assert run.rc != 0 and f"{URL} does not name its model: 401" in run.message
        # Health alone says nothing of it.
        assert workers(gateway) == {URL: "ready"}
        # Registered anew, it is asked for its models, and not taken.
        gateway.sh("systemctl restart sglang-gateway")
        run = route("undrain", on=NODE, extra={"sglang_gateway_worker_seconds": 8})
        assert run.rc != 0 and "compare sglang_gateway_worker_key with sglang_edge_clients" in run.message
    finally:
        node.sh("cp -a /run/kept /etc/nginx/sglang/clients.map; systemctl reload nginx")
    assert route("undrain", on=NODE).rc == 0


def test_a_router_that_dies_comes_back_with_its_workers(gateway, ask):
    before = started(gateway)
    gateway.sh("systemctl kill --signal=KILL sglang-gateway")
    began = time.monotonic()
    wait_until(lambda: complete(ask)[0] == 200, 60, "an answer after the router died")
    assert started(gateway) != before
    print(f"answered {time.monotonic() - began:.1f} s after the router was killed")


def test_a_node_that_is_away_comes_back_by_itself(gateway, node, ask):
    node.sh("systemctl stop nginx")
    wait_until(lambda: "ready" not in workers(gateway).values(), 60, "a worker that is not ready")
    status, _headers, _text = complete(ask)
    assert status == 503
    # The router that starts meanwhile does not know it at all.
    gateway.sh("systemctl restart sglang-gateway")
    assert workers(gateway) == {}
    node.sh("systemctl start nginx")
    wait_until(lambda: complete(ask)[0] == 200, 60, "an answer after the node came back")


def test_a_node_is_drained_while_the_router_is_down(gateway, route):
    gateway.sh("systemctl stop sglang-gateway")
    run = route("drain", on=NODE)
    assert run.rc == 0 and "it will not know" in run.stdout, run.message
    # It says that it is ready after the first look at its list.
    gateway.sh("systemctl start sglang-gateway")
    said = gateway.sh(
        f"journalctl --sync; journalctl --no-pager -o cat _SYSTEMD_INVOCATION_ID={started(gateway)}"
    ).stdout
    assert "adds a worker" not in said
    assert workers(gateway) == {}
    assert route("undrain", on=NODE).rc == 0


def test_uninstall_leaves_nothing(gateway, route):
    for changes in (True, False):
        run = route("uninstall", extra={"uninstall_confirm": True})
        assert (run.rc, run.changed > 0) == (0, changes), run.message
    left = gateway.sh(
        "ls -d /usr/local/lib/sglang-gateway /{etc,opt}/sglang-gateway /etc/nginx/sglang_gateway", check=False
    )
    assert left.stdout == ""
    assert gateway.sh("systemctl is-active sglang-gateway", check=False).stdout == "inactive\n"
