#!/usr/bin/env python3
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Let all GPUs of this node sum one tensor, and tell how fast, or which GPU is why not.

    allreduce.py --gpus 8 [--at-least GB/s] [--seconds 180]

One process a GPU, under the interpreter that runs this file; it needs PyTorch. Prints one JSON object:
  ok, cause         the verdict, and what is wrong in one sentence (null if nothing is)
  gpu               number of the GPU that the cause is about, in the order of nvidia-smi; null for none
  backend, gpus, mib                 what was asked for
  seconds           of one all-reduce
  algorithm_gbps    bytes of the tensor over seconds, in 10^9 bytes a second
  bus_gbps          the same times 2(n-1)/n for n GPUs, as nccl-tests computes it
  ranks             one entry a GPU: gpu, pid, stage, name of the board, died (how), errors (its last lines)
  nccl              version of NCCL, null without it
Progress goes to stderr. Exit status 0: right and fast enough; 1: not; 2: wrong arguments.
Settings of NCCL come from the environment, as for the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

# How far a rank has come, in this order, and what it has done to come there.
STAGES = ("started", "device", "joined", "summed", "measured", "done")
MEANINGS = {
    "device": "to load PyTorch and to compute alone",
    "joined": "to find the other GPUs",
    "summed": "to sum with the other GPUs",
    "measured": "to sum many times",
    "done": "to leave the group",
}
WARM_UP = 5
LAST_LINES = 8
# The last line of a traceback: the exception and what it says.
RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception): .")


def bus_gbps(size, seconds, gpus):
    """Return algorithm and bus bandwidth of one all-reduce of `size` bytes, in 10^9 bytes a second."""
    algorithm = size / seconds / 1e9
    return algorithm, algorithm * 2 * (gpus - 1) / gpus


def died_of(returncode):
    """Return how a process ended, in words."""
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"ended with status {returncode}"


def process_state(pid):
    """Return the state letter of a process (R, S, D, T, ...), None if it has ended."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return stat.rpartition(")")[2].split()[0]
    except OSError:
        return None


def blame_death(ranks):
    """Return the rank whose death explains the others': a signal first, then the earliest."""
    dead = [rank for rank in ranks if rank["died"]]
    return min(dead, key=lambda rank: (not rank["died"].startswith("killed"), rank["ended"] or 0))


def blame_hang(ranks):
    """Return the ranks that explain a hang: those behind the others, else those that do not run."""
    reached = [STAGES.index(rank["stage"]) for rank in ranks]
    behind = [rank for rank, stage in zip(ranks, reached) if stage == min(reached)]
    if len(behind) < len(ranks):
        return behind
    return [rank for rank in ranks if rank["state"] in ("D", "T")]


def named(rank):
    return f"GPU {rank['gpu']}" + (f" ({rank['name']})" if rank["name"] else "")


def cause_of_death(rank):
    # CUDA's errors go on for lines of general advice.
    raised = [line for line in rank["errors"] if RAISED.match(line)]
    last = (raised or rank["errors"] or ["it said nothing"])[-1]
    after = STAGES.index(rank["stage"]) + 1
    trying = MEANINGS[STAGES[min(after, len(STAGES) - 1)]]
    return f"the process of {named(rank)} was {rank['died']} while it tried {trying}: {last}".replace(
        "was ended", "ended"
    )


def cause_of_hang(ranks, guilty, seconds):
    after = STAGES.index(min((rank["stage"] for rank in ranks), key=STAGES.index)) + 1
    trying = MEANINGS[STAGES[min(after, len(STAGES) - 1)]]
    who = ", ".join(named(rank) for rank in guilty) or "all GPUs"
    held = {rank["state"] for rank in guilty} & {"D", "T"}
    how = " (held by the kernel)" if "D" in held else " (stopped)" if "T" in held else ""
    return f"after {seconds} s {who}{how} still tried {trying}; the processes were ended"


