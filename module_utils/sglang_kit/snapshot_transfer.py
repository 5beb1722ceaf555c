# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Bringing named files of a pinned revision into a folder, by the hub's own client.

Whoever brings them has these duties, so that another way can take this one's place: fetch(files) yields
each RemoteFile once it lies at its path in the folder, or raises SnapshotError; nothing need be right,
since the caller verifies every byte and asks again for what was wrong; clean() removes whatever was left
beside the files, in the folder WORK; `received` and `refetched` count bytes.
"""

from __future__ import annotations

import errno
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

from . import snapshot, snapshot_client, snapshot_hub

# Where the client keeps its own state, in the folder that it fetches into.
WORK = ".cache"


def client_missing():
    """Return why the client cannot be used under this interpreter, or None."""
    if importlib.util.find_spec("huggingface_hub"):
        return None
    return (
        f"{sys.executable} has no huggingface_hub, which fetches the files. Run this task with the "
        "interpreter of the tools environment (ansible_python_interpreter), and create that first."
    )


def folder_bytes(folder):
    """Return the bytes of all files below the folder; files may come and go meanwhile."""
    found = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                found += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return found


class ClientTransfer:
    """Fetches by huggingface_hub in a child process, watched from outside.

    timeout: seconds without a new byte after which the transfer counts as dead
    progress: told of bytes by gained(number)
    """

    def __init__(self, repo_id, revision, endpoint, token, folder, timeout, workers, progress):
        self.job = {
            "repo_id": repo_id,
            "revision": revision,
            "endpoint": endpoint,
            "token": token,
            "folder": folder,
            "workers": workers,
        }
        self.folder = folder
        self.timeout = timeout
        self.progress = progress
        # The client does not tell what came over the wire: whole files are counted.
        self.received = self.refetched = 0
        self._brought = set()

    def fetch(self, files):
        paths = [file.path for file in files]
        # What is asked for again was wrong: the client must forget what it has of it.
        force = not self._brought.isdisjoint(paths)
        self._brought.update(paths)
        self._run(paths, force)
        self.received += snapshot.total(files)
        yield from files

    def _run(self, paths, force):
        self._drop_leftovers()
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            # The program travels as text, as the module may run from an archive. The job, with its
            # token, goes through standard input: arguments and environment can be read by others.
            child = subprocess.Popen(
                [sys.executable, "-c", inspect.getsource(snapshot_client)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                env=self._environment(),
            )
            try:
                child.stdin.write(json.dumps(dict(self.job, paths=paths, force=force)).encode() + b"\n")
                child.stdin.flush()
                self._watch(child)
            except BrokenPipeError:
                child.wait()
            finally:
                child.kill()
                child.wait()
                child.stdin.close()
            output.seek(0)
            errors.seek(0)
            self._judge(child.returncode, output.read(), errors.read().decode(errors="replace"))

    def clean(self):
        shutil.rmtree(os.path.join(self.folder, WORK), ignore_errors=True)

    def _environment(self):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment.update(
            # A cache elsewhere would be copied from without a check.
            HF_HOME=os.path.join(self.folder, WORK, "home"),
            HF_HUB_DISABLE_PROGRESS_BARS="1",
            HF_HUB_DISABLE_TELEMETRY="1",
            HF_HUB_DISABLE_UPDATE_CHECK="1",
        )
        if self.job["endpoint"] != snapshot_hub.DEFAULT_ENDPOINT:
            # A mirror may pass on headers that lead past it.
            environment["HF_HUB_DISABLE_XET"] = "1"
        return environment

    def _drop_leftovers(self):
        """Remove partial files of unique names: the releases that make them never resume from them."""
        for parent, _, names in os.walk(os.path.join(self.folder, WORK)):
            for name in names:
                if re.search(r"\.[0-9a-f]{8}\.incomplete$", name):
                    os.unlink(os.path.join(parent, name))

    def _watch(self, child):
        """Wait for the child; raise SnapshotError once the folder has not grown for too long."""
        seen, since = folder_bytes(self.folder), time.monotonic()
        while True:
            try:
                child.wait(timeout=0.5)
                return
            except subprocess.TimeoutExpired:
                size = folder_bytes(self.folder)
                if size != seen:
                    self.progress.gained(size - seen)
                    seen, since = size, time.monotonic()
                elif time.monotonic() - since > self.timeout:
                    raise snapshot.SnapshotError(
                        f"no byte of {self.job['repo_id']} came from {self.job['endpoint']} for "
                        f"{self.timeout} s. What has come is kept: check the network and run again."
                    ) from None

    def _judge(self, status, output, errors):
        try:
            results = json.loads(output)
        except ValueError:
            last = errors.strip().splitlines()[-1:] or ["it said nothing"]
            raise snapshot.SnapshotError(
                f"the process that fetches the files ended with status {status}: {last[0]}"
            ) from None
        failed = [result for result in results if result["error"]]
        if failed:
            raise snapshot.SnapshotError(self._explain(failed, len(results)))

    def _explain(self, failed, asked):
        path, error = failed[0]["path"], failed[0]["error"]
        what = f"{len(failed)} of {asked} files could not be fetched, first {path}"
        endpoint, repo_id = self.job["endpoint"], self.job["repo_id"]
        if error["errno"] == errno.ENOSPC:
            free = shutil.disk_usage(self.folder).free
            return (
                f"{what}: the disk of {self.folder} is full ({free} bytes left), though there was room at "
                "the start. See what else writes there, make room and run again; what has come is kept."
            )
        if error["status"]:
            meaning = snapshot_hub.explain(error["status"], None, repo_id, endpoint, bool(self.job["token"]))
            return f"{what}: {meaning}"
        return (
            f"{what}: {error['type']}: {error['message']} What has come is kept: check the network between "
            f"this node and {endpoint} and run again."
        )
