"""The gate against starts that go wrong: each must end soon, with the right cause, on the real engine.

A start is spoilt on the node, the unit restarted, and playbooks/verify.yml watches it as a deploy does.
Of each death it is asserted that the launcher ended within its own bound after the first word of it, and that
the gate ended with the first look that could see it. The seconds are shown at the end.
"""

import collections
import datetime
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import threading
import time

import pytest
import yaml
from ansible.module_utils.sglang_kit import addresses, attestation, companions, probe, redaction, startup_log

from tests import lab_hosts
from tests.lab_hosts import ROOT, wait_until

for neighbour in (addresses, attestation, companions, redaction, startup_log):
    sys.modules.setdefault(neighbour.__name__.rpartition(".")[2], neighbour)
LAUNCHER = runpy.run_path(str(ROOT / "roles/sglang_server/files/launcher.py"))
# Seconds between two looks of the gate.
POLL_S = 2.0

CAUSES = {
    entry["id"]: entry["cause"]
    for entry in yaml.safe_load((ROOT / "roles/sglang_gate/vars/main/diagnoses.yml").read_text())[
        "__sglang_gate_diagnoses"
    ]
}
DROP_IN = "/etc/systemd/system/sglang.service.d/scenario.conf"
TREE = "$(readlink -f /opt/sglang/current/engine)/lib/python3.11/site-packages"
MODEL = "$(readlink -f /opt/sglang/current/model)"
# Waits for the engine's scheduler, does something, and notes when.
AT_SCHEDULER = """
systemd-run --quiet --collect --unit=at-scheduler bash -c "
until pgrep -f '^sglang::scheduler' >/dev/null; do sleep 0.05; done; {deed}; date +%s.%N >/run/did-it"
"""
PHASES_AFTER_START = [phase for phase in startup_log.STALL_SECONDS if phase != "starting"]
KILL = "pkill -KILL -f '^sglang::scheduler'"
# What systemd knows of the end of the run, in seconds since 1970.
ENDED = """
python3 - <<'PY'
import json, subprocess, time
shift = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
names = "ExecMainExitTimestampMonotonic", "StateChangeTimestampMonotonic"
shown = subprocess.run(["systemctl", "show", "-p", ",".join(names), "sglang"], capture_output=True, text=True)
values = dict(line.split("=") for line in shown.stdout.split())
print(json.dumps([shift + int(values[name]) / 1e6 for name in names]))
PY
"""


@pytest.fixture(scope="module")
def node():
    yield from lab_hosts.host("scenarios", "gate1", "52")


@pytest.fixture
def ansible():
    """Return a function that starts ansible-playbook as people do, and returns the process."""
    started = []

    def go(inventory, *arguments, pipelining="True"):
        env = dict(os.environ, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"), ANSIBLE_NOCOLOR="1")
        env["ANSIBLE_PIPELINING"] = pipelining
        command = [ROOT / ".venv/bin/ansible-playbook", "-i", str(inventory), *arguments]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, cwd=ROOT, env=env, **pipe))
        return started[-1]

    yield go
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def spoil(node, play):
    """Return a function: run a script on the node, restart the unit, watch it; `mend` undoes the script.

    The run's `death` is a Death where the server died.
    """
    undo = []

    def go(script, mend="true", after_restart="true", extra=None):
        undo.append(mend)
        before = node.invocation()
        node.sh("systemctl kill --signal=KILL sglang; systemctl reset-failed sglang; true")
        node.sh(script)
        node.sh(f"rm -f /run/did-it; systemctl restart --no-block sglang; true\n{after_restart}")
        run = play("playbooks/verify.yml", extra={"sglang_gate_previous": before, **(extra or {})})
        run.death = death_of(node, run)
        return run

    yield go
    for script in undo:
        # What waits for a scheduler must not meet that of the next test.
        node.sh("systemctl stop at-scheduler; systemctl kill --signal=KILL sglang; true")
        node.sh(script)


# In seconds since 1970. told: the first word after which the start is lost, or None. ended: the main process.
# known: to systemd. polled: when the gate began its last two looks. gate: when its task had ended.
Death = collections.namedtuple("Death", ["told", "ended", "known", "polled", "gate"])


