"""The log reader and the diagnoses on logs of SGLang 0.5.17 on one and two H200 GPUs (tools/gpu_trial)."""

import pathlib
import re

import pytest
import yaml
from ansible.module_utils.sglang_kit.diagnoses import diagnose
from ansible.module_utils.sglang_kit.startup_log import StartupLog, split_record

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOGS = pathlib.Path(__file__).parent / "data" / "logs"
DIAGNOSES = yaml.safe_load(
    (ROOT / "roles" / "sglang_gate" / "vars" / "main" / "diagnoses.yml").read_text(encoding="utf-8")
)["__sglang_gate_diagnoses"]

TARGET = ["starting", "distributed", "loading_weights/target", "weights_loaded/target"]
BOTH = [*TARGET, "distributed", "loading_weights/drafter", "weights_loaded/drafter", "kv_cache"]
GRAPHS = ["graph_capture/target", "graph_capture/drafter"]
# The road, how the line begins that says that it is lost, the status, the first diagnosis.
STARTS = {
    "gpu-tp1-plain-serves.log": (
        [*TARGET, "kv_cache", "graph_capture/target", "warm_up", "serving", "draining"],
        None,
        137,
        None,
    ),
    "gpu-tp1-launcher-serves-then-stops.log": (
        [*BOTH, *GRAPHS, "warm_up", "serving", "draining"],
        None,
        0,
        None,
    ),
    "gpu-tp2-eagle3-serves.log": ([*BOTH, *GRAPHS, "warm_up", "serving", "draining"], None, 137, None),
    "gpu-tp2-launcher-scheduler-killed.log": (
        [*BOTH, *GRAPHS, "warm_up", "serving"],
        # The rank that outlived the killed one speaks before the launcher.
        "Scheduler hit an exception",
        137,
        "child_killed",
    ),
    "gpu-tp2-launcher-truncated-shard.log": (
        TARGET[:-1],
        "Scheduler hit an exception",
        137,
        "shard_truncated",
    ),
    "gpu-tp2-methods-missing.log": (BOTH, "Scheduler hit an exception", 137, "eagle3_methods_missing"),
    "gpu-tp1-launcher-drafter-mismatch.log": (
        # It is found where the drafter first computes, after both are loaded.
        [*BOTH, *GRAPHS],
        "Scheduler hit an exception",
        137,
        "drafter_of_another_model",
    ),
    "gpu-tp1-port-taken-late.log": ([*BOTH, *GRAPHS, "warm_up"], "[Errno 98]", 3, "port_taken"),
    "gpu-tp2-port-taken-late.log": ([*BOTH, *GRAPHS, "warm_up"], "[Errno 98]", 3, "port_taken"),
    # 14.6 GiB, ended from outside once they were loaded.
    "gpu-tp2-load-by-prefetch.log": ([*TARGET, "kv_cache"], None, 137, None),
}


def text(name):
    # newline="" keeps the carriage returns
    with (LOGS / name).open(newline="", encoding="utf-8") as stream:
        return stream.read()


@pytest.mark.parametrize("name", sorted(STARTS))
def test_the_road(name):
    log = StartupLog(at=0)
    for line in text(name).split("\n"):
        log.feed(line)
    road = [
        step["phase"] + (f"/{step['part']}" if step["phase"].startswith(("load", "weights", "graph")) else "")
        for step in log.history
    ]
    assert road == STARTS[name][0]


@pytest.mark.parametrize("name", sorted(STARTS))
def test_whether_it_is_lost(name):
    log = StartupLog(at=0)
    for line in text(name).split("\n"):
        log.feed(line)
    words = STARTS[name][1]
    assert log.lost.startswith(words) if words else log.lost is None


@pytest.mark.parametrize("name", sorted(name for name, start in STARTS.items() if start[3]))
def test_the_cause(name):
    road, _words, status, wanted = STARTS[name]
    unit = {"result": "exit-code", "exit_status": status, "load_state": "loaded"}
    found = diagnose(DIAGNOSES, unit, split_record(text(name)), phase=road[-1].split("/")[0])
    assert found[0]["id"] == wanted


def test_progress_of_graphs_is_seen_through_the_launcher():
    log = StartupLog(at=0)
    seen = set()
    for line in text("gpu-tp2-launcher-scheduler-killed.log").split("\n"):
        log.feed(line)
        seen.add(log.describe())
    assert "capturing graphs 4/8 (50%)" in seen
    assert "capturing graphs of the drafter 8/8 (100%)" in seen


def test_progress_of_weights_is_not_that_of_their_prefetch():
    log = StartupLog(at=0)
    seen = []
    for line in text("gpu-tp2-load-by-prefetch.log").split("\n"):
        log.feed(line)
        bar = re.fullmatch(r"loading weights (\d+)/(\d+) .*", log.describe())
        if bar:
            seen.append((int(bar[2]), int(bar[1])))
    assert {total for total, _done in seen} == {31}
    assert seen == sorted(seen)
    assert len(set(seen)) > 10
