# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Bringing files of a pinned revision by plain HTTP with ranges (the duties: snapshot_transfer).

A file is one stream, and several files come at once. Whatever breaks a stream, the next one goes on at
the byte where it broke. What ends it all: a hub that says no, a full disk, no new byte for too long.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import os
import random
import re
import shutil
import threading
import time
import urllib.error
import urllib.parse

from . import snapshot, snapshot_http, snapshot_hub
from .snapshot_part import Part

WORK = ".parts"

READ = 1 << 20
# Seconds of silence, and bytes a second on average over as long, that a connection may sink to.
SILENCE = 30
SLOWEST = 16 << 10
LONGEST_WAIT = 60
# A hub whose files are not as long as its listing says is asked again so often.
SIZE_ATTEMPTS = 3


class Broken(Exception):
    """This stream is of no more use; the next one may be."""


class WrongSize(Broken):
    """The file that the hub sends is not as long as it should be."""


class Stopped(Exception):
    """Another file has ended it all."""


class RangeTransfer:
    """Fetches with as many connections at once as there are workers, each with a buffer of 1 MiB.

    peer: address of another node that has the snapshot, asked in the endpoint's place until it fails once;
    what came wrong is never asked of it again. `from_peer` is the number of bytes that it sent
    timeout: seconds without a new byte after which a file counts as lost
    progress: told of bytes by gained(number), negative if they are to come again
    refetched: number of bytes so far that came, or will come, more than once
    """

    def __init__(self, repo_id, revision, endpoint, token, folder, timeout, workers, progress, peer=None):
        self.repo_id = repo_id
        self.endpoint = endpoint
        self.token = token
        self.folder = folder
        self.timeout = timeout
        self.workers = workers
        self.progress = progress
        self.received = self.refetched = self.from_peer = 0
        self._peer = peer
        self._asked = set()
        self._below = f"/{repo_id}/resolve/{revision}/"
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def fetch(self, files):
        """Bring the files to their places; yield each RemoteFile that is there. Raises SnapshotError."""
        self._stop.clear()
        with concurrent.futures.ThreadPoolExecutor(self.workers) as pool:
            # A large file that came last would come alone.
            largest_first = sorted(files, key=lambda file: -file.size)
            running = [pool.submit(self._file, file) for file in largest_first]
            try:
                for done in concurrent.futures.as_completed(running):
                    yield done.result()
            except BaseException as error:
                self._stop.set()
                for one in running:
                    one.cancel()
                if isinstance(error, Stopped):
                    # Whoever stopped it knows why.
                    concurrent.futures.wait(running)
                    error = next(
                        one.exception()
                        for one in running
                        if not one.cancelled() and not isinstance(one.exception(), (Stopped, type(None)))
                    )
                raise error

    def clean(self):
        shutil.rmtree(os.path.join(self.folder, WORK), ignore_errors=True)

    def _count(self, received=0, refetched=0, from_peer=0):
        with self._lock:
            self.received += received
            self.refetched += refetched
            self.from_peer += from_peer

    def _file(self, file):
        if self._stop.is_set():
            raise Stopped
        try:
            part = Part(os.path.join(self.folder, WORK, file.path))
            try:
                self._count(refetched=part.dropped)
                self.progress.gained(part.size)
                self._whole(file, part)
                part.finish(os.path.join(self.folder, file.path))
            finally:
                part.close()
        except OSError as error:
            self._stop.set()
            free = shutil.disk_usage(self.folder).free
            raise snapshot.SnapshotError(
                f"{file.path} cannot be written: {error} ({free} bytes are left on the disk of "
                f"{self.folder}), though there was room at the start. What has come is kept: see what else "
                "writes there, make room and run again."
            ) from error
        except snapshot.SnapshotError:
            self._stop.set()
            raise
        return file

    def _whole(self, file, part):
        """Receive until the part has the file's size; raises SnapshotError if that cannot be."""
        if part.size > file.size:
            self._count(refetched=part.size)
            self.progress.gained(-part.size)
            part.truncate()
        since, attempt, wrong_sizes = time.monotonic(), 0, 0
        peer = None if file.path in self._asked else self._peer
        self._asked.add(file.path)
        while part.size < file.size:
            before = part.size
            try:
                self._receive(file, part, peer)
            except urllib.error.HTTPError as error:
                with contextlib.closing(error):
                    if not peer:
                        reason, wait = self._refusal(file, error), snapshot_http.retry_after(error.headers)
            except (Broken, http.client.HTTPException) as error:
                reason, wait = f"{type(error).__name__}: {error}", None
                wrong_sizes += isinstance(error, WrongSize) and not peer
                if wrong_sizes == SIZE_ATTEMPTS:
                    raise snapshot.SnapshotError(
                        f"{file.path}: {error}. The hub's listing and its files do not agree: try another "
                        "endpoint, or without the proxy."
                    ) from error
            if part.size > before:
                since, attempt = time.monotonic(), 0
            elif peer:
                # No file begins with it any more; this one goes on with the endpoint at once.
                peer = self._peer = None
                continue
            if part.size < file.size:
                attempt += 1
                if wait is None:
                    # Many streams that broke together do not come back together.
                    wait = min(LONGEST_WAIT, 2 ** (attempt - 1)) * random.uniform(0.5, 1)
                self._wait(file, part, reason, wait, since + self.timeout)

    def _wait(self, file, part, reason, wait, deadline):
        if time.monotonic() + wait > deadline:
            raise snapshot.SnapshotError(
                f"no byte of {self.repo_id} came from {self.endpoint} for {self.timeout} s, or it asked to "
                f"wait for longer ({wait:.0f} s): {file.path} stands at {part.size} of {file.size} bytes. "
                f"The last attempt: {reason}. What has come is kept: check the network and run again."
            )
        if self._stop.wait(wait):
            raise Stopped

    def _refusal(self, file, error):
        """Say what an error status is; raises SnapshotError if asking again is of no use."""
        code = error.headers.get("X-Error-Code")
        if error.code < 400:
            raise snapshot.SnapshotError(
                f"{file.path}: {self.endpoint} redirects in a circle, at {_bare(error.url)}. Check endpoint, "
                "and the proxy in between."
            ) from error
        # The address of another host, which the hub gives for a large file, is good for some minutes only.
        elsewhere = snapshot_http.origin(error.url) != snapshot_http.origin(self.endpoint)
        if error.code not in snapshot_http.RETRIED and not elsewhere:
            meaning = snapshot_hub.explain(error.code, code, self.repo_id, self.endpoint, bool(self.token))
            raise snapshot.SnapshotError(f"{file.path} could not be fetched: {meaning}") from error
        return f"{urllib.parse.urlsplit(error.url).netloc} answered {error.code}"

    def _receive(self, file, part, peer):
        """Add to the part what one answer brings; raises Broken, HTTPError or HTTPException at its end."""
        url = (peer or self.endpoint) + self._below + urllib.parse.quote(file.path)
        headers = {"Range": f"bytes={part.size}-"} if part.size else {}
        # The token is the hub's business alone, and its proxy is on the way to it.
        token, proxies = (None, {}) if peer else (self.token, None)
        try:
            answer = snapshot_http.get(url, token, min(SILENCE, self.timeout), headers, proxies)
        except urllib.error.HTTPError:
            raise
        except (OSError, ValueError) as error:
            raise Broken(getattr(error, "reason", error)) from error
        with contextlib.closing(answer):
            skip = self._start(file, part, answer)
            for data in self._read(answer):
                self._count(received=len(data), from_peer=len(data) if peer else 0)
                if skip:
                    # The server knows no ranges: what is there already comes once more.
                    again = min(skip, len(data))
                    self._count(refetched=again)
                    skip, data = skip - again, data[again:]
                part.append(data)
                self.progress.gained(len(data))
                if part.size == file.size:
                    return
        raise Broken(f"the connection ended at byte {part.size} of {file.size}")

    def _start(self, file, part, answer):
        """Return how many bytes of the answer are there already; raises Broken if it does not fit."""
        match = re.match(r"bytes (\d+)-\d+/(\d+)$", answer.headers.get("Content-Range", ""))
        if answer.status == 206 and match:
            start, size = int(match.group(1)), int(match.group(2))
        else:
            length = answer.headers.get("Content-Length", "")
            start, size = 0, int(length) if length.isdigit() else file.size
        if size != file.size:
            raise WrongSize(f"{size} bytes are offered, expected {file.size}")
        if start > part.size:
            raise Broken(f"the answer starts at byte {start}, expected {part.size}")
        return part.size - start

    def _read(self, answer):
        """Yield the pieces of an answer; raises Broken if they come too slowly."""
        since, came = time.monotonic(), 0
        while not self._stop.is_set():
            try:
                data = answer.read1(READ)
            except (OSError, ValueError) as error:
                raise Broken(error) from error
            if not data:
                return
            came += len(data)
            now = time.monotonic()
            if now - since > SILENCE:
                if came < SLOWEST * (now - since):
                    raise Broken(f"only {came} bytes in {now - since:.0f} s")
                since, came = now, 0
            yield data
        raise Stopped


def _bare(url):
    """Return the URL without its query, where a large file's address has its signature."""
    return url.partition("?")[0]
