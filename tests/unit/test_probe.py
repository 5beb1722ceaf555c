"""What systemd, the journal and HTTP say, turned into an observation; and the module as a whole."""

import json
import os
import pathlib
import pwd
import stat
import types

import pytest
import sglang_probe
from ansible.module_utils.sglang_kit import probe
from ansible.module_utils.sglang_kit.probe_http import Server, parse_url, served_models
from ansible.module_utils.testing import patch_module_args

LOADING = """\
Result=success
NRestarts=0
ExecMainStartTimestampMonotonic=34562000000
ExecMainCode=0
ExecMainStatus=0
MainPID=192
StatusText=loading weights 2/4 (50%)
LoadState=loaded
ActiveState=activating
SubState=start
UnitFileState=enabled
NeedDaemonReload=no
InvocationID=a942d6aaefb6413bb70722b33eb05f7a
"""
ABSENT = """\
Result=success
NRestarts=0
ExecMainStartTimestampMonotonic=0
MainPID=0
StatusText=
LoadState=not-found
ActiveState=inactive
SubState=dead
UnitFileState=
NeedDaemonReload=no
InvocationID=
"""


def entry(message, at=1.0):
    return json.dumps({"MESSAGE": message, "__REALTIME_TIMESTAMP": str(int(at * 1e6)), "PRIORITY": "6"})


def test_a_loading_unit():
    unit = probe.parse_unit(LOADING, 34570.25)
    assert unit["exists"]
    assert (unit["active_state"], unit["sub_state"], unit["main_pid"]) == ("activating", "start", 192)
    assert unit["age_s"] == 8.2
    assert unit["enabled"]
    assert not unit["needs_reload"]
    assert unit["status_text"] == "loading weights 2/4 (50%)"


def test_a_unit_that_does_not_exist():
    unit = probe.parse_unit(ABSENT, 34570.25)
    assert not unit["exists"]
    assert (unit["load_state"], unit["invocation"], unit["age_s"]) == ("not-found", "", None)


def test_a_node_without_systemd():
    unit = probe.parse_unit("", 1.0)
    assert not unit["exists"]
    assert unit["load_state"] == "unknown"


def test_the_journal_in_all_its_forms():
    text = "\n".join(
        [
            entry("plain", 1.5),
            entry([0xE2, 0x96, 0x88, 0x41], 2.0),  # bytes: how journald gives what is no plain text
            entry(None, 3.0),  # null: too long, without --all
            "-- No entries --",
            json.dumps({"__REALTIME_TIMESTAMP": "4000000"}),
        ]
    )
    assert probe.parse_journal(text) == [(1.5, "plain"), (2.0, "\u2588A")]


def test_a_start_is_read_with_its_progress():
    records = [
        (100.0, "Starting sglang.service - SGLang server..."),
        (101.0, "[2026-01-01 00:00:00 TP0] Load weight begin. avail mem=1.00 GB"),
        (110.0, "Multi-thread loading shards:  48% Completed | 57/119 [01:12<01:20,  1.30s/it]"),
    ]
    start = probe.read_start(records, 115.0, active=False)
    assert (start["phase"], start["part"]) == ("loading_weights", "target")
    assert start["described"] == "loading weights 57/119 (48%)"
    assert start["progress_age_s"] == 5.0
    assert [step["at"] for step in start["history"]] == [100.0, 101.0]


def test_systemd_knows_better_than_an_old_journal():
    busy = [(1.0, "[2026-01-01 00:00:00] Decode batch, #running-req: 1, #token: 35")]
    assert probe.read_start(busy, 2.0, active=True)["phase"] == "serving"
    assert probe.read_start(busy, 2.0, active=False)["phase"] == "starting"
    assert probe.read_start([], 2.0, active=True)["described"] == "serving"


def test_no_start_at_all():
    start = probe.read_start([], 2.0, active=False)
    assert start["phase"] is None
    assert start["described"] == "no start in the journal"
    assert start["history"] == []


def test_the_tail_has_no_bars():
    records = [(1.0, "one\rx:  50%|# | 1/2 [00:01<00:01, 1it/s]"), (2.0, "two"), (3.0, "three")]
    assert probe.tail(records, 2) == ["two", "three"]
    assert probe.tail(records, 9) == ["one", "two", "three"]
    assert probe.tail(records, 0) == []