def waited(run):
    """The result of the gate's wait in a run, and when its task ended, in seconds since 1970."""
    (data,) = (
        event["event_data"]
        for event in run.events
        if event["event"] in ("runner_on_ok", "runner_on_failed")
        and "polled_at" in event["event_data"].get("res", {})
    )
    ended = datetime.datetime.fromisoformat(data["end"]).replace(tzinfo=datetime.timezone.utc)
    return data["res"], ended.timestamp()


def death_of(node, run):
    """What there is to know of the times of a death, or None if the server did not die."""
    result, gate = waited(run)
    if result["verdict"] != "dead":
        return None
    invocation = node.invocation()
    journal = (
        f"journalctl -o json --all --no-pager --output-fields=MESSAGE _SYSTEMD_INVOCATION_ID={invocation}"
    )
    log, told = startup_log.StartupLog(), None
    for at, message in probe.parse_journal(node.sh(journal).stdout):
        log.feed(message, at)
        told = told or (at if log.lost else None)
    return Death(told, *json.loads(node.sh(ENDED).stdout), result["polled_at"], gate)


@pytest.fixture(scope="module", autouse=True)
def table(request):
    """The rows of the table that is shown at the end: what happened, the second of the deed, the Death."""
    rows = []
    yield rows
    write = request.config.pluginmanager.get_plugin("terminalreporter").write_line
    write("")
    write("seconds                    deed-told  told-ended  ended-known  known-verdict  in all")
    for name, deed, death in rows:
        steps = [deed, death.told, death.ended, death.known, death.gate]
        spans = ["-" if None in pair else f"{pair[1] - pair[0]:.1f}" for pair in zip(steps, steps[1:])]
        first = next(step for step in steps if step is not None)
        write(
            f"{name:25} {spans[0]:>10} {spans[1]:>11} {spans[2]:>12} {spans[3]:>14} {death.gate - first:7.1f}"
        )


@pytest.fixture
def assert_soon(request, table, node):
    """Return a function that asserts that the gate saw a death as soon as it could."""

    def check(run, did_it=False):
        death = run.death
        deed = float(node.sh("cat /run/did-it").stdout) if did_it else None
        table.append((request.node.name.replace("test_", "", 1)[:25], deed, death))
        if did_it:
            looks = LAUNCHER["WORKERS_INTERVAL_S"] + LAUNCHER["TICK_S"]
            assert (death.told or death.ended) - deed <= looks + POLL_S
        if death.told:
            grace = LAUNCHER["LOST_GRACE_S"] + LAUNCHER["LAST_WORDS_S"]
            assert death.ended - death.told <= grace + POLL_S
        # At its last look but one nobody could have known.
        assert len(death.polled) == 1 or death.polled[0] < death.known

    return check


def assert_cause(run, cause, *words):
    assert run.rc != 0
    assert "Cause: " + CAUSES[cause] in run.message, run.message
    assert run.message.count("Cause: ") == 1, run.message
    for word in words:
        assert word in run.message, run.message


def test_a_healthy_start_leaves_evidence_and_a_report(node, play):
    run = play("deploy.yml")
    assert run.rc == 0, run.message
    # A start that fails is not repeated, so that each test has its own.
    node.sh(f"mkdir -p $(dirname {DROP_IN}); printf '[Service]\\nRestart=no\\n' >{DROP_IN}")
    node.sh("systemctl daemon-reload")
    evidence = json.loads(node.sh("cat /opt/sglang/current/gate.json").stdout)
    assert evidence["passed"] is True
    assert evidence["acceptance"]["length"] == evidence["acceptance"]["server"] == 2.0
    # Of three drafted tokens the cycle checkpoint accepts one each time.
    assert evidence["acceptance"]["accepted"] * 3 == pytest.approx(
        evidence["acceptance"]["proposed"], rel=0.1
    )
    assert evidence["server"]["version"] == "0.5.21"
    assert [step["phase"] for step in evidence["phases"]][:3] == [
        "starting",
        "distributed",
        "loading_weights",
    ]
    assert all(step["at"] > 1.7e9 for step in evidence["phases"])
    assert evidence["observation"]["node"]["shm"]["total_bytes"] > 0
    report = node.sh("cat /opt/sglang/current/gate.md").stdout
    assert "| tokens for each verify step | 2.0 |" in report
    assert "| loading weights (target) |" in report
    assert evidence["release"]["config"] in report


