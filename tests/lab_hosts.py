"""Real hosts of the lab, playbooks run on them by ansible-runner, and the real engine behind them.

Tests of one host run in the order in which they stand: each goes on from the server that the one before left.
"""

import contextlib
import json
import pathlib
import subprocess
import tempfile
import threading
import time

import ansible_runner
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Says the header with the engine's key, or nothing where the engine asks for none.
ENGINE_KEY = "sed 's/^/Authorization: Bearer /' /etc/sglang/credentials/engine-key 2>/dev/null"


class Run:
    """What one playbook run did: rc, changed (of its host, and by host), stdout, results of failed tasks."""

    def __init__(self, runner, host, seconds):
        self.rc = runner.rc
        self.seconds = seconds
        self.stdout = runner.stdout.read()
        stats = runner.stats or {}
        self.events = list(runner.events)
        self.changed = stats.get("changed", {}).get(host, 0)
        self.changed_by_host = {name: count for name, count in stats.get("changed", {}).items() if count}
        self.failures = [
            event["event_data"]["res"]
            for event in self.events
            if event["event"] == "runner_on_failed" and not event["event_data"].get("ignore_errors")
        ]

    @property
    def message(self):
        """The message of the last failed task, with those of its loop items."""
        if not self.failures:
            return ""
        last = self.failures[-1]
        items = [item for item in last.get("results", []) if item.get("failed")]
        return "\n".join(str(result.get("msg", "")) for result in [last, *items])


class Node:
    """A lab host, by ssh. inventory: the folder below inventories/ that names it."""

    def __init__(self, name, inventory):
        self.name = name
        self.inventory = ROOT / "inventories" / inventory

    def sh(self, script, check=True, timeout=120):
        """Run a script as root; returns the finished process with text output."""
        done = subprocess.run(
            ["ssh", "-F", str(ROOT / ".lab/ssh/config"), self.name, "sudo", "bash", "-s"],
            input=script,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not check or done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done

    def ask(self, path, body=None):
        """Ask the engine on the node, with its key if it has one; returns the decoded JSON answer."""
        data = "-H 'Content-Type: application/json' -d @-" if body is not None else ""
        script = f"curl -fsS -H @<({ENGINE_KEY}) {data} http://127.0.0.1:30000{path}"
        if body is not None:
            script += f" <<'BODY'\n{json.dumps(body)}\nBODY"
        return json.loads(self.sh(script).stdout)

    def current(self):
        """The release that `current` names."""
        return self.sh("readlink /opt/sglang/current").stdout.strip()

    def invocation(self):
        """systemd's id of the run of the server that is on now."""
        return self.sh("systemctl show -P InvocationID sglang").stdout.strip()


def workers(gateway):
    """What the router on a host says of its workers: {url: status}."""
    said = gateway.sh(
        'curl -fsS -H "Authorization: Bearer $(cat /etc/sglang-gateway/credentials/control-key)" '
        "http://127.0.0.1:30100/workers"
    ).stdout
    return {item["url"]: item["status"] for item in json.loads(said)["workers"]}


# Asks the engine for its version over and over; prints the second and the version of each answer, or "-".
WATCH = r"""
import json, time, urllib.request
while True:
    try:
        with urllib.request.urlopen("http://127.0.0.1:30000/server_info", timeout=10) as answer:
            version = json.load(answer)["version"]
    except OSError:
        version = "-"
    print(time.time(), version, flush=True)
    time.sleep(0.5)
"""


@contextlib.contextmanager
def watched(node):
    """Ask the engine for its version all the time; yields a list that holds [(second, version)] at the end.

    The version is "-" for a question without an answer. The first question has been answered or refused when
    the body begins.
    """
    node.sh(
        f"cat >/tmp/watch.py <<'PY'\n{WATCH}\nPY\n"
        "systemd-run --quiet --unit=watch --property=StandardOutput=truncate:/tmp/watched "
        "python3 -u /tmp/watch.py"
    )
    wait_until(lambda: node.sh("cat /tmp/watched", check=False).stdout, 30, "a question of the watch")
    answers = []
    try:
        yield answers
    finally:
        text = node.sh("systemctl stop watch; cat /tmp/watched").stdout
        answers.extend((float(at), version) for at, version in (line.split() for line in text.splitlines()))


def outages(answers):
    """Return the seconds of each time without answers, from the last one before to the first one after."""
    served = [at for at, version in answers if version != "-"]
    silent = [at for at, version in answers if version == "-"]
    return [
        round(after - before, 1)
        for before, after in zip(served, served[1:])
        if any(before < at < after for at in silent)
    ]


def wait_until(condition, seconds, what):
    """Wait until the condition holds; fail with what was never seen."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"never seen: {what}"
        time.sleep(0.2)


def host(inventory, name, octet):
    """Make a fresh host for a fixture, and remove it in the end."""
    hosts = str(ROOT / "lab/hosts")
    subprocess.run([hosts, "down", name], check=True)
    subprocess.run([hosts, "up", name, octet], check=True)
    yield Node(name, inventory)
    subprocess.run([hosts, "down", name], check=True)


@pytest.fixture
def play(node, tmp_path):
    """Run a playbook of the project on the node: play("deploy.yml", "--check", extra={...}, on="another")."""

    def run(playbook, *options, extra=None, on=node.name):
        began = time.monotonic()
        runner = ansible_runner.run(
            private_data_dir=tempfile.mkdtemp(dir=tmp_path),
            project_dir=str(ROOT),
            playbook=str(ROOT / playbook),
            inventory=str(node.inventory),
            limit=on,
            cmdline=" ".join(options) or None,
            extravars=extra or {},
            envvars={"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
            quiet=True,
        )
        done = Run(runner, on, time.monotonic() - began)
        print(done.stdout[-6000:])
        return done

    return run


@pytest.fixture
def play_in_background(play):
    """The same, while the test does something to the node; returns a function that waits for the run."""

    def start(*args, **kwargs):
        box = []
        thread = threading.Thread(target=lambda: box.append(play(*args, **kwargs)))
        thread.start()

        def wait(timeout):
            thread.join(timeout)
            assert not thread.is_alive(), "the play goes on"
            return box[0]

        return wait

    return start
