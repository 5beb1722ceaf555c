"""One model over two hosts: the real engine with half of the tiny model on each, and what its failures do."""

import time

import pytest
import yaml

from tests import lab_hosts
from tests.lab_hosts import ROOT, wait_until

KILL_RANKS = "pkill -KILL -u sglang -f '^sglang::scheduler'"


@pytest.fixture(scope="module")
def node():
    """Rank 0, which answers clients."""
    yield from lab_hosts.host("scenarios", "group1", "88")


@pytest.fixture(scope="module")
def other():
    yield from lab_hosts.host("scenarios", "group2", "89")


@pytest.fixture
def deploy(node, other, play):
    """Run a playbook on both hosts."""

    def run(playbook="deploy.yml", *options, on="twins", **extra):
        return play(playbook, *options, on=on, extra=extra)

    return run


def state(host):
    return host.sh("systemctl show -P ActiveState sglang").stdout.strip()


def healthy(host):
    return host.sh("curl -fs --max-time 5 http://127.0.0.1:30000/health", check=False).returncode == 0


def tokens(node):
    """Ask for an answer; returns how many tokens it has."""
    answer = node.ask(
        "/v1/chat/completions",
        {
            "model": "kimi-k2.5-tiny",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 16,
        },
    )
    return answer["usage"]["completion_tokens"]


def changed(run):
    return [
        (event["event_data"]["task"], event["event_data"]["host"])
        for event in run.events
        if event["event"] == "runner_on_ok" and event["event_data"]["res"].get("changed")
    ]


def messages(run):
    return "\n".join(str(failure.get("msg", "")) for failure in run.failures)


def test_one_host_of_the_group_alone_is_refused(node, deploy):
    run = deploy(on="group1")
    assert run.rc != 0
    assert "group2: left out by --limit" in messages(run)
    assert "--limit twins" in messages(run)
    assert node.sh("test -e /opt/sglang", check=False).returncode != 0


def test_a_check_of_two_empty_hosts_passes(deploy):
    run = deploy("deploy.yml", "--check")
    assert run.rc == 0, messages(run)


def test_two_hosts_serve_one_model(node, other, deploy):
    run = deploy()
    assert run.rc == 0, messages(run)
    assert tokens(node) == 16
    info = node.ask("/server_info")
    assert (info["tp_size"], info["nnodes"], info["node_rank"]) == (2, 2, 0)
    assert node.current() == other.current()
    for rank, host in enumerate((node, other)):
        ranks = host.sh("pgrep -u sglang -fa '^sglang::scheduler'").stdout
        assert f"TP{rank}" in ranks and f"TP{1 - rank}" not in ranks
    assert '"passed": true' in node.sh(f"cat {node.current()}/gate.json").stdout


# What becomes of a connection that begins in the unit's own control group.
CONNECT = """
group=$(systemctl show -P ControlGroup sglang)
for root in /sys/fs/cgroup/unified /sys/fs/cgroup; do
  [ -e $root$group/cgroup.procs ] && echo $$ >$root$group/cgroup.procs && break
done
exec python3 - <<'PY'
import errno, socket
try:
    socket.create_connection(({host!r}, {port}), 3).close()
    print("connected")
except OSError as error:
    print(errno.errorcode.get(error.errno, "no answer"))
PY
"""


def test_the_unit_reaches_the_other_host_and_nobody_else(node):
    def connect(host, port):
        return node.sh(CONNECT.format(host=host, port=port)).stdout.strip()

    # Nobody listens there, and says so.
    assert connect("10.99.7.89", 9) == "ECONNREFUSED"
    # The hub is on the same network, and answers everybody else.
    assert node.sh("curl -sS -o /dev/null http://10.99.7.2:8470").returncode == 0
    assert connect("10.99.7.2", 8470) in ("EPERM", "no answer")


def test_a_second_run_changes_nothing(node, other, deploy):
    before = node.invocation(), other.invocation()
    run = deploy()
    assert run.rc == 0, messages(run)
    assert changed(run) == []
    assert (node.invocation(), other.invocation()) == before