def test_verifying_changes_nothing(node, play):
    before = node.invocation()
    run = play("playbooks/verify.yml", extra={"sglang_gate_evidence": "/opt/sglang/current/gate.json"})
    assert (run.rc, run.changed) == (0, 0), run.stdout
    assert node.invocation() == before
    # It was up, so the first look was the last.
    assert len(waited(run)[0]["polled_at"]) == 1
    assert "[gate1] serving" in run.stdout


@pytest.mark.parametrize("pipelining", ["True", "False"])
def test_check_mode_only_looks(node, ansible, pipelining):
    before = node.invocation()
    done = ansible(
        node.inventory, "playbooks/verify.yml", "--check", "--limit", node.name, pipelining=pipelining
    )
    text = done.communicate(timeout=300)[0]
    assert done.returncode == 0, text
    assert "[gate1] check mode: the server is active (running); not waited for" in text
    assert re.search(r"^gate1 .*changed=0 ", text, re.M)
    assert node.invocation() == before


def test_several_hosts_are_watched_at_once_over_a_connection_that_is_lost(node, ansible, tmp_path):
    # One machine under two names, so that both wait for one start.
    (tmp_path / "group_vars").symlink_to(ROOT / "inventories/lab/group_vars")
    known = yaml.safe_load((node.inventory / "hosts.yml").read_text())["sglang"]["vars"]
    known["ansible_ssh_common_args"] = f"-F {ROOT}/.lab/ssh/config"
    hosts = {name: {"ansible_host": node.name} for name in ("one", "two")}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"sglang": {"hosts": hosts, "vars": known}}))
    before = node.invocation()
    node.sh("systemctl restart --no-block sglang")
    done = ansible(tmp_path, "playbooks/verify.yml", "-e", f"sglang_gate_previous={before}")
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(iter(done.stdout.readline, "")))
    reader.start()
    for name in hosts:
        wait_until(lambda name=name: f"[{name}] starting" in "".join(lines), 60, f"a line of {name}")
    cut = "systemctl stop ssh ssh.socket; pkill -KILL -x sshd; sleep 8; systemctl start ssh"
    subprocess.run(
        [
            "ssh",
            "-F",
            ROOT / ".lab/ssh/config",
            node.name,
            "sudo",
            "systemd-run",
            "--quiet",
            "sh",
            "-c",
            f"'{cut}'",
        ],
        check=False,
    )
    reader.join(300)
    text = "".join(lines)
    assert done.wait(60) == 0, text
    for name in hosts:
        assert f"[{name}] no connection, trying again: " in text
        assert f"[{name}] serving" in text.partition(f"[{name}] no connection")[2], text
    # One start all the while.
    assert node.sh("systemctl show -P NRestarts sglang").stdout == "0\n"


def test_the_node_repeats_the_measurement_if_asked(node, play):
    options = {"sglang_gate_timer": "1h", "sglang_gate_textfile_dir": "/var/lib/textfiles"}
    assert play("playbooks/verify.yml", "--check", extra=options).rc == 0
    assert play("playbooks/verify.yml", extra=options).changed > 0
    assert play("playbooks/verify.yml", extra=options).changed == 0
    assert node.sh("systemctl is-active sglang-gate.timer").stdout == "active\n"
    node.sh("systemctl start sglang-gate.service")
    metrics = node.sh("cat /var/lib/textfiles/sglang_gate.prom").stdout
    assert "\nsglang_gate_passed 1\n" in metrics
    assert "\nsglang_gate_acceptance_length 2.0\n" in metrics
    assert play("playbooks/verify.yml", extra=dict(options, sglang_gate_timer="")).changed > 0
    assert (
        node.sh("systemctl is-active sglang-gate.timer; ls /var/lib/textfiles", check=False).stdout
        == "inactive\n"
    )


def test_scheduler_killed_while_it_starts(node, spoil, assert_soon):
    extra = {"sglang_gate_evidence": "/run/evidence/gate.json"}
    run = spoil("mkdir -p /run/evidence", after_restart=AT_SCHEDULER.format(deed=KILL), extra=extra)
    # The engine waits for this one, so it asks for its end before anybody can look.
    assert_cause(run, "child_died", "Rank 0 scheduler died", "exit status 137")
    assert_soon(run, did_it=True)
    evidence = json.loads(node.sh("cat /run/evidence/gate.json").stdout)
    assert (evidence["passed"], evidence["verdict"]) == (False, "dead")
    assert [entry["id"] for entry in evidence["causes"]] == ["child_died"]
    assert evidence["phases"][0]["phase"] == "starting"
    assert CAUSES["child_died"] in node.sh("cat /run/evidence/gate.md").stdout


