"""The road of an upgrade: the ways to fail it, and what is served meanwhile, as users see it over HTTP."""

import subprocess

import pytest

from tests import lab_hosts
from tests.lab_hosts import ROOT, outages, wait_until, watched

SITE = "lib/python3.11/site-packages"
WRAPPER = f"{SITE}/sglang/srt/models/kimi_k25.py"
# Takes the method out as somebody with an editor would.
DELETE_METHOD = """
sed -i 's/def set_eagle3_layers_to_capture/def set_eagle3_layers_to_capture_gone/' {tree}/{wrapper}
"""
# Writes the attestation anew, as if the engine had been broken before it was attested.
ATTEST_ANEW = """
python3 - {tree} <<'PY'
import json, sys
sys.path.insert(0, "/usr/local/lib/sglang")
import attestation
old = attestation.read(sys.argv[1])
old.update(attestation.look(sys.argv[1], old["files"]))
open(sys.argv[1] + "/attestation.json", "w").write(json.dumps(old))
PY
"""


@pytest.fixture(scope="module")
def node():
    yield from lab_hosts.host("scenarios", "upgrade1", "54")


@pytest.fixture(scope="module")
def other_engine(tmp_path_factory):
    """Variables of an engine of the same release in a tree of its own: its lock has one more comment."""
    text = (ROOT / "lab/engine/locks/0.5.21.txt").read_text()
    lock = tmp_path_factory.mktemp("lock") / "0.5.21.txt"
    lock.write_text("# The same again.\n" + text)
    return {"sglang_engine_lock": str(lock)}


@pytest.fixture
def deploy_and_do(node, tmp_path):
    """Deploy, and do something to the node between the last check and the restart: (status, output)."""

    def run(script, extra):
        log = tmp_path / "deploy.log"
        command = ["ansible-playbook", "deploy.yml", "-i", str(node.inventory), "--limit", node.name]
        for key, value in extra.items():
            command += ["-e", f"{key}={value}"]
        with log.open("w") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
            wait_until(
                lambda: ": Install the launcher" in log.read_text() or process.poll() is not None,
                900,
                "launcher",
            )
            assert process.poll() is None, log.read_text()[-3000:]
            node.sh(script)
            status = process.wait()
        text = log.read_text()
        print(text[-6000:])
        return status, text

    return run


def version(node):
    """The version that answers, not the one on disk."""
    return node.ask("/server_info")["version"]


def test_first_deploy_that_fails_has_nothing_to_fall_back_to_and_says_so(node, play):
    run = play("deploy.yml", extra={"sglang_engine_version": "0.5.9"})
    assert run.rc != 0
    assert "0.5.9: added" in run.stdout
    assert "no other release has passed on upgrade1 to fall back to" in run.message
    assert "nothing is served" in run.message
    assert node.sh("systemctl is-active sglang", check=False).stdout.strip() != "active"


def test_upgrade_to_a_release_that_serves(node, play):
    run = play("deploy.yml")
    assert run.rc == 0, run.message
    assert version(node) == "0.5.21"


def test_release_that_cannot_serve_here_falls_back(node, play):
    with watched(node) as answers:
        run = play("deploy.yml", extra={"sglang_engine_version": "0.5.9"})
    assert run.rc != 0
    assert "upgrade1 serves /opt/sglang/releases/0.5.21-" in run.message
    assert {version for _at, version in answers} == {"0.5.21", "-"}
    assert len(outages(answers)) == 1, "served until the switch, and again after it"
    assert version(node) == "0.5.21"


def test_configuration_that_kills_the_engine_falls_back(node, play):
    good = node.current()
    # Valid for the parser; only the engine finds that nothing is left for the KV cache.
    with watched(node) as answers:
        run = play("deploy.yml", extra={"sglang_server_arguments": {"mem-fraction-static": 0.0001}})
    assert run.rc != 0
    assert "Raise mem-fraction-static" in run.message
    assert f"serves {good} again" in run.message
    assert {version for _at, version in answers} == {"0.5.21", "-"}
    assert len(outages(answers)) == 1
    assert version(node) == "0.5.21"


def test_engine_that_lacks_a_package_falls_back(node, play, other_engine):
    good = node.current()
    assert play("deploy.yml", "--tags stage", extra=other_engine).rc == 0
    node.sh(f"mv {other_tree(node)}/{SITE}/orjson /tmp/")
    with watched(node) as answers:
        run = play("deploy.yml", extra=other_engine)
    assert run.rc != 0
    assert "orjson" in run.message
    assert f"serves {good} again" in run.message
    assert len(outages(answers)) == 1
    assert version(node) == "0.5.21"
    node.sh(f"mv /tmp/orjson {other_tree(node)}/{SITE}/")


def other_tree(node):
    """The engine tree that is not the one which runs."""
    return node.sh(
        "ls -d /opt/sglang/engines/0.5.21-* | grep -vFx $(readlink /opt/sglang/current/engine)"
    ).stdout.strip()


