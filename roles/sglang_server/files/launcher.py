#!/usr/bin/python3 -I
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Run one release of the engine between systemd and its journal, and tell both the truth.

The unit is Type=notify and names /opt/sglang/current; this program resolves that link once, so that a start
is of one release from end to end. It starts the engine as its child and
- turns progress bars into lines, one a second at most (journald makes a record at a newline, never at \\r);
- gives the engine the key that systemd hands over, in a configuration that nobody else can read;
- keeps secrets out of the journal (SGLang prints its whole configuration when it starts);
- tells systemd the phase, and asks for more time only while there is progress;
- does not start an engine that is not what was attested when it was staged, nor one whose port or GPUs
  another process holds;
- says READY when the server's health endpoint answers 200, not before;
- passes SIGTERM to the engine's main process alone, bounds the drain, and ends the engine when no client is
  connected any more: by itself it looks for running requests every five seconds, and loses what comes after;
- on a host of a group that is one server, starts when the launchers of all of them are there and ends when
  one has gone (companions), leaves a stop to rank 0, whose drain ends all of them, and names to NCCL and gloo
  the interface that the group shares;
- ends at once when the engine ends, with the engine's status (128 + n for signal n), and when one of the
  engine's own processes died or it says that the start is lost: its teardown would take half a minute more.

What really runs is written to started.json in the runtime directory: "release" (the resolved path),
"launcher" (sha256 of this program's files in a row), "unit" (sha256 of the unit), "key" (sha256 of
the credential, or null), "invocation" (its id).

Standard library only, Python 3.8 and later.
"""

import argparse
import contextlib
import errno
import hashlib
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # python -I leaves the script's own folder out

import addresses
import attestation
import companions
import redaction
import startup_log

PROGRAM = (
    addresses.__file__,
    attestation.__file__,
    companions.__file__,
    __file__,
    redaction.__file__,
    startup_log.__file__,
)
UNIT = Path("/etc/systemd/system/sglang.service")
# Where the engine's own key lies; it comes from there as a credential of the same name.
KEY_SOURCE = Path("/etc/sglang/credentials/engine-key")
TICK_S = 0.25
BAR_INTERVAL_S = 1.0
HEALTH_INTERVAL_S = 1.0
# Above the engine's own health timeout of 20 s, so that a probe never gives up on a slow answer.
HEALTH_TIMEOUT_S = 25.0
EXTEND_EVERY_S = 10.0
EXTEND_BY_S = 60
# A child of a dead engine can hold the pipe open: read what is there, do not wait for its end.
LAST_WORDS_S = 1.0
BUFFER_LIMIT = 1 << 20
# The driver gives memory back some time after the last process of the server before has ended.
VACANT_S = 60.0
VACANT_INTERVAL_S = 1.0
SMI_TIMEOUT_S = 30.0
# What a GPU without any program may have in use, as in the preflight's rule gpu.holders.
IDLE_GPU_MIB = 1024
# TCP states in /proc/net: established; closing from the client's side, who may still wait for an answer; new.
CONNECTED = ("01", "08", "03")
# Options for pools of pinned host memory or for peers elsewhere. The engine gives both back in an orderly
# end; after SIGKILL the kernel unpins for tens of seconds and holds the GPUs' memory (sglang#31746).
HELD_OUTSIDE = re.compile(
    r"^[a-z0-9-]*(?:hicache|hierarchical-cache|hisparse|lmcache|flexkv|offload|disaggregation)", re.MULTILINE
)
# What the engine says every five seconds of a drain.
IN_FLIGHT = re.compile(r"Remaining number of requests (\d+)")
# Kernels that are compiled at run time are of one engine's code and CUDA.
KERNEL_CACHES = {
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "NUMBA_CACHE_DIR": "numba",
    "SGLANG_CACHE_DIR": "sglang",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "XDG_CACHE_HOME": "xdg",
}
WORKERS_INTERVAL_S = 0.5
# What a lost engine gets for its last words: while it starts, and while it serves, when it may write a dump.
LOST_GRACE_S = 1.5
LOST_SERVING_GRACE_S = 15.0
# EX_CONFIG of sysexits.h; the unit does not restart on it, since another start would find the same.
CHANGED_ENGINE = 78


def sha256(path):
    """Return the hex digest of a file, or None if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def config_scalar(text, key):
    """Return a top-level scalar of a flat YAML map as str, or None. Enough for our own rendered config."""
    match = re.search(r"^" + re.escape(key) + r":[ \t]*(.+?)[ \t]*$", text, re.MULTILINE)
    return match.group(1).strip("'\"") if match else None