def test_scheduler_killed_while_the_engine_does_not_look(spoil, assert_soon):
    hang = "pkill -STOP -f '[b]in/python -m sglang.launch_server'"
    run = spoil("true", after_restart=AT_SCHEDULER.format(deed=f"{hang}; {KILL}"))
    said = r"launcher: the engine's process sglang::schedul(er)? \(pid \d+\) was killed by signal 9"
    assert_cause(run, "child_killed", "exit status 137")
    assert re.search(said, run.message), run.message
    assert_soon(run, did_it=True)


def test_truncated_shard(spoil, assert_soon):
    shard = f"{MODEL}/model-00002-of-000004.safetensors"
    run = spoil(f"cp -a {shard} /run/shard; truncate -s -100 {shard}", f"cp -a /run/shard {shard}")
    assert_cause(run, "shard_truncated", "SafetensorError")
    assert_soon(run)


def test_missing_shard(spoil, assert_soon):
    shard = f"{MODEL}/model-00002-of-000004.safetensors"
    run = spoil(f"mv {shard} /run/shard", f"mv /run/shard {shard}")
    assert_cause(run, "shard_missing", "model-00002-of-000004.safetensors")
    assert_soon(run)


def test_drafter_of_another_hidden_size(node, spoil, assert_soon, tmp_path):
    make = [ROOT / ".venv/bin/python", ROOT / "lab/checkpoint/make_checkpoint.py", tmp_path / "other"]
    subprocess.run([*make, "--mode", "cycle", "--hidden", "256"], check=True, stdout=subprocess.DEVNULL)
    archive = shutil.make_archive(str(tmp_path / "drafter"), "tar", tmp_path / "other/draft")
    unpack = "sudo sh -c 'mkdir -p /srv/other && tar -x -C /srv/other'"
    with pathlib.Path(archive).open("rb") as stream:
        subprocess.run(["ssh", "-F", ROOT / ".lab/ssh/config", node.name, unpack], stdin=stream, check=True)
    config = "/opt/sglang/current/server.yaml"
    other = "s|^speculative-draft-model-path:.*|speculative-draft-model-path: /srv/other|"
    run = spoil(f"cp -a {config} /run/config; sed -i '{other}' {config}", f"cp -a /run/config {config}")
    assert_cause(run, "drafter_of_another_model")
    assert_soon(run)


def test_port_taken(spoil, assert_soon):
    squat = "systemd-run --unit=squatter python3 -m http.server 30000 --bind 127.0.0.1"
    wait = "until ss -ltn | grep -q :30000; do sleep 0.1; done"
    run = spoil(f"{squat}; {wait}", "systemctl stop squatter")
    assert_cause(run, "port_taken", "Address already in use")
    assert_soon(run)


def test_wrong_flag(spoil, assert_soon):
    config = "/opt/sglang/current/server.yaml"
    run = spoil(
        f"cp -a {config} /run/config; echo 'no-such-flag: 1' >>{config}", f"cp -a /run/config {config}"
    )
    assert_cause(run, "wrong_argument", "exit status 2", "--no-such-flag")
    assert_soon(run)


def test_missing_package(spoil, assert_soon):
    run = spoil(f"mv {TREE}/orjson /run/orjson", f"mv /run/orjson {TREE}/orjson")
    assert_cause(run, "package_missing", "No module named 'orjson'")
    assert_soon(run)


def test_masked_unit(node, play):
    unit = "/etc/systemd/system/sglang.service"
    node.sh("systemctl kill --signal=KILL sglang; systemctl reset-failed sglang; true")
    node.sh(f"mv {unit} /run/unit; ln -s /dev/null {unit}; systemctl daemon-reload")
    try:
        run = play("playbooks/verify.yml")
    finally:
        node.sh(f"mv -f /run/unit {unit}; systemctl daemon-reload")
    assert_cause(run, "unit_masked", "the unit is masked")
    assert len(waited(run)[0]["polled_at"]) == 1


