"""The diagnoses as data: well-formed, and right about real logs."""

import pathlib
import re

import pytest
import yaml
from ansible.module_utils.sglang_kit.diagnoses import CONDITIONS, CONSEQUENCE, diagnose, telling_lines
from ansible.module_utils.sglang_kit.startup_log import PHASES

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOGS = pathlib.Path(__file__).parent / "data" / "logs"
DIAGNOSES = yaml.safe_load((ROOT / "roles/sglang_gate/vars/main/diagnoses.yml").read_text())[
    "__sglang_gate_diagnoses"
]

DEATHS = yaml.safe_load((LOGS.parent / "deaths.yml").read_text(encoding="utf-8"))


def unit(status=137, result="exit-code"):
    return {"exit_status": status, "result": result, "exit_code": 1}


def lines_of(name):
    return (LOGS / name).read_text(encoding="utf-8").split("\n")


def causes(lines, **ended):
    return [entry["id"] for entry in diagnose(DIAGNOSES, unit(**ended), lines)]


# What a person would name, given the whole log and how it ended.
@pytest.mark.parametrize(
    "name, status, expected",
    [
        ("0.5.9-cpu-methods-missing.log", 137, "eagle3_methods_missing"),
        ("0.5.17-method-missing.log", 137, "eagle3_methods_missing"),
        ("0.5.9-cpu-no-triton-driver.log", 137, "no_cpu_path"),
        ("0.5.17-truncated-shard.log", 137, "shard_truncated"),
        ("0.5.17-missing-shard.log", 137, "shard_missing"),
        ("0.5.17-drafter-missing.log", 1, "model_path_missing"),
        ("0.5.17-drafter-without-config.log", 1, "model_config_missing"),
        ("0.5.17-gpu-memory-held.log", 137, "gpu_memory_held"),
        ("0.5.17-package-missing.log", 137, "deep_gemm_missing"),
        ("0.5.17-port-taken.log", 3, "port_taken"),
        ("0.5.17-tp2-scheduler-killed.log", 137, "child_died"),
        ("gpu-tp2-launcher-scheduler-killed.log", 137, "child_killed"),
    ],
)
def test_the_cause_of_a_real_death(name, status, expected):
    assert causes(lines_of(name), status=status) == [expected]


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: "+".join(death["causes"]) or "none")
def test_the_causes_of_a_death(death):
    ended = dict(unit(death.get("status", 137), death.get("result", "exit-code")))
    ended["load_state"] = death.get("load_state", "loaded")
    found = diagnose(
        DIAGNOSES,
        ended,
        death.get("lines", []),
        kernel=death.get("kernel", []),
        phase=death.get("phase", "loading_weights"),
        verdict=death.get("verdict", "dead"),
    )
    assert [entry["id"] for entry in found] == death["causes"]


def test_every_entry_is_named_for_some_death():
    named = {name for death in DEATHS for name in death["causes"]}
    assert {entry["id"] for entry in DIAGNOSES} == named


def test_what_other_causes_lead_to_is_not_named_beside_them():
    lines = [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB.",
        "RuntimeError: [../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:40123",
        "[2026-01-01 00:00:00] Initialization failed. warmup error: Traceback (most recent call last):",
    ]
    assert causes(lines) == ["gpu_out_of_memory"]


def test_a_start_that_serves_fits_no_cause():
    for name in ("0.5.21-cpu-serves-then-sigterm.log", "0.5.17-load-32-shards.log"):
        assert causes(lines_of(name), status=0, result="success") == []


def test_the_matched_line_is_handed_on():
    found = diagnose(DIAGNOSES, unit(), lines_of("0.5.17-missing-shard.log"))
    assert "references 1 shard file(s) missing" in found[0]["line"]