@pytest.mark.parametrize(
    "text, names",
    [
        ('{"object": "list", "data": [{"id": "kimi-k2.5", "object": "model"}]}', ["kimi-k2.5"]),
        ('{"data": []}', []),
        ("<html>", []),
        ('{"error": "no"}', []),
        ("[]", []),
    ],
)
def test_served_models(text, names):
    assert served_models(text) == names


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "https://x", "http://", "http://x/v1", "http://x?y"])
def test_a_url_that_is_none(url):
    with pytest.raises(ValueError, match="expected something like http://127"):
        parse_url(url)


def test_a_closed_port_is_refused():
    assert Server("http://127.0.0.1:1", 1).get("/health").error == "refused"


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Return a function that puts systemctl and journalctl with given output on the PATH."""

    def make(systemctl, journal, **tools):
        for name, text in {"systemctl": systemctl, "journalctl": journal, **tools}.items():
            (tmp_path / (name + ".out")).write_text(text)
            tool = tmp_path / name
            tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/{name}.args\ncat {tmp_path}/{name}.out\n')
            tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return tmp_path

    return make


def run(capsys, **params):
    with patch_module_args(params), pytest.raises(SystemExit):
        sglang_probe.main()
    return json.loads(capsys.readouterr().out)


def test_the_module_observes_a_start(node, capsys):
    journal = entry("[2026-01-01 00:00:00 TP0] Load weight begin. avail mem=1.00 GB") + "\n"
    tools = node(LOADING, journal)
    result = run(capsys, url="http://127.0.0.1:1", log_lines=5)
    assert result["changed"] is False
    assert result["unit"]["active_state"] == "activating"
    assert result["start"]["phase"] == "loading_weights"
    assert result["http"] == {"listening": False, "models_status": None, "models": []}
    assert result["log"] == ["[2026-01-01 00:00:00 TP0] Load weight begin. avail mem=1.00 GB"]
    asked = pathlib.Path(tools / "journalctl.args").read_text()
    assert "--all" in asked.split()
    assert "_SYSTEMD_INVOCATION_ID=a942d6aaefb6413bb70722b33eb05f7a + INVOCATION_ID=a942d6" in asked


def test_the_module_reads_an_earlier_start_when_asked(node, capsys):
    tools = node(LOADING.replace("activating", "active"), entry("launcher: starting /opt/x"))
    result = run(capsys, url="http://127.0.0.1:1", invocation="feed")
    assert "_SYSTEMD_INVOCATION_ID=feed " in pathlib.Path(tools / "journalctl.args").read_text()
    # the unit is active, but that says nothing of the earlier start
    assert result["start"]["phase"] == "starting"


def test_the_module_on_an_empty_node_asks_no_journal(node, capsys):
    tools = node(ABSENT, "")
    result = run(capsys, url="http://127.0.0.1:1")
    assert result["unit"]["exists"] is False
    assert result["start"]["phase"] is None
    assert not (tools / "journalctl.args").exists()


def test_the_module_refuses_a_wrong_url(node, capsys):
    node(ABSENT, "")
    result = run(capsys, url="127.0.0.1:30000")
    assert result["failed"]
    assert "expected something like http://127.0.0.1:30000" in result["msg"]


SMI = """<?xml version="1.0" ?>
<nvidia_smi_log><driver_version>580.1</driver_version><gpu id="00000000:00:06.0">
<fb_memory_usage><total>143771 MiB</total><used>2575 MiB</used></fb_memory_usage>
<processes><process_info><pid>{pid}</pid><process_name>python3</process_name>
<used_memory>2566 MiB</used_memory>
</process_info></processes></gpu></nvidia_smi_log>
"""


def test_the_module_looks_at_the_node_when_asked(node, capsys):
    journal = "\n".join(
        [
            entry("[2026-01-01 00:00:00 TP0] Load weight begin. avail mem=1.00 GB", 1000.0),
            entry("Memory cgroup out of memory: Killed process 17 (python)", 1001.0),
            entry("audit: type=1400 apparmor", 1001.0),
            entry("NVRM: Persistence mode is deprecated and will be removed in a future release.", 1001.0),
        ]
    )
    tools = node(LOADING, journal, **{"nvidia-smi": SMI.replace("{pid}", str(os.getpid()))})
    result = run(capsys, url="http://127.0.0.1:1", node=True)["node"]
    assert result["kernel"] == ["Memory cgroup out of memory: Killed process 17 (python)"]
    assert result["kernel_readable"]
    (gpu,) = result["gpus"]
    (holder,) = gpu.pop("holders")
    assert gpu == {"index": 0, "used_mib": 2575, "total_mib": 143771}
    assert (holder["pid"], holder["name"], holder["memory_mib"]) == (os.getpid(), "python3", 2566)
    assert holder["user"] == pwd.getpwuid(os.getuid()).pw_name
    assert result["shm"]["free_bytes"] <= result["shm"]["total_bytes"]
    # a little before the first line of the start
    assert "--dmesg" in (tools / "journalctl.args").read_text().splitlines()[1]
    assert "--since=@995" in (tools / "journalctl.args").read_text()


def test_a_node_without_gpus_and_without_a_kernel_log(node, capsys):
    tools = node(ABSENT, "")
    (tools / "journalctl").write_text("#!/bin/sh\nexit 1\n")
    result = run(capsys, url="http://127.0.0.1:1", node=True)["node"]
    assert (result["gpus"], result["kernel"], result["kernel_readable"]) == (None, [], False)


def test_an_ill_gpu_is_no_failure_of_the_probe(node, capsys):
    node(LOADING, "", **{"nvidia-smi": "Unable to determine the device handle for GPU0000:1B:00.0"})
    assert run(capsys, url="http://127.0.0.1:1", node=True)["node"]["gpus"] is None


def test_the_module_counts_the_weights_of_the_release(node, capsys, tmp_path):
    node(ABSENT, "")
    (tmp_path / "r1/model").mkdir(parents=True)
    (tmp_path / "current").symlink_to(tmp_path / "r1")
    (tmp_path / "r1/model/a.safetensors").write_bytes(b"x" * 10)
    (tmp_path / "r1/model/b.safetensors").write_bytes(b"x" * 30)
    (tmp_path / "r1/model/config.json").write_text("{}")
    result = run(capsys, url="http://127.0.0.1:1", release=str(tmp_path / "current"))["weights"]
    assert result["target"] == {"files": 2, "bytes": 40, "largest_bytes": 30}
    assert result["drafter"] == {"files": 0, "bytes": 0, "largest_bytes": 0}


@pytest.mark.parametrize(
    "changed, news",
    [
        ({}, False),
        # What moves all the time.
        ({"status_text": "loading weights 3/4 (75%)", "age_s": 99.0}, False),
        ({"active_state": "active", "sub_state": "running"}, True),
        ({"sub_state": "auto-restart", "result": "exit-code"}, True),
        ({"restarts": 1}, True),
        ({"invocation": "another"}, True),
        ({"load_state": "masked"}, True),
    ],
)
def test_what_is_news_of_a_start(changed, news):
    seen = probe.parse_unit(LOADING, 34570.25)
    assert probe.is_news(dict(seen, **changed), seen) is news


def test_the_first_observation_is_news():
    assert probe.is_news(probe.parse_unit(LOADING, 34570.25), None)


@pytest.fixture
def clock(monkeypatch):
    """Simulated time, that of the module; what is called at each sleep is to be set as `then`."""
    clock = types.SimpleNamespace(now=0.0, then=lambda: None)

    def sleep(seconds):
        clock.now += seconds
        clock.then()

    monkeypatch.setattr(sglang_probe.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(sglang_probe.time, "sleep", sleep)
    return clock


def test_the_module_waits_for_news_of_the_unit(node, capsys, clock):
    tools = node(LOADING, entry("launcher: starting /opt/x"))
    ended = LOADING.replace("SubState=start", "SubState=auto-restart")
    clock.then = lambda: clock.now >= 3 and (tools / "systemctl.out").write_text(ended)
    seen = probe.parse_unit(LOADING, 34562.0)
    result = run(capsys, url="http://127.0.0.1:1", seen=seen, wait=8)
    assert result["unit"]["sub_state"] == "auto-restart"
    assert clock.now == 3.0


def test_the_module_does_not_wait_for_ever(node, capsys, clock):
    node(LOADING, entry("launcher: starting /opt/x"))
    result = run(capsys, url="http://127.0.0.1:1", seen=probe.parse_unit(LOADING, 34562.0), wait=8)
    assert result["unit"]["active_state"] == "activating"
    assert clock.now == 8.0


def test_the_module_does_not_wait_for_what_is_news_already(node, capsys, clock):
    node(LOADING, entry("launcher: starting /opt/x"))
    seen = probe.parse_unit(LOADING.replace("InvocationID=a", "InvocationID=b"), 34562.0)
    run(capsys, url="http://127.0.0.1:1", seen=seen, wait=8)
    assert clock.now == 0.0
