"""The gate against starts that go wrong: each must end soon, with the right cause, on the real engine.

A start is spoilt on the node, the unit restarted, and playbooks/verify.yml watches it as a deploy does.
"""

import json
import pathlib
import re
import shutil
import subprocess
import threading
import time

import pytest
import yaml

from tests import lab_hosts
from tests.lab_hosts import ROOT

CAUSES = {
    entry["id"]: entry["cause"]
    for entry in yaml.safe_load((ROOT / "roles/sglang_gate/vars/main/diagnoses.yml").read_text())[
        "__sglang_gate_diagnoses"
    ]
}
DROP_IN = "/etc/systemd/system/sglang.service.d/scenario.conf"
TREE = "$(readlink -f /opt/sglang/current/engine)/lib/python3.11/site-packages"
MODEL = "$(readlink -f /opt/sglang/current/model)"
# Waits for the engine's scheduler and does something to it; the clock is the one that systemd gives.
AT_SCHEDULER = """
systemd-run --quiet --collect --unit=at-scheduler bash -c "
until pkill -{signal} -f '^sglang::scheduler'; do sleep 0.05; done; cut -d' ' -f1 /proc/uptime >/run/did-it"
"""


@pytest.fixture(scope="module")
def node():
    yield from lab_hosts.host("scenarios", "gate1", "52")


@pytest.fixture
def spoil(node, play):
    """Return a function: run a script on the node, restart the unit, watch it; `mend` undoes the script."""
    undo = []

    def go(script, mend="true", after_restart="true", extra=None):
        undo.append(mend)
        before = node.invocation()
        node.sh("systemctl kill --signal=KILL sglang; systemctl reset-failed sglang; true")
        node.sh(script)
        node.sh(f"rm -f /run/did-it; systemctl restart --no-block sglang; true\n{after_restart}")
        return play("playbooks/verify.yml", extra={"sglang_gate_previous": before, **(extra or {})})

    yield go
    for script in undo:
        # What waits for a scheduler must not meet that of the next test.
        node.sh("systemctl stop at-scheduler; systemctl kill --signal=KILL sglang; true")
        node.sh(script)


def assert_cause(run, cause, *words):
    assert run.rc != 0
    assert "Cause: " + CAUSES[cause] in run.message, run.message
    assert run.message.count("Cause: ") == 1, run.message
    for word in words:
        assert word in run.message, run.message


def seconds_to_the_end(node):
    """Seconds from what was done to the engine to the end of the launcher."""
    done = float(node.sh("cat /run/did-it").stdout)
    ended = int(node.sh("systemctl show -P ExecMainExitTimestampMonotonic sglang").stdout) / 1e6
    return ended - done


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


def test_scheduler_killed_while_it_starts(node, spoil):
    run = spoil("true", after_restart=AT_SCHEDULER.format(signal="KILL"))
    assert_cause(run, "child_killed", "Rank 0 scheduler died")
    assert seconds_to_the_end(node) < 4


def test_truncated_shard(spoil):
    shard = f"{MODEL}/model-00002-of-000004.safetensors"
    run = spoil(f"cp -a {shard} /run/shard; truncate -s -100 {shard}", f"cp -a /run/shard {shard}")
    assert_cause(run, "shard_truncated", "SafetensorError")


def test_missing_shard(spoil):
    shard = f"{MODEL}/model-00002-of-000004.safetensors"
    run = spoil(f"mv {shard} /run/shard", f"mv /run/shard {shard}")
    assert_cause(run, "shard_missing", "model-00002-of-000004.safetensors")


def test_drafter_of_another_hidden_size(node, spoil, tmp_path):
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


def test_port_taken(spoil):
    squat = "systemd-run --unit=squatter python3 -m http.server 30000 --bind 127.0.0.1"
    wait = "until ss -ltn | grep -q :30000; do sleep 0.1; done"
    run = spoil(f"{squat}; {wait}", "systemctl stop squatter")
    assert_cause(run, "port_taken", "Address already in use")
    assert run.seconds < 20