def notify(*assignments):
    """Send assignments such as "READY=1" to systemd; does nothing outside of it."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.sendto("\n".join(assignments).encode(), address)
        except OSError as error:
            say(f"cannot notify systemd: {error}")


def write_line(text):
    """Write a line to the journal. The server must outlive a journal that went away."""
    with contextlib.suppress(OSError):
        os.write(1, (text + "\n").encode())


def say(text):
    """Write a line of our own to the journal."""
    write_line(startup_log.LAUNCHER_PREFIX + text)


def oom_kills(membership="/proc/self/cgroup", root="/sys/fs/cgroup"):
    """Return how many processes of the unit the kernel has killed for lack of memory (int).

    Not everywhere does systemd learn of it (cgroup v1), and the kernel's log may be closed to who asks.
    """
    for line in Path(membership).read_text(encoding="utf-8").splitlines():
        _number, controllers, path = line.split(":", 2)
        if controllers == "":
            counters = Path(root + path, "memory.events")
        elif "memory" in controllers.split(","):
            counters = Path(root, "memory" + path, "memory.oom_control")
        else:
            continue
        with contextlib.suppress(OSError):
            match = re.search(r"^oom_kill (\d+)", counters.read_text(encoding="utf-8"), re.MULTILINE)
            if match:
                return int(match.group(1))
    return 0


def taken(host, port):
    """Return why the engine could not listen there (str), or None. Spares a whole load: SGLang binds last."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
                return os.strerror(error.errno)
    return None


def clients(port, folder="/proc/net"):
    """Return how many connections to a local TCP port there are (int); None if nobody can tell."""
    count = None
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(folder, table).read_text(encoding="ascii").splitlines()[1:]]
            here = [row for row in rows if int(row[1].rpartition(":")[2], 16) == port]
            count = (count or 0) + sum(row[3] in CONNECTED for row in here)
    return count


