"""The main job on a real host with the real engine: deploy, again, upgrade, and deploys that must fail."""

import json
import time

from tests.lab_hosts import wait_until

CHAT = {
    "model": "kimi-k2.5-tiny",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 16,
    "temperature": 0,
}
# The cycle checkpoint walks through the printable characters after every prompt.
CYCLE = "!\"#$%&'()*+,-./0"
# The echo checkpoint says the first printable character, over and over.
ECHO = "!" * 16


def gate(node):
    return json.loads(node.sh("cat /opt/sglang/current/gate.json").stdout)


def test_check_mode_on_an_empty_host_ends_well_and_changes_nothing(node, play):
    run = play("deploy.yml", "--check", "--diff")
    assert run.rc == 0
    assert run.changed > 0
    assert (
        node.sh(
            "ls -d /opt/sglang /srv/models /etc/systemd/system/sglang.service; id sglang", check=False
        ).stdout
        == ""
    )


def test_deploy_ends_with_a_served_answer(node, play):
    run = play("deploy.yml", extra={"gpu_node_collective": True})
    assert run.rc == 0, run.message
    assert "2 processes sum with a bus bandwidth of" in run.stdout
    assert node.ask("/v1/chat/completions", CHAT)["choices"][0]["message"]["content"] == CYCLE
    evidence = gate(node)
    assert evidence["passed"] is True
    assert evidence["acceptance"]["length"] == 2.0
    assert "Acceptance length 2.0" in run.stdout
    assert node.ask("/server_info")["version"] == "0.5.21"
    mounts = node.sh("systemctl show -P RequiresMountsFor sglang").stdout.split()
    assert {"/opt/sglang", "/srv/models"} <= set(mounts)


def test_second_run_changes_nothing(node, play):
    before = node.invocation()
    run = play("deploy.yml")
    assert (run.rc, run.changed) == (0, 0), run.stdout
    assert node.invocation() == before


def test_check_mode_after_a_deploy_finds_nothing_to_change(node, play):
    run = play("deploy.yml", "--check", "--diff")
    assert (run.rc, run.changed) == (0, 0), run.stdout


def test_unknown_revision_is_refused_and_the_old_server_serves_on(node, play):
    before = node.invocation()
    unknown = "0123456789abcdef0123456789abcdef01234567"
    run = play(
        "deploy.yml", extra={"model_store_target": {"repo": "lab/Kimi-K2.5-tiny-cycle", "revision": unknown}}
    )
    assert run.rc != 0
    assert unknown in run.message
    assert "main" in run.message, "the message must name what the hub has"
    assert node.invocation() == before
    assert node.ask("/v1/chat/completions", CHAT)["choices"][0]["message"]["content"] == CYCLE


def test_upgrade_switches_once_and_proves_the_new_release(node, play):
    before = node.invocation()
    run = play("deploy.yml", extra={"lab_checkpoint": "echo"})
    assert run.rc == 0, run.message
    assert node.invocation() != before
    assert gate(node)["acceptance"]["length"] == 4.0


def test_engine_killed_while_it_loads_fails_within_seconds_and_falls_back(node, play_in_background):
    good = node.current()
    before = node.invocation()
    wait = play_in_background("deploy.yml")
    # The new start, once its engine process is there.
    wait_until(lambda: node.invocation() not in ("", before), 180, "the restart")
    wait_until(
        lambda: node.sh("pgrep -f '[s]glang.launch_server'", check=False).returncode == 0,
        60,
        "the engine's process",
    )
    failed = node.current()
    node.sh("pkill -KILL -f '[s]glang.launch_server'")
    killed = time.monotonic()
    # Noticed within seconds: the switch back follows at once, long before the play has proved it.
    wait_until(lambda: node.current() == good, 15, "the switch back")
    assert time.monotonic() - killed < 15
    run = wait(180)
    assert run.rc != 0
    assert failed != good
    assert f"{failed} did not pass" in run.message
    assert f"serves {good} again" in run.message
    assert "status 137" in run.message
    assert node.ask("/v1/chat/completions", CHAT)["choices"][0]["message"]["content"] == ECHO


def test_the_next_deploy_recovers(node, play):
    run = play("deploy.yml")
    assert run.rc == 0, run.message
    assert gate(node)["acceptance"]["length"] == 2.0


def test_a_useless_drafter_is_refused_and_the_server_falls_back(node, play):
    good = node.current()
    run = play("deploy.yml", extra={"lab_checkpoint": "random"})
    assert run.rc != 0
    assert "speculation" in run.message.lower(), run.message
    assert node.current() == good
    assert node.ask("/v1/chat/completions", CHAT)["choices"][0]["message"]["content"] == CYCLE


def test_status_tells_what_runs(node, play):
    run = play("playbooks/status.yml")
    assert (run.rc, run.changed) == (0, 0)
    assert node.current().rsplit("/", 1)[1] in run.stdout
    assert "acceptance length 2.0" in run.stdout
    assert "everything is as it was left" in run.stdout


def test_rollback_puts_the_release_before_back_and_proves_it(node, play):
    present = node.current()
    before = node.sh("readlink /opt/sglang/previous-good").stdout.strip()
    run = play("playbooks/rollback.yml")
    assert run.rc == 0, run.message
    assert node.current() == before != present
    assert node.ask("/v1/chat/completions", CHAT)["choices"][0]["message"]["content"] == ECHO


def test_engine_that_was_changed_by_hand_is_refused_before_the_load(node, play):
    engine = node.sh("readlink /opt/sglang/current/engine").stdout.strip()
    site = f"{engine}/lib/python3.11/site-packages"
    node.sh(f"cd {site}; mv sglang-0.5.21.dist-info sglang-0.5.22.dist-info")
    try:
        run = play("deploy.yml")
        assert run.rc != 0
        assert f"{engine} is not what was attested" in run.message
        assert "distributions were added: sglang-0.5.22" in run.message
        # A start by hand, or at boot, is refused as well, and not tried again.
        assert node.sh("systemctl restart sglang", check=False).returncode != 0
        assert node.sh("systemctl show -P ExecMainStatus sglang").stdout.strip() == "78"
        assert node.sh("systemctl show -P NRestarts sglang").stdout.strip() == "0"
        assert "sglang-0.5.22" in node.sh("journalctl -u sglang -n 20 -o cat").stdout
    finally:
        node.sh(f"cd {site}; mv sglang-0.5.22.dist-info sglang-0.5.21.dist-info")
    run = play("deploy.yml")
    assert run.rc == 0, run.message
