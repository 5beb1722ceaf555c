"""Two replicas behind a router, under a steady stream: what a roll, a bad release and a death cost."""

import contextlib
import json
import secrets
import subprocess

import pytest

from tests import lab_hosts
from tests.lab_hosts import ROOT, wait_until, workers

MODEL = "kimi-k2.5-tiny"
KEYS = {"lab_worker_key": secrets.token_hex(16), "lab_client_key": secrets.token_hex(16)}
# A question a second until a file is gone, every other one as a stream; prints what became of each.
LOAD = r"""
import http.client, json, os, ssl, threading, time
trust = ssl.create_default_context(); trust.check_hostname = False; trust.verify_mode = ssl.CERT_NONE
key = open("/run/load/key").read()
lock = threading.Lock()

def ask(number):
    stream = number % 2 == 0
    found = {"number": number, "stream": stream, "at": time.time(), "status": None, "whole": False}
    connection = http.client.HTTPSConnection("127.0.0.1", 443, context=trust, timeout=120)
    try:
        body = {"model": MODEL, "messages": [{"role": "user", "content": f"{number} Hello"}],
                "max_tokens": 24, "ignore_eos": True, "stream": stream}
        headers = {"Host": "way1", "Content-Type": "application/json", "Authorization": "Bearer " + key}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        found["status"] = answer.status
        text = answer.read().decode()
        if answer.status != 200:
            found["error"] = text[:200]
        elif stream:
            events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            parts = [json.loads(event) for event in events if event != "[DONE]"]
            found["error"] = next((str(part["error"]) for part in parts if "error" in part), None)
            ends = [choice["finish_reason"] for part in parts for choice in part.get("choices", [])]
            found["whole"] = events[-1:] == ["[DONE]"] and "length" in ends
        else:
            found["whole"] = json.loads(text)["choices"][0]["finish_reason"] == "length"
    except Exception as error:
        found["error"] = repr(error)
    found["took"] = round(time.time() - found["at"], 2)
    with lock:
        print(json.dumps(found), flush=True)

threads = []
while os.path.exists("/run/load/go"):
    threads.append(threading.Thread(target=ask, args=(len(threads),)))
    threads[-1].start()
    time.sleep(1)
for thread in threads:
    thread.join()
print(json.dumps({"asked": len(threads)}), flush=True)
""".replace("MODEL", repr(MODEL), 1)


@pytest.fixture(scope="module")
def way():
    for node in lab_hosts.host("scenarios", "way1", "81"):
        node.sh("printf '10.99.7.82 roll1\\n10.99.7.83 roll2\\n' >>/etc/hosts")
        yield node


@pytest.fixture(scope="module")
def nodes(way):
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.contextmanager(lab_hosts.host)("scenarios", name, octet))
            for name, octet in (("roll1", "82"), ("roll2", "83"))
        ]


@pytest.fixture
def node(nodes):
    return nodes[0]


@pytest.fixture
def cluster(play):
    """Run a playbook on all three hosts, or on others."""

    def run(playbook, *options, extra=None, on="way1,roll1,roll2"):
        return play(playbook, *options, extra={**KEYS, **(extra or {})}, on=on)

    return run


@contextlib.contextmanager
def load(way):
    """Send requests through the router; yields a list that holds what became of each at the end."""
    way.sh(
        "install -d -m 0700 /run/load; touch /run/load/go; install -m 0600 /dev/stdin /run/load/key <<'KEY'\n"
        + KEYS["lab_client_key"]
        + '\nKEY\nprintf %s "$(cat /run/load/key)" >/run/load/key\n'
        + f"cat >/run/load/load.py <<'PY'\n{LOAD}\nPY\n"
        + "systemd-run --quiet --unit=load --property=StandardOutput=truncate:/run/load/answers "
        + "--property=StandardError=append:/run/load/answers python3 -u /run/load/load.py"
    )
    wait_until(lambda: '"whole": true' in way.sh("cat /run/load/answers").stdout, 60, "a first answer")
    found = []
    try:
        yield found
    finally:
        way.sh("rm /run/load/go")
        wait_until(
            lambda: way.sh("systemctl is-active load", check=False).stdout.strip() != "active",
            180,
            "the last answer",
        )
        lines = [json.loads(line) for line in way.sh("cat /run/load/answers").stdout.splitlines()]
        assert lines[-1] == {"asked": len(lines) - 1}, "every question has come to an end"
        found.extend(lines[:-1])
        longest = max(item["took"] for item in found)
        print(f"{len(found)} requests, {len(lost(found))} lost, longest {longest} s")


def lost(answers):
    return [item for item in answers if not item["whole"]]


def both_ready(way):
    return workers(way) == {"https://roll1": "ready", "https://roll2": "ready"}


def model(node):
    """The checkpoint of the server that answers, not that of a file on disk."""
    info = node.sh(
        'curl -fsS -H "Authorization: Bearer $(cat /etc/sglang/credentials/engine-key)" '
        "http://127.0.0.1:30000/server_info"
    ).stdout
    return json.loads(info)["model_path"].split("/")[4].rpartition("-")[2]


def test_first_deploy_ends_with_both_replicas_behind_the_router(way, nodes, cluster):
    run = cluster("deploy.yml")
    assert run.rc == 0, run.message
    assert both_ready(way)


def test_again_changes_nothing(way, nodes, cluster):
    before = [node.invocation() for node in nodes]
    run = cluster("deploy.yml")
    assert run.rc == 0, run.message
    assert run.changed_by_host == {}
    assert [node.invocation() for node in nodes] == before
    assert both_ready(way)