def test_memory_limit(spoil, assert_soon):
    limit = DROP_IN.replace("scenario", "memory")
    settings = "[Service]\\nMemoryMax=600M\\nMemorySwapMax=0\\n"
    run = spoil(
        f"printf '{settings}' >{limit}; systemctl daemon-reload", f"rm {limit}; systemctl daemon-reload"
    )
    # Whether systemd says oom-kill, or the launcher, depends on the version of the node's control groups.
    found = [cause for cause in ("memory_limit", "out_of_memory") if CAUSES[cause] in run.message]
    assert len(found) == 1, run.message
    assert_cause(run, found[0])
    assert_soon(run)


def test_cache_full(spoil, assert_soon):
    cache = "/var/cache/sglang"
    fill = f"dd if=/dev/zero of={cache}/full bs=1k || true"
    run = spoil(f"mount -t tmpfs -o size=64k tmpfs {cache}; chown sglang: {cache}; {fill}", f"umount {cache}")
    assert_cause(run, "no_space")
    assert_soon(run)


def test_hang(node, spoil):
    # Not before it says something: the imports are silent as well, for minutes on a busy machine.
    said = "journalctl --quiet -o cat _SYSTEMD_INVOCATION_ID=$(systemctl show -P InvocationID sglang)"
    until = f"until {said} | grep -q 'Init parallel begin'; do sleep 0.05; done"
    stop = AT_SCHEDULER.format(deed=f"{until}; {KILL.replace('KILL', 'STOP')}".replace("$", "\\$"))
    patience = dict.fromkeys(PHASES_AFTER_START, 20)
    run = spoil("true", after_restart=stop, extra={"sglang_gate_patience": patience})
    assert run.rc != 0
    assert node.sh("cat /run/did-it").stdout, "the hang came before the scheduler was stopped"
    silent = re.search(r"no progress for (\d+) s \(allowed: 20 s\)", run.message)
    # It was allowed at the last look but one.
    before, last = waited(run)[0]["polled_at"]
    assert silent and int(silent.group(1)) - (last - before) <= 20 + 1, run.message
    assert "Cause: " in run.message


@pytest.mark.parametrize("checkpoint, length", [("echo", 4.0), ("random", None)])
def test_a_drafter_is_as_good_as_it_is(node, play, spoil, checkpoint, length):
    old = node.current()
    run = play("deploy.yml", "--tags", "stage", extra={"lab_checkpoint": checkpoint})
    assert run.rc == 0, run.message
    staged = node.sh("ls -td /opt/sglang/releases/* | head -1").stdout.strip()
    assert staged != old
    run = spoil(f"ln -sfn {staged} /opt/sglang/current", f"ln -sfn {old} /opt/sglang/current")
    if length:
        assert run.rc == 0, run.message
        assert f"Acceptance length {length} tokens a step" in run.stdout
    else:
        assert run.rc != 0
        assert "speculation is silently off: 1.0" in run.message


@pytest.mark.parametrize("dies", [False, True])
def test_the_gate_ends_sooner_than_uri_with_retries(node, play, dies):
    before = node.invocation()
    node.sh("systemctl kill --signal=KILL sglang; systemctl reset-failed sglang; true")
    node.sh("rm -f /run/did-it; systemctl restart --no-block sglang")
    if dies:
        node.sh(AT_SCHEDULER.format(deed=KILL))
    ended, runs = {}, {}

    def wait(way):
        # For a start that ends well uri gets as long as it takes.
        extra = {"previous": before, "retries": 9 if dies else 60}
        runs[way] = play("tests/benchmark/gate_vs_uri.yml", "--tags", way, extra=extra)
        ended[way] = time.time()

    other = threading.Thread(target=wait, args=["uri"])
    other.start()
    wait("gate")
    _exit, known = json.loads(node.sh(ENDED).stdout)
    other.join()
    assert [(run.rc != 0) for run in runs.values()] == [dies, dies], [run.message for run in runs.values()]
    if dies:
        fact = float(node.sh("cat /run/did-it").stdout)
    else:
        said = "journalctl -u sglang -o json --no-pager -g 'launcher: the server answers' | tail -n 1"
        fact = int(json.loads(node.sh(said).stdout)["__REALTIME_TIMESTAMP"]) / 1e6
    delays = {way: round(at - fact, 1) for way, at in ended.items()}
    print("death" if dies else "first answer", "to the end of the play:", delays)
    assert waited(runs["gate"])[0]["polled_at"][0] < known
    # uri alone may happen to ask at the right moment, but it never notices a death.
    assert not dies or delays["gate"] < delays["uri"] / 3
