# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""A fetch that goes on in a process of its own, and what those who look at it see.

The state lies in one JSON file beside the snapshot: {job, pid, phase, files, files_done, bytes,
bytes_done, rate, eta_s, result}. `rate` is in bytes a second, `eta_s` in seconds or null, `result` null
until the end. The store's lock is held for as long as the process lives.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import threading
import time

from ansible.module_utils.common.text.formatters import bytes_to_human

# Seconds that the rate is taken over, and between two writings of the state.
WINDOW = 20
PERIOD = 1.0


def read_state(path):
    """Return the state; None if there is none."""
    try:
        with open(path, encoding="utf-8") as content:
            return json.load(content)
    except (OSError, ValueError):
        return None


def write_state(path, state):
    with open(path + ".new", "w", encoding="utf-8") as content:
        json.dump(state, content)
    os.rename(content.name, path)


def line(repo_id, state):
    """Say in one line how far a fetch is."""
    done, size = bytes_to_human(max(0, state["bytes_done"])), bytes_to_human(state["bytes"])
    if state["phase"] == "publish":
        return f"{repo_id}: all {state['files']} files are right, bringing them to the disk"
    what = "reading what is there, file" if state["phase"] == "check" else "file"
    text = f"{repo_id}: {what} {state['files_done']} of {state['files']}, {done} of {size}"
    if state["rate"]:
        text += f", {bytes_to_human(state['rate'])}/s"
    if state["eta_s"] is not None:
        text += f", about {state['eta_s'] // 60}:{state['eta_s'] % 60:02d} min left"
    return text


class Progress:
    """Counts, from several threads, and keeps the state's file up to date while the `with` block runs."""

    def __init__(self, path, job):
        self._path = path
        self._state = {"job": job, "pid": os.getpid(), "result": None}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write_on, daemon=True)
        self.phase("check", 0, 0)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def phase(self, name, files, size, files_done=0, bytes_done=0):
        """Begin with "check", "fetch" or "publish", given how much there is to do and is done of it."""
        with self._lock:
            self._state.update(
                phase=name, files=files, files_done=files_done, bytes=size, bytes_done=bytes_done
            )
            self._marks = collections.deque([(time.monotonic(), bytes_done)])

    def gained(self, number):
        with self._lock:
            self._state["bytes_done"] += number

    def file_done(self):
        with self._lock:
            self._state["files_done"] += 1

    def state(self):
        with self._lock:
            now, done = time.monotonic(), self._state["bytes_done"]
            self._marks.append((now, done))
            while now - self._marks[0][0] > WINDOW and len(self._marks) > 2:
                self._marks.popleft()
            since, before = self._marks[0]
            rate = max(0, done - before) / max(now - since, 0.001)
            left = self._state["bytes"] - done
            eta = round(left / rate) if rate and left > 0 else None
            return dict(self._state, rate=round(rate), eta_s=eta)

    def _write_on(self):
        # Whoever looks does without, if the disk is full.
        while True:
            with contextlib.suppress(OSError):
                write_state(self._path, self.state())
            if self._over.wait(PERIOD):
                return


def start(store, work):
    """Run work(progress), which returns the module's result, in a process that outlives this one.

    Returns the job's name. Raises SnapshotError if somebody is at this model.
    """
    job = f"{os.getpid()}-{time.time_ns()}"
    with store.lock() as claim:
        write_state(store.job, Progress(store.job, job).state())
        child = os.fork()
        if child == 0:
            _detach(store, claim, work, job)
        os.waitpid(child, 0)
    return job


def _detach(store, claim, work, job):
    """Become a process without parent and terminal; never returns, as the caller's own ends are not ours."""
    try:
        os.setsid()
        if os.fork() == 0:
            claim()
            nothing = os.open(os.devnull, os.O_RDWR)
            for standard in (0, 1, 2):
                os.dup2(nothing, standard)
            with Progress(store.job, job) as progress:
                result = _outcome(work, progress)
            write_state(store.job, dict(progress.state(), result=result))
    finally:
        os._exit(0)


def _outcome(work, progress):
    try:
        return work(progress)
    except Exception as error:
        # Nobody else would hear of it.
        return {"failed": True, "msg": f"{error}" or repr(error)}


def follow(store, job, wait):
    """Return the job's result, or after `wait` seconds without one {job, progress}; None if it died."""
    deadline = time.monotonic() + wait
    while True:
        # In this order: a process that ends writes its result before it lets go of the lock.
        busy = store.busy()
        state = read_state(store.job)
        ours = state is not None and state["job"] == job
        if ours and state["result"] is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(store.job)
            return state["result"]
        if not busy:
            return None
        if time.monotonic() >= deadline:
            return {"changed": False, "job": job, "progress": state if ours else None}
        time.sleep(0.1)
