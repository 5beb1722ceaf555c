"""The all-reduce check: how it computes, whom it blames. With PyTorch: tests/scenarios/test_allreduce.py."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "roles/gpu_node/files/allreduce.py"
spec = importlib.util.spec_from_file_location("allreduce", SCRIPT)
allreduce = importlib.util.module_from_spec(spec)
spec.loader.exec_module(allreduce)


def rank(gpu, stage, **more):
    base = {"gpu": gpu, "pid": 100 + gpu, "stage": stage, "name": None, "died": None, "ended": None}
    return {**base, "state": "R", "errors": [], "result": {}, **more}


def options(**more):
    return allreduce.parse(["--gpus", "8", *(f"--{name}={value}" for name, value in more.items())])


@pytest.mark.parametrize(
    ("gpus", "size", "seconds", "bus"),
    [
        # Rows of nccl-tests' own output: 8 GiB and 1 GiB on 72 GB200 (coreweave/nccl-tests#43).
        (72, 8589934592, 20299e-6, 834.57),
        (72, 1073741824, 3108.8e-6, 681.17),
        # Two GPUs: bus and algorithm are the same (nccl-tests#44).
        (2, 134217728, 3298.6e-6, 40.69),
    ],
)
def test_bandwidth_is_that_of_nccl_tests(gpus, size, seconds, bus):
    assert allreduce.bus_gbps(size, seconds, gpus)[1] == pytest.approx(bus, rel=1e-3)


def test_a_killed_rank_explains_those_that_failed_of_it():
    ranks = [
        rank(0, "summed", died="ended with status 1", ended=5.0),
        rank(1, "summed", died="killed by SIGKILL", ended=5.2),
        rank(2, "summed"),
    ]
    assert allreduce.blame_death(ranks)["gpu"] == 1


def test_among_failures_the_first_one_explains_the_others():
    ranks = [
        rank(0, "device", died="ended with status 1", ended=5.3),
        rank(1, "started", died="ended with status 1", ended=5.0),
    ]
    assert allreduce.blame_death(ranks)["gpu"] == 1


def test_the_cause_is_the_exception_and_not_the_advice_after_it():
    said = [
        'File "allreduce.py", line 1, in run',
        "torch.AcceleratorError: CUDA error: invalid device ordinal",
        "GPU device may be out of range, do you have enough GPUs?",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    ]
    cause = allreduce.cause_of_death(rank(2, "started", died="ended with status 1", errors=said))
    assert cause == (
        "the process of GPU 2 ended with status 1 while it tried to load PyTorch and to compute alone: "
        "torch.AcceleratorError: CUDA error: invalid device ordinal"
    )
    cause = allreduce.cause_of_death(rank(2, "started", died="ended with status 1", errors=said[:1]))
    assert cause.endswith(said[0])


def test_a_rank_behind_the_others_explains_a_hang():
    ranks = [rank(0, "joined"), rank(1, "device", name="NVIDIA B200"), rank(2, "joined")]
    guilty = allreduce.blame_hang(ranks)
    assert [entry["gpu"] for entry in guilty] == [1]
    assert allreduce.cause_of_hang(ranks, guilty, 300) == (
        "after 300 s GPU 1 (NVIDIA B200) still tried to find the other GPUs; the processes were ended"
    )


def test_of_equals_the_one_that_the_kernel_holds_explains_a_hang():
    ranks = [rank(0, "joined"), rank(1, "joined"), rank(2, "joined", state="D")]
    guilty = allreduce.blame_hang(ranks)
    assert "GPU 2 (held by the kernel) still tried to sum with" in allreduce.cause_of_hang(ranks, guilty, 9)


def test_a_hang_that_nobody_explains_names_no_gpu():
    ranks = [rank(0, "joined"), rank(1, "joined")]
    assert allreduce.blame_hang(ranks) == []
    assert "all GPUs still tried to sum with the other GPUs" in allreduce.cause_of_hang(ranks, [], 9)


def test_a_slow_fabric_fails_with_both_numbers():
    ranks = [rank(gpu, "done", result={"seconds": 0.02, "wrong": None, "nccl": "2.28.3"}) for gpu in range(8)]
    answer = allreduce.report(options(**{"at-least": 340}), ranks, None, None)
    assert answer["ok"] is False and answer["nccl"] == "2.28.3"
    assert answer["cause"] == "bus bandwidth is 94.0 GB/s, expected at least 340 GB/s"
    assert allreduce.report(options(**{"at-least": 90}), ranks, None, None)["ok"] is True


def test_a_wrong_sum_names_the_gpu():
    ranks = [rank(gpu, "done", result={"seconds": 0.02, "wrong": None}) for gpu in range(8)]
    ranks[5]["result"]["wrong"] = "found 35 to 36, expected 36"
    answer = allreduce.report(options(), ranks, None, None)
    assert answer["ok"] is False and answer["gpu"] == 5
    assert answer["cause"] == "the sum on GPU 5 is wrong: found 35 to 36, expected 36"


def test_without_pytorch_it_fails_at_once_and_leaves_no_process():
    # The environment of the tests has none.
    done = subprocess.run(
        [sys.executable, SCRIPT, "--gpus", "2", "--backend", "gloo"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    answer = json.loads(done.stdout)
    assert done.returncode == 1 and answer["ok"] is False
    assert (
        "ended with status 1 while it tried to load PyTorch and to compute alone: ModuleNotFoundError"
        in answer["cause"]
    )
    assert all(not pathlib.Path(f"/proc/{entry['pid']}").exists() for entry in answer["ranks"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "1"], "--gpus has to be 2 or more"),
        (["--gpus", "2", "--mib", "0"], "have to be 1 or more"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and message in done.stderr