class Parent:
    """Starts the ranks, listens to them, and ends them all with the cause of the first that fails."""

    def __init__(self, options):
        self.options = options
        self.said = queue.Queue()
        self.ranks = []
        self.processes = []

    def start(self, store):
        environment = {
            **os.environ,
            # The numbers are those of nvidia-smi, and nothing leaves the node.
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "PYTHONUNBUFFERED": "1",
            # The engine's tree stays as it was staged.
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        passed = {name: getattr(self.options, name) for name in ("gpus", "backend", "mib", "rounds")}
        own = [sys.executable, str(pathlib.Path(__file__).resolve()), f"--store={store}"]
        own += [f"--{name}={value}" for name, value in passed.items()]
        for number in range(self.options.gpus):
            process = subprocess.Popen(
                [*own, f"--rank={number}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,
            )
            self.processes.append(process)
            self.ranks.append(
                {
                    "gpu": number,
                    "pid": process.pid,
                    "stage": STAGES[0],
                    "name": None,
                    "died": None,
                    "ended": None,
                    "state": None,
                    "errors": [],
                    "result": {},
                }
            )
            print(f"GPU {number} (pid {process.pid}): started", file=sys.stderr, flush=True)
            for stream in ("stdout", "stderr"):
                threading.Thread(target=self.listen, args=(number, stream), daemon=True).start()

    def listen(self, number, stream):
        for line in getattr(self.processes[number], stream):
            self.said.put((number, stream, line.rstrip("\n")))

    def hear(self, seconds):
        """Take in what the ranks said within the given seconds."""
        try:
            number, stream, line = self.said.get(timeout=seconds)
        except queue.Empty:
            return
        rank = self.ranks[number]
        if stream == "stderr":
            if line.strip():
                rank["errors"] = [*rank["errors"], line.strip()][-LAST_LINES:]
            return
        try:
            news = json.loads(line)
        except ValueError:
            return
        if isinstance(news, dict) and news.get("stage") in STAGES:
            rank["stage"] = news["stage"]
            rank["name"] = news.get("name", rank["name"])
            rank["result"].update(news.get("result", {}))
            print(f"GPU {number} (pid {rank['pid']}): {rank['stage']}", file=sys.stderr, flush=True)

    def look(self):
        """Take in which ranks have ended; returns whether one failed."""
        for rank, process in zip(self.ranks, self.processes):
            if process.poll() is not None and rank["ended"] is None:
                rank["ended"] = time.monotonic()
                if process.returncode:
                    rank["died"] = died_of(process.returncode)
        return any(rank["died"] for rank in self.ranks)

    def watch(self):
        """Wait for the end; returns the cause and the GPU of a failure, or None twice."""
        limit = time.monotonic() + self.options.seconds
        while time.monotonic() < limit:
            self.hear(0.1)
            if self.look():
                # The others fail of it a moment later; what they all say last is still on its way.
                settled = time.monotonic() + 1
                while time.monotonic() < settled:
                    self.hear(0.1)
                    self.look()
                guilty = blame_death(self.ranks)
                return cause_of_death(guilty), guilty["gpu"]
            if all(rank["ended"] for rank in self.ranks) and self.said.empty():
                return None, None
        for rank in self.ranks:
            rank["state"] = process_state(rank["pid"])
        guilty = blame_hang(self.ranks)
        cause = cause_of_hang(self.ranks, guilty, self.options.seconds)
        return cause, guilty[0]["gpu"] if guilty else None

    def end(self):
        """End what still runs, and take away the segments of NCCL that it left."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def run(self):
        """Return the report as a dict."""
        before = segments()
        with tempfile.TemporaryDirectory() as folder:
            try:
                self.start(str(pathlib.Path(folder, "store")))
                cause, gpu = self.watch()
            finally:
                self.end()
                for path in segments() - before:
                    path.unlink()
        return report(self.options, self.ranks, cause, gpu)


def segments():
    """Return the shared-memory segments of NCCL; the GPUs are nobody else's while this runs."""
    return set(pathlib.Path("/dev/shm").glob("nccl-*"))


def report(options, ranks, cause, gpu):
    """Put the report together; `cause` is None if all ranks came to their end."""
    answer = {"ok": False, "cause": cause, "gpu": gpu, "backend": options.backend, "gpus": options.gpus}
    answer.update(mib=options.mib, seconds=None, algorithm_gbps=None, bus_gbps=None, nccl=None)
    wrong = [rank for rank in ranks if rank["result"].get("wrong")]
    if cause is None and wrong:
        first = wrong[0]
        answer["gpu"] = first["gpu"]
        answer["cause"] = f"the sum on {named(first)} is wrong: {first['result']['wrong']}"
    elif cause is None:
        # As nccl-tests: the mean of all ranks.
        seconds = sum(rank["result"]["seconds"] for rank in ranks) / len(ranks)
        algorithm, bus = bus_gbps(options.mib * 2**20, seconds, options.gpus)
        answer.update(seconds=seconds, algorithm_gbps=round(algorithm, 2), bus_gbps=round(bus, 2))
        answer["nccl"] = ranks[0]["result"].get("nccl")
        if bus < options.at_least:
            answer["cause"] = f"bus bandwidth is {bus:.1f} GB/s, expected at least {options.at_least:g} GB/s"
    answer["ok"] = answer["cause"] is None
    told = ("gpu", "pid", "stage", "name", "died", "errors")
    answer["ranks"] = [{key: rank[key] for key in told} for rank in ranks]
    for rank in answer["ranks"]:
        # What a rank said that came to its end are warnings.
        rank["errors"] = [] if rank["stage"] == "done" else rank["errors"]
    return answer


def follow_parent():
    """End with the parent: its end of the pipe closes when it dies."""
    sys.stdin.read()
    os._exit(3)


def tell(stage, **more):
    print(json.dumps({"stage": stage, **more}), flush=True)


def be_rank(options):
    """What each process does: compute alone, join, sum, measure."""
    threading.Thread(target=follow_parent, daemon=True).start()
    import torch
    import torch.distributed as dist

    on_gpu = options.backend == "nccl"
    device = torch.device("cuda", options.rank) if on_gpu else torch.device("cpu")
    name = None
    if on_gpu:
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name(device)
    tensor = torch.full((options.mib * 2**18,), options.rank + 1.0, dtype=torch.float32, device=device)
    alone = (tensor * 2).sum(dtype=torch.float64).item()
    if alone != 2.0 * (options.rank + 1) * tensor.numel():
        raise SystemExit(f"a sum on the GPU alone is wrong: {alone}")
    tell("device", name=name)

    def synchronise():
        if on_gpu:
            torch.cuda.synchronize(device)

    dist.init_process_group(
        options.backend, init_method=f"file://{options.store}", rank=options.rank, world_size=options.gpus
    )
    dist.barrier(device_ids=[options.rank] if on_gpu else None)
    synchronise()
    tell("joined")

    def wrong():
        tensor.fill_(options.rank + 1.0)
        dist.all_reduce(tensor)
        expected = options.gpus * (options.gpus + 1) / 2
        least, most = tensor.min().item(), tensor.max().item()
        return None if least == most == expected else f"found {least:g} to {most:g}, expected {expected:g}"

    found = wrong()
    tell("summed")
    # Sums of zeros stay zeros, however often.
    tensor.zero_()
    for _ in range(WARM_UP):
        dist.all_reduce(tensor)
    synchronise()
    begin = time.perf_counter()
    for _ in range(options.rounds):
        dist.all_reduce(tensor)
    synchronise()
    seconds = (time.perf_counter() - begin) / options.rounds
    found = found or wrong()
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version()) if on_gpu else None
    tell("measured", result={"seconds": seconds, "wrong": found, "nccl": nccl})
    dist.barrier(device_ids=[options.rank] if on_gpu else None)
    dist.destroy_process_group()
    tell("done")


def parse(arguments):
    parser = argparse.ArgumentParser(description="All-reduce over all GPUs of this node.")
    parser.add_argument("--gpus", type=int, required=True, help="number of GPUs, two or more")
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl", help="gloo: on the CPU")
    parser.add_argument("--mib", type=int, default=1024, help="size of the tensor in MiB")
    parser.add_argument("--rounds", type=int, default=20, help="all-reduces that are measured")
    parser.add_argument("--seconds", type=int, default=180, help="bound of the whole check")
    parser.add_argument("--at-least", type=float, default=0.0, help="bus bandwidth to reach, in GB/s")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.gpus < 2:
        parser.error("--gpus has to be 2 or more: one GPU has nobody to sum with")
    if min(options.mib, options.rounds, options.seconds) < 1:
        parser.error("--mib, --rounds and --seconds have to be 1 or more")
    return options


def main(arguments=None):
    options = parse(arguments)
    if options.rank is not None:
        be_rank(options)
        return 0
    # A parent that is asked to end takes its ranks with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    answer = Parent(options).run()
    print(json.dumps(answer, indent=2))
    return 0 if answer["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
