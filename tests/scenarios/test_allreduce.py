"""The all-reduce check with real PyTorch processes: on the CPU (gloo), one process in place of each GPU."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "roles/gpu_node/files/allreduce.py"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter with the lab's PyTorch."""
    wheels = list((ROOT / ".lab/wheels").glob("torch-*.whl"))
    assert wheels, "the lab has no PyTorch: run tests/run scenarios"
    folder = tmp_path_factory.mktemp("torch")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, str(wheels[0])], check=True)
    return folder / "bin/python"


class Check:
    """A check that runs: its lines of progress, and its report."""

    def __init__(self, python, *arguments):
        self.process = subprocess.Popen(
            [python, "-B", SCRIPT, "--backend", "gloo", "--mib", "1", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pids = {}

    def wait_for(self, gpu, stage):
        """Read on until a rank has come to a stage; returns its pid."""
        for line in self.process.stderr:
            number, pid, reached = re.fullmatch(r"GPU (\d+) \(pid (\d+)\): (\w+)\n", line).groups()
            self.pids[int(number)] = int(pid)
            if (int(number), reached) == (gpu, stage):
                return int(pid)
        raise AssertionError(f"GPU {gpu} never came to {stage}")

    def report(self):
        out, _err = self.process.communicate(timeout=120)
        answer = json.loads(out)
        assert self.process.returncode == (0 if answer["ok"] else 1)
        assert not [entry["pid"] for entry in answer["ranks"] if alive(entry["pid"])]
        return answer


def alive(pid):
    return pathlib.Path(f"/proc/{pid}").exists()


def test_processes_that_work_together(python):
    answer = Check(python, "--gpus", "3", "--at-least", "0.0001").report()
    assert answer["ok"] and answer["cause"] is None
    assert [entry["stage"] for entry in answer["ranks"]] == ["done"] * 3
    expected = 2**20 / answer["seconds"] / 1e9 * 2 * 2 / 3
    assert answer["bus_gbps"] == pytest.approx(expected, abs=0.01)


def test_too_slow(python):
    answer = Check(python, "--gpus", "2", "--at-least", "100000").report()
    assert re.fullmatch(r"bus bandwidth is [\d.]+ GB/s, expected at least 100000 GB/s", answer["cause"])
    assert answer["seconds"] > 0


def test_a_rank_that_dies_in_the_middle_is_named(python):
    check = Check(python, "--gpus", "3", "--rounds", "100000000")
    os.kill(check.wait_for(1, "summed"), signal.SIGKILL)
    answer = check.report()
    assert answer["gpu"] == 1
    assert answer["cause"].startswith(
        "the process of GPU 1 was killed by SIGKILL while it tried to sum many times"
    )


def test_a_rank_that_does_not_come_is_named(python):
    check = Check(python, "--gpus", "3", "--seconds", "20")
    os.kill(check.wait_for(2, "started"), signal.SIGSTOP)
    answer = check.report()
    assert answer["gpu"] == 2
    assert answer["cause"].startswith(
        "after 20 s GPU 2 (stopped) still tried to load PyTorch and to compute alone"
    )


def test_a_rank_that_stops_in_the_middle_is_named(python):
    check = Check(python, "--gpus", "3", "--seconds", "20", "--rounds", "100000000")
    check.wait_for(0, "started")
    seen = set()
    while seen != {0, 1, 2}:
        number, pid, stage = re.match(
            r"GPU (\d+) \(pid (\d+)\): (\w+)", check.process.stderr.readline()
        ).groups()
        check.pids[int(number)] = int(pid)
        if stage == "summed":
            seen.add(int(number))
    os.kill(check.pids[0], signal.SIGSTOP)
    answer = check.report()
    assert (answer["gpu"], answer["seconds"]) == (0, None)
    assert answer["cause"].startswith("after 20 s GPU 0 (stopped) still tried to sum many times")


def test_ranks_end_with_a_parent_that_is_killed(python):
    check = Check(python, "--gpus", "2", "--rounds", "100000000")
    check.wait_for(1, "summed")
    check.process.kill()
    check.process.wait()
    limit = time.monotonic() + 20
    while time.monotonic() < limit and any(map(alive, check.pids.values())):
        time.sleep(0.1)
    assert not [pid for pid in check.pids.values() if alive(pid)]