def test_wrong_flag(spoil):
    config = "/opt/sglang/current/server.yaml"
    run = spoil(
        f"cp -a {config} /run/config; echo 'no-such-flag: 1' >>{config}", f"cp -a /run/config {config}"
    )
    assert_cause(run, "wrong_argument", "exit status 2", "--no-such-flag")


def test_missing_package(spoil):
    run = spoil(f"mv {TREE}/orjson /run/orjson", f"mv /run/orjson {TREE}/orjson")
    assert_cause(run, "package_missing", "No module named 'orjson'")


def test_masked_unit(node, play):
    unit = "/etc/systemd/system/sglang.service"
    node.sh("systemctl kill --signal=KILL sglang; systemctl reset-failed sglang; true")
    node.sh(f"mv {unit} /run/unit; ln -s /dev/null {unit}; systemctl daemon-reload")
    try:
        run = play("playbooks/verify.yml")
    finally:
        node.sh(f"mv -f /run/unit {unit}; systemctl daemon-reload")
    assert_cause(run, "unit_masked", "the unit is masked")


def test_memory_limit(spoil):
    limit = DROP_IN.replace("scenario", "memory")
    settings = "[Service]\\nMemoryMax=600M\\nMemorySwapMax=0\\n"
    run = spoil(
        f"printf '{settings}' >{limit}; systemctl daemon-reload", f"rm {limit}; systemctl daemon-reload"
    )
    # Whether systemd says oom-kill, or the launcher, depends on the version of the node's control groups.
    found = [cause for cause in ("memory_limit", "out_of_memory") if CAUSES[cause] in run.message]
    assert len(found) == 1, run.message
    assert_cause(run, found[0])


def test_cache_full(spoil):
    cache = "/var/cache/sglang"
    fill = f"dd if=/dev/zero of={cache}/full bs=1k || true"
    run = spoil(f"mount -t tmpfs -o size=64k tmpfs {cache}; chown sglang: {cache}; {fill}", f"umount {cache}")
    assert_cause(run, "no_space")


def test_hang(node, spoil):
    # The imports before the scheduler appears are silent as well, for half a minute on a busy machine.
    patience = dict.fromkeys(("starting", "distributed", "loading_weights", "weights_loaded", "kv_cache"), 60)
    stop = AT_SCHEDULER.format(signal="STOP")
    run = spoil("true", after_restart=stop, extra={"sglang_gate_patience": patience})
    assert run.rc != 0
    assert node.sh("cat /run/did-it").stdout, "the hang came before the scheduler was stopped"
    waited = re.search(r"no progress for (\d+) s \(allowed: 60 s\)", run.message)
    assert waited and int(waited.group(1)) <= 65, run.message
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
        node.sh(AT_SCHEDULER.format(signal="KILL"))
    ended = {}

    def wait(way):
        run = play("tests/benchmark/gate_vs_uri.yml", "--tags", way, extra={"previous": before})
        ended[way] = time.time()
        assert (run.rc != 0) is dies, run.message

    other = threading.Thread(target=wait, args=["uri"])
    other.start()
    wait("gate")
    other.join()
    if dies:
        up = float(node.sh("cut -d' ' -f1 /proc/uptime").stdout)
        fact = time.time() - up + float(node.sh("cat /run/did-it").stdout)
    else:
        said = "journalctl -u sglang -o json --no-pager -g 'launcher: the server answers' | tail -n 1"
        fact = int(json.loads(node.sh(said).stdout)["__REALTIME_TIMESTAMP"]) / 1e6
    delays = {way: round(at - fact, 1) for way, at in ended.items()}
    print("death" if dies else "first answer", "to the end of the play:", delays)
    assert delays["gate"] < 10
    # uri alone may happen to ask at the right moment, but it never notices a death.
    assert not dies or delays["gate"] < delays["uri"] / 3