@pytest.mark.parametrize("victim", ["group2", "group1"])
def test_a_rank_that_is_killed_takes_the_group_down_and_it_comes_back(node, other, victim):
    hosts = {host.name: host for host in (node, other)}
    before = {name: host.invocation() for name, host in hosts.items()}
    began = time.monotonic()
    hosts[victim].sh(KILL_RANKS)
    for name, host in hosts.items():
        wait_until(lambda host=host: state(host) != "active", 30, f"the end of {name}")
    down = time.monotonic() - began
    for name, host in hosts.items():
        wait_until(lambda host=host: state(host) == "active", 400, f"the return of {name}")
    print(f"{victim} killed: both down after {down:.1f} s, both back after {time.monotonic() - began:.1f} s")
    assert down < 30
    assert all(host.invocation() != before[name] for name, host in hosts.items())
    assert tokens(node) == 16


def test_a_restart_of_rank_0_brings_the_other_along(node, other):
    before = other.invocation()
    for host in (node, other):
        # The deaths of the tests before count against the starts that systemd allows.
        host.sh("systemctl reset-failed sglang")
    node.sh("systemctl restart sglang", timeout=400)
    wait_until(
        lambda: state(other) == "active" and other.invocation() != before, 60, "the other host's return"
    )
    # By its engine, which rank 0 told to end, or by its launcher, whichever was the first to know.
    said = other.sh(f"journalctl -o cat _SYSTEMD_INVOCATION_ID={before}").stdout
    assert "rank 0 has stopped the group" in said or "rank 0 of the group has gone" in said
    assert tokens(node) == 16


ENVIRONMENT = yaml.safe_load((ROOT / "inventories/lab/group_vars/twins/main.yml").read_text())[
    "sglang_server_environment"
]
# Breaks the engine where it serves, and not where its parser is asked; only hosts that have it are broken.
BROKEN = """
mkdir -p /srv/lab/broken
cat >/srv/lab/broken/orjson.py <<'PY'
import sys
if "sglang.launch_server" in sys.orig_argv:
    raise ImportError("broken on this host alone")
sys.path.remove("/srv/lab/broken")
del sys.modules["orjson"]
import orjson
PY
"""


def test_a_release_that_fails_on_one_host_falls_back_on_both(node, other, deploy):
    good = node.current()
    other.sh(BROKEN)
    began = time.monotonic()
    run = deploy(
        sglang_server_environment=dict(ENVIRONMENT, PYTHONPATH="/srv/lab/broken:/srv/lab/cpu_stand_in")
    )
    print(f"refused and put back after {time.monotonic() - began:.0f} s")
    assert run.rc != 0
    said = messages(run)
    assert "broken on this host alone" in said
    # By its own launcher or by the gate of the other host, whichever was the first to know.
    assert (
        "Another host of the same server has ended" in said
        or "group2, which is part of the same server, has failed" in said
    )
    for name in ("group1", "group2"):
        assert f"{name} serves {good} again" in said
    assert node.current() == other.current() == good
    assert tokens(node) == 16


def test_a_release_that_passes_can_be_rolled_back_on_both(node, other, deploy):
    good = node.current()
    run = deploy(sglang_server_arguments={"max-running-requests": 3})
    assert run.rc == 0, messages(run)
    assert node.current() == other.current() != good
    run = deploy("playbooks/rollback.yml")
    assert run.rc == 0, messages(run)
    assert node.current() == other.current() == good
    assert tokens(node) == 16


def test_a_host_that_would_be_another_server_is_refused_before_the_switch(node, other, deploy):
    """Somebody gives a variable to one host alone."""
    before = node.invocation(), other.invocation()
    arguments = "{{ {'max-running-requests': 2} if inventory_hostname == 'group2' else {} }}"
    run = deploy(sglang_server_arguments=arguments)
    assert run.rc != 0
    assert "group2: differs from group1 in config" in messages(run)
    assert (node.invocation(), other.invocation()) == before


def test_hosts_that_do_not_reach_each_other_are_found_before_anything_is_done(other, deploy):
    # What the second host answers gets lost, as behind a firewall.
    other.sh("ip route add blackhole 10.99.7.88")
    try:
        run = deploy("playbooks/preflight.yml")
    finally:
        other.sh("ip route del blackhole 10.99.7.88")
    assert run.rc != 0
    assert "does not reach 10.99.7.89 (rank 1) at TCP port 50000: no answer within 3 s" in messages(run)
