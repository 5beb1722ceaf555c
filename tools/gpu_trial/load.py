# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Time the engine's weight load against plain reads of the same files, with a cold and a warm page cache."""

from __future__ import annotations

import concurrent.futures
import ctypes
import itertools
import json
import mmap
import os
import pathlib
import re
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "kit" / "lab" / "checkpoint"), str(HERE / "kit")]

from ansible.module_utils.sglang_kit.startup_log import StartupLog
from server import ARGUMENTS, Start, write_release
from tree import TrialError

SHARDS = 32
LAYERS = 10
# About 1.5 GiB a layer at 32 experts; experts make up nearly all of it.
SHAPE = {"hidden": 4096, "intermediate": 8192, "moe_intermediate": 2048, "heads": 16}
SHAPE.update(q_lora=1536, kv_lora=512, nope_dim=128, rope_dim=64, v_dim=128, vocab=1024)
EXPERT_BYTES = 3 * SHAPE["hidden"] * SHAPE["moe_intermediate"] * 2
BLOCK = 16 << 20
LIBC = ctypes.CDLL(None, use_errno=True)
LONGEST_LOAD_S = 150
LONGEST_DROP_S = 20
# A start, up to the load, of an engine whose files are in the page cache.
SHORTEST_LEFT_S = 50
PREFETCH = {"weight-loader-prefetch-checkpoints": True}
THREADS = "model-loader-extra-config"
# What to do; whether the files are taken out of the page cache before; the engine's arguments, or the number
# of readers and whether they read past the page cache. What matters most comes first: the time may run out.
STEPS = (
    ("plain read", True, (1, False)),
    ("plain read", False, (1, False)),
    ("engine, 8 threads (default)", True, {}),
    ("engine, prefetch", True, PREFETCH),
    ("engine, 1 thread", True, {THREADS: {"enable_multithread_load": False}}),
    ("engine, 8 threads (default)", False, {}),
    ("engine, prefetch by 16 threads", True, dict(PREFETCH, **{"weight-loader-prefetch-num-threads": 16})),
    ("engine, 32 threads", True, {THREADS: {"enable_multithread_load": True, "num_threads": 32}}),
    ("plain read", True, (1, False)),
    ("engine, 8 threads (default)", True, {}),
    ("engine, prefetch", True, PREFETCH),
    ("engine, no mmap, 8 threads", True, {"weight-loader-disable-mmap": True}),
    ("engine, prefetch and 8 threads", True, dict(PREFETCH, **{THREADS: {"enable_multithread_load": True}})),
    ("plain read past the page cache", True, (1, True)),
    ("8 readers at once", True, (8, False)),
    ("8 readers past the page cache", True, (8, True)),
    ("engine, 1 thread", False, {THREADS: {"enable_multithread_load": False}}),
    ("plain read", True, (1, False)),
)


def write_checkpoint(folder, gib):
    """Write a target of about that size; the weights repeat one random block, since only bytes are read."""
    import numpy as np
    from tiny_k25 import config, target, tensors, tokenizer

    class Pool(tensors.Source):
        def __init__(self, seed):
            super().__init__(seed)
            self.pool = super().normal(1 << 20)

        def normal(self, *shape, std=None):
            return np.resize(self.pool, shape)

    experts = max(8, round(gib * 2**30 / (LAYERS - 1) / EXPERT_BYTES / 8) * 8)
    sizes = config.Sizes(layers=LAYERS, experts=experts, shards=SHARDS, **SHAPE)
    folder.mkdir(parents=True)
    token_ids = tokenizer.write(folder, sizes)
    config.write_target(folder, sizes, token_ids)
    source, limit = Pool(0), gib * 2**30 / SHARDS
    weight_map, part, held, number, total = {}, {}, 0, 0, 0

    def flush():
        nonlocal part, held, number, total
        number += 1
        name = f"model-{number:05d}-of-{SHARDS:06d}.safetensors"
        total += tensors.save(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
        part, held = {}, 0

    weights = itertools.chain(target.text(sizes, "echo", source, token_ids), target.vision(sizes, source))
    for name, tensor in weights:
        part[name] = tensor
        held += tensor.nbytes // 2
        if held >= limit:
            flush()
    if part:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def drop_from_cache(files):
    """Take files, and nothing else, out of the page cache; False if they stay there."""
    limit = time.monotonic() + LONGEST_DROP_S
    while True:
        for path in files:
            with path.open("rb") as stream:
                # What is not written yet would stay.
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not any(in_cache(path) for path in files):
            return True
        if time.monotonic() > limit:
            return False
        # An engine that was killed may hold them for a moment.
        time.sleep(0.5)


def in_cache(path):
    """Return True if any page of a file is in memory."""
    # Private, since ctypes wants memory that can be written to.
    access = mmap.PROT_READ | mmap.PROT_WRITE
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, mmap.MAP_PRIVATE, access) as view:
        pages = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(view)
        failed = LIBC.mincore(ctypes.byref(first), ctypes.c_size_t(len(view)), pages)
        # The mapping cannot be closed while something refers to it.
        del first
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {path}")
    return any(page & 1 for page in pages)