def test_rolling_upgrade_loses_no_request(way, nodes, cluster):
    with load(way) as answers:
        run = cluster("deploy.yml", extra={"lab_checkpoint": "echo"})
    assert run.rc == 0, run.message
    assert lost(answers) == []
    assert [model(node) for node in nodes] == ["echo", "echo"]
    assert both_ready(way)


def broken_on(name):
    """Variables of an upgrade whose release dies on one node: nothing is left for its KV cache."""
    arguments = "{{ {'mem-fraction-static': 0.0001} if inventory_hostname == '" + name + "' else {} }}"
    return {"lab_checkpoint": "cycle", "sglang_server_arguments": arguments}


def test_second_node_that_fails_comes_back_with_its_old_release_and_the_first_stays_new(way, nodes, cluster):
    old = nodes[1].current()
    with load(way) as answers:
        run = cluster("deploy.yml", extra=broken_on("roll2"))
    assert run.rc != 0
    assert f"roll2 serves {old} again" in run.message
    assert "still out of the routers" not in run.message
    assert lost(answers) == []
    assert [model(node) for node in nodes] == ["cycle", "echo"]
    assert both_ready(way)


def test_first_node_that_fails_ends_the_roll(way, nodes, cluster):
    before = nodes[1].invocation()
    with load(way) as answers:
        run = cluster("deploy.yml", extra={**broken_on("roll1"), "lab_checkpoint": "random"})
    assert run.rc != 0
    assert "The roll ends with roll1. Left as they are: roll2" in run.stdout
    assert lost(answers) == []
    assert [model(node) for node in nodes] == ["cycle", "echo"]
    assert nodes[1].invocation() == before
    assert both_ready(way)


def test_drained_node_gets_no_request_and_the_last_one_is_not_drained(way, nodes, cluster):
    with load(way) as answers:
        run = cluster("playbooks/drain.yml", on="roll1")
        assert run.rc == 0, run.message
        assert workers(way) == {"https://roll2": "ready"}
        run = cluster("playbooks/drain.yml", on="roll2")
        assert run.rc != 0
        assert "https://roll2 is the last healthy worker" in run.message
        assert workers(way) == {"https://roll2": "ready"}
        run = cluster("playbooks/undrain.yml", on="roll1")
        assert run.rc == 0, run.message
    assert lost(answers) == []
    assert both_ready(way)


def test_replica_killed_under_load_costs_at_most_the_streams_that_it_had_begun(way, nodes, cluster):
    with load(way) as answers:
        nodes[1].sh("systemctl kill --kill-whom=all --signal=KILL sglang")
        wait_until(lambda: not both_ready(way), 60, "the router noticing")
        wait_until(lambda: both_ready(way), 180, "the restart")
    cut = lost(answers)
    print(json.dumps(cut, indent=2))
    assert all(item["stream"] and item["status"] == 200 for item in cut), "what had not begun was asked again"
    assert len(cut) <= 4, "the engine answers four at a time"


def test_node_that_is_down_is_named_before_anything_is_switched(way, nodes, cluster):
    before = nodes[0].invocation()
    subprocess.run([str(ROOT / "lab/hosts"), "stop", "roll2"], check=True)
    try:
        run = cluster("deploy.yml", extra={"lab_checkpoint": "echo"})
        assert run.rc != 0
        assert "roll2: not reached, or failed above. No node was switched" in run.message
        assert "--limit 'way1,roll1,roll2,!roll2'" in run.message
        wait_until(lambda: workers(way).get("https://roll2") != "ready", 60, "the router noticing")
        # Without it, nobody is left to stand in for the other.
        run = cluster("deploy.yml", extra={"lab_checkpoint": "echo"}, on="roll1")
        assert run.rc != 0
        assert "https://roll1 is the last healthy worker" in run.message
        assert "roll1 was left as it is" in run.message
        assert nodes[0].invocation() == before
    finally:
        subprocess.run([str(ROOT / "lab/hosts"), "up", "roll2", "83"], check=True)
    wait_until(lambda: both_ready(way), 240, "the server that came back with its host")


# Of an installation the least: one package, into an environment of its own, since the engine's is guarded.
BY_HAND = """
systemctl stop sglang
python3 -m venv /opt/by-hand
/opt/by-hand/bin/pip install --quiet --no-deps sglang==0.5.21
systemctl start sglang
"""


def test_by_hand_without_a_drain_requests_are_lost(way, nodes):
    """The same roll as a shell script would do it: stop, pip install, start. For comparison only."""
    with load(way) as answers:
        for node in nodes:
            node.sh(BY_HAND, timeout=600)
    print("by hand:", json.dumps(lost(answers), indent=2))
    wait_until(lambda: both_ready(way), 60, "both replicas")


def test_rollback_loses_no_request(way, nodes, cluster):
    before = [model(node) for node in nodes]
    with load(way) as answers:
        run = cluster("playbooks/rollback.yml")
    assert run.rc == 0, run.message
    assert lost(answers) == []
    # Each to what it served before.
    assert [model(node) for node in nodes] == list(reversed(before))
    assert both_ready(way)


def test_node_that_is_uninstalled_leaves_the_router_first(way, nodes, cluster):
    with load(way) as answers:
        run = cluster("playbooks/uninstall.yml", extra={"uninstall_confirm": True}, on="roll2")
    assert run.rc == 0, run.message
    assert lost(answers) == []
    assert workers(way) == {"https://roll1": "ready"}
    assert nodes[1].sh("ls -d /opt/sglang /etc/nginx/sglang", check=False).stdout == ""