def test_method_deleted_after_staging_is_refused_before_the_switch(node, play, other_engine):
    before, tree = node.invocation(), other_tree(node)
    node.sh(f"cp {tree}/{WRAPPER} /tmp/wrapper.py; cp {tree}/attestation.json /tmp/")
    node.sh(DELETE_METHOD.format(tree=tree, wrapper=WRAPPER))
    with watched(node) as answers:
        run = play("deploy.yml", extra=other_engine)
        assert run.rc != 0
        assert f"{tree} is not what was attested: {WRAPPER} has sha256" in run.message
        # The attestation lies as well: the audit reads what the engine would need.
        node.sh(ATTEST_ANEW.format(tree=tree))
        run = play("deploy.yml", extra=other_engine)
        assert run.rc != 0
        assert "set_eagle3_layers_to_capture" in run.message
    assert {version for _at, version in answers} == {"0.5.21"}, "there was nothing to switch"
    assert node.invocation() == before
    node.sh(f"cp -p /tmp/wrapper.py {tree}/{WRAPPER}; cp -p /tmp/attestation.json {tree}/")


def test_method_deleted_after_the_last_check_is_refused_by_the_launcher(node, deploy_and_do, other_engine):
    good, tree = node.current(), other_tree(node)
    with watched(node) as answers:
        status, text = deploy_and_do(DELETE_METHOD.format(tree=tree, wrapper=WRAPPER), other_engine)
    assert status != 0
    assert f"the engine is not what was attested: {WRAPPER} has sha256" in text
    assert f"serves {good} again" in text
    assert len(outages(answers)) == 1
    assert version(node) == "0.5.21"
    node.sh(f"cp -p /tmp/wrapper.py {tree}/{WRAPPER}")


def test_method_that_nobody_missed_falls_back_after_the_load(node, deploy_and_do, other_engine):
    good, tree = node.current(), other_tree(node)
    script = DELETE_METHOD.format(tree=tree, wrapper=WRAPPER) + ATTEST_ANEW.format(tree=tree)
    with watched(node) as answers:
        status, text = deploy_and_do(script, other_engine)
    assert status != 0
    assert "has no attribute 'set_eagle3_layers_to_capture'" in text
    assert f"serves {good} again" in text
    assert len(outages(answers)) == 1
    assert version(node) == "0.5.21"
    node.sh(f"cp -p /tmp/wrapper.py {tree}/{WRAPPER}; cp -p /tmp/attestation.json {tree}/")


def test_rollback_to_a_release_that_fails_falls_back_as_well(node, play, other_engine):
    good = node.current()
    broken = node.sh(f"ls -d /opt/sglang/releases/*/engine -l | grep {other_tree(node)}").stdout.split()[8]
    node.sh(f"mv {other_tree(node)}/{SITE}/orjson /tmp/")
    run = play("playbooks/rollback.yml", extra={"sglang_server_rollback_to": broken.split("/")[4]})
    assert run.rc != 0
    assert f"serves {good} again" in run.message
    node.sh(f"mv /tmp/orjson {other_tree(node)}/{SITE}/")


def test_the_same_engine_whole_is_served(node, play, other_engine):
    tree = other_tree(node)
    run = play("deploy.yml", extra=other_engine)
    assert run.rc == 0, run.message
    assert node.sh("readlink /opt/sglang/current/engine").stdout.strip() == tree
    assert version(node) == "0.5.21"


STAND_IN_SMI = """
cat >/usr/local/bin/nvidia-smi <<'SH'
#!/bin/sh
[ "$1" = -q ] || exit 0
cat <<'XML'
<?xml version="1.0" ?>
<nvidia_smi_log><driver_version>580.1</driver_version><cuda_version>13.0</cuda_version>
<gpu id="00000000:00:06.0"><product_name>NVIDIA B200</product_name>
<fb_memory_usage><total>183359 MiB</total><used>61002 MiB</used></fb_memory_usage>
<processes><process_info><pid>PID</pid><process_name>python3</process_name>
<used_memory>60000 MiB</used_memory></process_info></processes></gpu></nvidia_smi_log>
XML
SH
chmod +x /usr/local/bin/nvidia-smi
systemd-run --quiet --unit=stranger --uid=ops sleep infinity
sed -i "s/PID/$(systemctl show -P MainPID stranger)/" /usr/local/bin/nvidia-smi
"""


def test_gpu_that_somebody_else_holds_is_named_before_the_old_server_is_stopped(node, deploy_and_do):
    before = node.invocation()
    status, text = deploy_and_do(STAND_IN_SMI, {"lab_checkpoint": "echo"})
    assert status != 0
    assert "sglang.service was not touched" in text
    assert "(python3, user ops, stranger.service): 60000 MiB" in text
    assert node.invocation() == before
    node.sh("systemctl stop stranger; rm /usr/local/bin/nvidia-smi")


def test_segments_of_a_dead_run_are_cleared_and_foreign_ones_kept(node):
    node.sh(
        "cd /dev/shm; echo x | tee psm_left >psm_ops; chown sglang:sglang psm_left; chown ops:ops psm_ops"
    )
    node.sh("systemctl kill --kill-whom=main --signal=KILL sglang")
    wait_until(lambda: node.sh("test -e /dev/shm/psm_left", check=False).returncode, 60, "the segment's end")
    assert node.sh("cat /dev/shm/psm_ops").stdout == "x\n"
    wait_until(
        lambda: node.sh("curl -fs http://127.0.0.1:30000/health", check=False).returncode == 0,
        300,
        "the restart",
    )