def read_file(path, direct):
    """Read a file to its end; direct: past the page cache."""
    # Memory that begins at a page, as direct reads want it.
    with mmap.mmap(-1, BLOCK) as buffer:
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            # What is shorter than asked for is the end; after it a direct read would not be aligned.
            while os.readv(fd, [buffer]) == BLOCK:
                pass
        finally:
            os.close(fd)


def read_all(files, readers, direct):
    """Read the files; return the seconds."""
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(readers) as pool:
        list(pool.map(lambda path: read_file(path, direct), files))
    return round(time.monotonic() - begun, 2)


def load_once(trial, name, checkpoint, port, changed):
    """Start the engine until the weights are loaded; return the seconds of its slowest rank, or None."""
    arguments = dict(ARGUMENTS, port=port, **changed)
    arguments.update({"tp-size": trial.gpus, "mem-fraction-static": 0.6, "max-total-tokens": 4096})
    release = trial.work / "releases" / name
    arguments["model-path"] = str(release / "model")
    write_release(release, trial.trees["patched"], checkpoint, arguments)
    log_path = trial.logs / (name + ".log")
    start = Start(release, port, trial.env, log_path, None, StartupLog, trial.lines_class)
    try:
        start.wait(lambda: start.ended() or len(loads(log_path)) == trial.gpus, LONGEST_LOAD_S)
    finally:
        start.clean_up()
    seconds = loads(log_path)
    return max(seconds) if len(seconds) == trial.gpus else None


def loads(log_path):
    """Return the seconds of every rank's load that a log tells (list of float)."""
    text = log_path.read_text(encoding="utf-8", errors="replace")
    return [float(value) for value in re.findall(r"Load weight end\. elapsed=([\d.]+)", text)]


def begin_checkpoint(folder, gib):
    """Begin to write a large checkpoint in a process of its own; return the process."""
    return subprocess.Popen([sys.executable, __file__, str(folder / "target"), str(gib)])


def measure_load(trial, checkpoint, report):
    """Time the steps; report["load"] becomes {"gib", "files", "rows": [{"what", "cold", "seconds"}]}."""
    (checkpoint / "draft").mkdir()
    files = sorted((checkpoint / "target").glob("*.safetensors"))
    gib = sum(path.stat().st_size for path in files) / 2**30
    rows = []
    report["load"] = {"gib": gib, "files": len(files), "rows": rows}
    for number, (what, wants_cold, how) in enumerate(STEPS):
        if trial.left() < SHORTEST_LEFT_S:
            report["skipped"].append(what)
            continue
        cold = wants_cold and drop_from_cache(files)
        if isinstance(how, dict):
            seconds = load_once(trial, f"load_{number}", checkpoint, 31900 + number, how)
        else:
            seconds = read_all(files, *how)
        if seconds is None:
            raise TrialError(f"{what}: the engine has not loaded the weights, see load_{number}.log")
        rows.append({"what": what, "cold": cold, "seconds": seconds})
        print(f"{what}, {'cold' if cold else 'warm'}: {seconds} s; {trial.left():.0f} s left", flush=True)


if __name__ == "__main__":
    write_checkpoint(pathlib.Path(sys.argv[1]), float(sys.argv[2]))