def smi_rows(*query):
    """Return what nvidia-smi answers to a query as rows of str; [] if it is missing or cannot tell."""
    command = ["nvidia-smi", *query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [re.split(r", *", line) for line in done.stdout.splitlines()] if done.returncode == 0 else []


def held_gpus():
    """Return what is held of the GPUs' memory (list of str); [] if nothing is, or nobody can tell."""
    held = [
        (index, uuid, used)
        for index, uuid, used in smi_rows("--query-gpu=index,uuid,memory.used")
        if used.isdigit() and int(used) > IDLE_GPU_MIB
    ]
    # Asking takes seconds with many GPUs, while nobody is served.
    holders = smi_rows("--query-compute-apps=gpu_uuid,pid,used_memory") if held else []
    said = []
    for index, uuid, used in held:
        by = [f"pid {pid} {mib} MiB" for holder, pid, mib in holders if holder == uuid]
        said.append(f"GPU {index} {used} MiB ({', '.join(by) or 'by no process that can be seen'})")
    return said


def shared_interface(address):
    """Return the environment that keeps the ranks' talk on an address's interface; None if none has it.

    Left to itself gloo takes the one that the host's own name leads to, often a loopback one, and NCCL any.
    """
    interface = addresses.interface_of(address, addresses.own_addresses())
    return interface and {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": "=" + interface}


class Lines:
    """Turns the engine's raw output into lines: whole lines at once, progress bars one a second at most."""

    def __init__(self, emit):
        self._emit = emit
        self._pending = b""
        self._bar = None
        self._last_bar = None
        self._bar_at = float("-inf")

    def feed(self, data, now):
        """Take in bytes, at monotonic second `now`."""
        self._pending += data
        while True:
            match = re.search(rb"[\r\n]", self._pending)
            if not match:
                break
            chunk, self._pending = self._pending[: match.start()], self._pending[match.end() :]
            self._take(chunk, now)
        if len(self._pending) > BUFFER_LIMIT:
            chunk, self._pending = self._pending, b""
            self._take(chunk, now)
        # A bar that is being drawn has no end yet.
        pieces = startup_log.split_record(self._pending.decode("utf-8", "replace"))
        if len(pieces) == 1 and startup_log.parse_bar(pieces[0]):
            self._see_bar(pieces[0], now)

    def tick(self, now):
        """Let out a bar that was held back, if its time has come."""
        if self._bar and now - self._bar_at >= BAR_INTERVAL_S:
            self._flush_bar(now)

    def close(self, now):
        """Let out what is left."""
        chunk, self._pending = self._pending, b""
        self._take(chunk, now)
        self._flush_bar(now)

    def _take(self, chunk, now):
        for line in startup_log.split_record(chunk.decode("utf-8", "replace")):
            if startup_log.parse_bar(line):
                self._see_bar(line, now)
            else:
                self._flush_bar(now)
                self._emit(line, now)

    def _see_bar(self, line, now):
        # A frame is seen twice: while it is drawn, and when the next one ends it.
        if line != self._last_bar:
            self._bar = line
            self.tick(now)

    def _flush_bar(self, now):
        bar, self._bar = self._bar, None
        if bar:
            self._last_bar, self._bar_at = bar, now
            self._emit(bar, now)


class Health:
    """Asks the health endpoint in the background, never more than one request in flight.

    answer: the HTTP status of the last answer, or None while nothing listens.
    """

    def __init__(self, host, port):
        self._address = (host, port)
        self._thread = None
        self._next = 0.0
        self.answer = None

    def poll(self, now):
        """Start a request if none is in flight and it is time for one."""
        if self._thread and self._thread.is_alive():
            return
        if self._thread:
            self._thread = None
            self._next = now + HEALTH_INTERVAL_S
        if now >= self._next:
            self._thread = threading.Thread(target=self._ask, daemon=True)
            self._thread.start()

    def _ask(self):
        connection = http.client.HTTPConnection(*self._address, timeout=HEALTH_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            self.answer = connection.getresponse().status
        except (OSError, http.client.HTTPException):
            self.answer = None
        finally:
            connection.close()


class Workers:
    """The processes that the engine starts by multiprocessing: its schedulers and the detokenizer.

    A dead one stays a zombie until the engine asks for it: once a second while it serves, every five seconds
    while it starts (0.5.10 and later), or never. Looking ourselves tells sooner, and tells which one died and
    how. Only of the one that the engine just waits for, mostly rank 0 while it starts, it learns by itself
    within milliseconds, so that no zombie is ever seen; then its own words tell.
    """

    def __init__(self, pid, proc="/proc"):
        self._proc = Path(proc)
        self._threads = self._proc / str(pid) / "task"
        self._names = {}

    def look(self):
        """Return (dead, alive): [(name, pid, status)] of workers that ended badly, and how many live.

        status: exit status, or 128 + n for signal n.
        """
        alive, dead = 0, []
        for children in self._threads.glob("*/children"):
            # A thread or a child may end while it is looked at.
            with contextlib.suppress(OSError):
                for pid in children.read_text().split():
                    status = self._bad_end(pid)
                    if status:
                        dead.append((self._names[pid], int(pid), status))
                    alive += pid in self._names and status is None
        return dead, alive

    def alone(self):
        """Whether there was never more than one."""
        return len(self._names) == 1

    def _bad_end(self, pid):
        """Return the status of a child that has ended (0 if it is no worker), or None if it lives."""
        head, _, tail = (self._proc / pid / "stat").read_text().rpartition(")")
        fields = tail.split()
        if fields[0] != "Z":
            words = (self._proc / pid / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            if words[0].startswith("sglang::"):
                self._names[pid] = words[0].split()[0]
            elif "--multiprocessing-fork" in words:
                self._names[pid] = "worker"
            return None
        if pid in self._names:
            # It may have taken its name after the last look; of a zombie's the kernel keeps 15 characters.
            name = head.partition("(")[2]
            if self._names[pid] == "worker" and name.startswith("sglang::"):
                self._names[pid] = name
            ended = int(fields[49])
            return 128 + os.WTERMSIG(ended) if os.WIFSIGNALED(ended) else os.WEXITSTATUS(ended)
        return 0


class Launcher:
    """One start of one release: run() returns the exit status."""

    def __init__(self, release, drain_s, stall_s=None):
        self.release = Path(release).resolve(strict=True)
        self.drain_s = drain_s
        self.runtime = Path(os.environ.get("RUNTIME_DIRECTORY", "/run/sglang"))
        folder = os.environ.get("CREDENTIALS_DIRECTORY")
        self.credential = Path(folder, KEY_SOURCE.name) if folder else None
        self.config = self.prepare_config()
        text = self.config.read_text(encoding="utf-8")
        self.host = config_scalar(text, "host") or "127.0.0.1"
        self.port = int(config_scalar(text, "port") or 30000)
        # Of one server over several hosts only rank 0 draws progress bars, answers clients and can drain.
        rank, ranks = (int(config_scalar(text, key) or 0) for key in ("node-rank", "nnodes"))
        self.follows = rank > 0
        self.link = None
        # An orderly end of rank 0 is that of all ranks.
        self.ends_orderly = ranks > 1 or bool(HELD_OUTSIDE.search(text))
        if ranks > 1:
            host, _, port = config_scalar(text, "dist-init-addr").rpartition(":")
            self.link = companions.Link((host.strip("[]"), int(port) - 1), ranks, rank)
        if stall_s is None:
            weights = startup_log.weights(self.release / "model")
            stall_s = startup_log.patience(weights["largest_bytes"], weights["bytes"] if self.follows else 0)
        self.stall_s = stall_s
        self.secrets = [
            value for value in (config_scalar(text, key) for key in ("api-key", "admin-api-key")) if value
        ]
        self.log = startup_log.StartupLog(time.monotonic())
        self.lines = Lines(self.emit)
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        self.health = Health(local, self.port)
        self.child = None
        self.workers = None
        self.workers_at = float("-inf")
        self.suspect = None
        self.death = None
        self.lost_at = None
        self.lost_status = None
        self.ready = False
        self.stop_asked = False
        self.stopping_at = None
        self.in_flight = None
        self._status = None
        self._extended_at = float("-inf")
        self._stalled = False

    def prepare_config(self):
        """Return the file that the engine is started with: the release's, with the key from systemd."""
        config = self.release / "server.yaml"
        if not self.credential:
            return config
        key = self.credential.read_text(encoding="ascii").strip()
        if not key:
            # An empty key would open the engine to everybody without a word.
            say(f"the engine's key is empty; remove {KEY_SOURCE} and deploy again")
            raise SystemExit(CHANGED_ENGINE)
        merged = self.runtime / "server.yaml"
        part = self.runtime / "server.yaml.part"
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(f"{config.read_text(encoding='utf-8')}api-key: {json.dumps(key)}\n")
        part.replace(merged)
        return merged

    def emit(self, line, now):
        """Pass one line of the engine on to the journal, and read the phase from it."""
        write_line(redaction.redact(line, self.secrets))
        self.log.feed(line, now)
        left = IN_FLIGHT.search(line)
        if left:
            self.in_flight = int(left.group(1))

    def record_start(self):
        """Write started.json, by which a deploy can tell what really runs."""
        record = {
            "release": str(self.release),
            "launcher": hashlib.sha256(b"".join(Path(path).read_bytes() for path in PROGRAM)).hexdigest(),
            "unit": sha256(UNIT),
            "key": sha256(self.credential) if self.credential else None,
            "invocation": os.environ.get("INVOCATION_ID"),
        }
        part = self.runtime / "started.json.part"
        part.write_text(json.dumps(record) + "\n", encoding="utf-8")
        part.replace(self.runtime / "started.json")

    def run(self):
        """Start the engine and stay until it has ended."""
        self.record_start()
        problems = attestation.verify(str((self.release / "engine").resolve()))
        if problems:
            for problem in problems:
                say(f"the engine is not what was attested: {problem}")
            say("the engine was not started; deploy again, which says how to mend it")
            return CHANGED_ENGINE
        why = taken(self.host, self.port)
        if why:
            say(f"cannot listen on {self.host}:{self.port}: {why}; the engine was not started")
            return 1
        held = self.wait_for_gpus()
        if held:
            say(f"memory of the GPUs is held: {'; '.join(held)}; the engine was not started")
            return 1
        own = os.environ.get("SGLANG_HOST_IP")
        interfaces = shared_interface(own) if own else {}
        if interfaces is None:
            say(f"no interface of this host has {own}, its address in the group; the engine was not started")
            return 1
        signal.signal(signal.SIGTERM, self.on_stop)
        if self.link and not self.gather():
            return 0 if self.stop_asked else 1
        read_end, write_end = os.pipe()
        env = {key: value for key, value in os.environ.items() if key != "NOTIFY_SOCKET"}
        env = {**self.kernel_caches(), **interfaces, **env}
        argv = [
            str(self.release / "engine" / "bin" / "python"),
            "-m",
            "sglang.launch_server",
            "--config",
            str(self.config),
        ]
        say(f"starting {self.release}")
        try:
            self.child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=write_end, stderr=write_end, env=env
            )
        except OSError as error:
            say(f"cannot start {argv[0]}: {error.strerror}")
            return 127 if error.errno == errno.ENOENT else 126
        self.workers = Workers(self.child.pid)
        os.close(write_end)
        os.set_blocking(read_end, False)
        ended_at = None
        while True:
            open_end = self.read(read_end)
            now = time.monotonic()
            if self.child.poll() is not None:
                ended_at = ended_at or now
                # All that the engine itself wrote is in the pipe by now; its children may keep it open.
                if not open_end or now - ended_at >= LAST_WORDS_S or not self.readable(read_end, 0):
                    break
                continue
            self.lines.tick(now)
            self.supervise(now)
            if not open_end:
                time.sleep(TICK_S)  # the engine closed its output but lives
        self.lines.close(time.monotonic())
        return self.exit_status(self.child.returncode)

    def kernel_caches(self):
        """Return the environment that keeps compiled kernels apart by engine; {} outside of systemd."""
        caches = os.environ.get("CACHE_DIRECTORY")
        if not caches:
            return {}
        folder = Path(caches, (self.release / "engine").resolve().name)
        return {variable: str(folder / name) for variable, name in KERNEL_CACHES.items()}

    def gather(self):
        """Wait until the launchers of the whole group are there; False if this one is to end instead."""

        def waiting(missing):
            if missing != waiting.said:
                waiting.said = missing
                say(f"waiting for {missing} of the group")
                notify(f"STATUS=waiting for {missing} of the group")
            # However long it takes: no engine is started, and nothing is spent.
            self.extend(time.monotonic())
            return not self.stop_asked

        waiting.said = None
        try:
            return self.link.gather(waiting)
        except OSError as error:
            host, port = self.link.address
            say(f"cannot listen on {host}:{port} for the group: {error.strerror}; the engine was not started")
            return False

    @staticmethod
    def wait_for_gpus():
        """Wait until the GPUs' memory is free; return what is still held at the bound (list of str)."""
        limit = time.monotonic() + VACANT_S
        while True:
            held = held_gpus()
            if not held or time.monotonic() >= limit:
                return held
            notify("STATUS=waiting for memory of the GPUs: " + "; ".join(held))
            time.sleep(VACANT_INTERVAL_S)

    @staticmethod
    def readable(fd, timeout):
        """True if a read would return at once."""
        return bool(select.select([fd], [], [], timeout)[0])

    def read(self, fd):
        """Read what there is, waiting one tick at most; False at the end of the stream."""
        if self.readable(fd, TICK_S):
            try:
                data = os.read(fd, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.lines.feed(data, time.monotonic())
        return True

    def supervise(self, now):
        """Tell systemd what is true now; pass on a stop, and bound its drain."""
        if self.stop_asked and self.stopping_at is None:
            self.stopping_at = now
            if self.follows and self.ready:
                # A signal here would cut off the requests that rank 0 still drains.
                notify("STOPPING=1", "STATUS=waiting for rank 0 to stop the group")
                return
            # To the main process alone: SGLang takes a signal to its children for a crash.
            notify("STOPPING=1", "STATUS=draining")
            if self.drained():
                return
            self.child.send_signal(signal.SIGTERM)
        if self.deserted():
            return
        if self.stopping_at is not None:
            if self.stopping_at == float("inf") or ((self.follows or not self.ready) and self.lost(now)):
                return  # there is nothing to drain
            if self.drained():
                return
            if now - self.stopping_at >= self.drain_s:
                if self.follows:
                    say(f"rank 0 did not stop the group within {self.drain_s:.0f} s; not waiting any longer")
                else:
                    lost = "requests" if self.in_flight is None else f"{self.in_flight} requests"
                    say(f"still draining after {self.drain_s:.0f} s, {lost} in flight are lost")
                self.child.kill()
                self.stopping_at = float("inf")
            return
        if self.lost(now):
            return
        if not self.ready:
            self.health.poll(now)
            if self.health.answer == 200:
                self.ready = True
                say(startup_log.ANSWERS)
                self.log.feed(startup_log.LAUNCHER_PREFIX + startup_log.ANSWERS, now)
                notify("READY=1", "STATUS=" + self.log.describe())
                return
            self.buy_time(now)
        status = self.log.describe()
        if status != self._status:
            self._status = status
            notify("STATUS=" + status)

    def deserted(self):
        """End an engine whose companions have gone, as it can neither serve nor drain alone; True if so."""
        if self.link is None or not self.link.broken():
            return False
        if self.lost_at != float("inf") and self.stopping_at != float("inf"):
            say(f"{self.link.lost} of the group has gone, and the engine cannot go on without it")
            self.child.kill()
            self.lost_at = float("inf")
        return True

    def drained(self):
        """End an engine that serves nobody any more; True if so.

        Not one that has more than its own memory to give back, nor one that has itself seen that no request
        is left, and is giving it back.
        """
        if self.ends_orderly or not self.ready or self.in_flight == 0 or clients(self.port) != 0:
            return False
        say("no client is connected; not waiting for the engine to drain")
        self.child.kill()
        self.stopping_at = float("inf")
        return True

    def lost(self, now):
        """Return True if the engine cannot go on; end it when it has had time for its last words."""
        self.look_for_death(now)
        if self.lost_at is None:
            # While it serves, only a death counts: no line can bring a server down.
            if self.death is None and (self.ready or self.log.lost is None):
                return False
            self.lost_at = now
            notify("STATUS=lost while " + self.log.describe())
        if now - self.lost_at >= (LOST_SERVING_GRACE_S if self.ready else LOST_GRACE_S):
            say("not waiting for the engine's own teardown")
            self.child.kill()
            self.lost_at = float("inf")
        return True

    def look_for_death(self, now):
        """Look whether one of the engine's processes has died; say which and how.

        An engine that gives up kills them itself, one by one, and none of them is the cause. So a death
        counts if others live on at a second look.
        """
        interval = TICK_S if self.suspect else WORKERS_INTERVAL_S
        if self.death or now - self.workers_at < interval:
            return
        self.workers_at = now
        dead, alive = self.workers.look()
        suspect, self.suspect = self.suspect, None
        if dead and not suspect:
            self.suspect = dead[0]
        elif suspect and (alive or (self.log.lost is None and self.workers.alone())):
            self.death = suspect
            name, pid, self.lost_status = self.death
            status = self.lost_status
            how = f"was killed by signal {status - 128}" if status > 128 else f"ended with {status}"
            say(f"the engine's process {name} (pid {pid}) {how}")

    def buy_time(self, now):
        """Extend systemd's start timeout as long as the engine gets on."""
        # An engine that somebody else told to stop drains before it was ready.
        limit = self.stall_s.get(self.log.phase, self.drain_s)
        stalled = now - self.log.last_progress_at > limit
        if stalled and not self._stalled:
            say(f"no progress for {limit:.0f} s while {self.log.describe()}")
        self._stalled = stalled
        if not stalled:
            self.extend(now)

    def extend(self, now):
        """Ask systemd for more time, from time to time."""
        if now - self._extended_at >= EXTEND_EVERY_S:
            self._extended_at = now
            notify(f"EXTEND_TIMEOUT_USEC={EXTEND_BY_S * 1000000}")

    def on_stop(self, number, frame):
        """Note the stop; supervise() passes it on."""
        self.stop_asked = True

    def exit_status(self, returncode):
        """Turn the engine's status into ours. Up to 0.5.19 even an orderly stop ends by SIGKILL."""
        status = 128 - returncode if returncode < 0 else returncode
        if oom_kills():
            say("the kernel killed a process of the unit for lack of memory")
        say(f"the engine ended with status {status} while {self.log.describe()}")
        if self.stopping_at is not None and status in (0, 128 + signal.SIGTERM, 128 + signal.SIGKILL):
            return 0
        if self.follows and status == 0:
            say("rank 0 has stopped the group; this host joins it again when it starts")
            return 1
        if self.lost_at != float("inf"):
            return status
        told = self.lost_status or startup_log.told_status(self.log.lost or "")
        return told or 1


def main():
    parser = argparse.ArgumentParser(description="Run the SGLang engine of one release under systemd.")
    parser.add_argument("--release", required=True, help="the release's directory, or a link to it")
    parser.add_argument("--drain-seconds", type=float, default=60.0, help="longest drain at a stop")
    options = parser.parse_args()
    return Launcher(options.release, options.drain_seconds).run()


if __name__ == "__main__":
    sys.exit(main())