@pytest.mark.parametrize("entry", DIAGNOSES, ids=lambda entry: entry["id"])
def test_each_entry_is_complete(entry):
    assert {"id", "cause", "remedy", "source"} <= set(entry)
    assert set(entry) - {"id", "cause", "remedy", "source", "follows", "ends"} <= set(CONDITIONS)
    assert set(entry) & set(CONDITIONS)
    re.compile(entry.get("match", ""))
    re.compile(entry.get("kernel", ""))
    assert set(entry.get("phase", [])) <= set(PHASES)


def test_ids_are_unique():
    ids = [entry["id"] for entry in DIAGNOSES]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    "name, first, says",
    [
        (
            "0.5.9-cpu-methods-missing.log",
            "Scheduler hit an exception",
            "has no attribute 'set_eagle3_layers",
        ),
        ("0.5.17-truncated-shard.log", "Scheduler hit an exception", "incomplete metadata"),
        ("0.5.17-drafter-missing.log", "Traceback", "OSError: We couldn't connect"),
        ("0.5.17-tp2-scheduler-killed.log", "TP1] Scheduler hit an exception", "Connection reset by peer"),
    ],
)
def test_the_telling_lines_are_the_exception(name, first, says):
    telling = telling_lines(lines_of(name))
    assert first in telling[0]
    assert any(says in line for line in telling)
    assert len(telling) <= 10


def test_without_an_exception_the_last_lines_tell():
    telling = telling_lines(lines_of("0.5.17-port-taken.log"))
    assert any("[Errno 98]" in line for line in telling)
    assert not any("kill_process_tree" in line for line in telling)


def test_a_traceback_that_every_start_may_have_tells_nothing():
    # Without a warm-up the engine posts /freeze_gc to itself too early, and logs that at length.
    telling = telling_lines(lines_of("0.5.21-cpu-serves-then-sigterm.log"))
    assert not any("freeze_gc" in line for line in telling)
    assert "Finished server process" in telling[-1]


def test_the_usage_of_the_parser_tells_nothing():
    lines = [
        "usage: sglang serve [-h] --model-path MODEL_PATH",
        "                    [--tokenizer-path TOKENIZER_PATH]",
        "sglang serve: error: unrecognized arguments: --bogus",
    ]
    assert telling_lines(lines) == lines[-1:]


def test_no_lines_tell_nothing():
    assert telling_lines([]) == []


def test_the_first_process_that_fails_tells_and_not_the_one_that_it_took_along():
    before = "[2026-01-01 00:00:00 TP0] Load weight begin. avail mem=1.00 GB"
    death = "launcher: the engine's process sglang::scheduler_TP3 (pid 17) was killed by signal 9"
    survivor = [
        "[2026-01-01 00:00:01 TP1] Scheduler hit an exception: Traceback (most recent call last):",
        "  File x",
        "RuntimeError: Connection closed by peer",
    ]
    told = [before, death, CONSEQUENCE, *survivor]
    assert telling_lines([before, death, *survivor]) == told
    # The launcher looks twice a second, so a survivor may be the first to say something.
    assert telling_lines([before, *survivor, death]) == told


def test_a_process_killed_on_two_gpus_is_the_cause_and_the_survivors_error_a_consequence():
    lines = lines_of("gpu-tp2-launcher-scheduler-killed.log")
    death = "launcher: the engine's process sglang::scheduler_TP1 (pid 1064) was killed by signal 9"
    survivor = next(i for i, line in enumerate(lines) if "Scheduler hit an exception" in line)
    assert survivor < lines.index(death)
    (found,) = diagnose(DIAGNOSES, unit(), lines)
    assert (found["id"], found["line"]) == ("child_killed", death)
    told = telling_lines(lines)
    assert len(told) <= 10
    assert not any("Decode batch" in line or "HTTP/1.1" in line for line in told)
    assert told.index(death) < told.index(CONSEQUENCE) < told.index(lines[survivor])
    assert "Connection reset by peer" in " ".join(told[told.index(lines[survivor]) :])
