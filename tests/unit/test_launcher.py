"""The launcher against a stand-in engine and a stand-in for systemd's notify socket."""

import fcntl
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time

import pytest
from ansible.module_utils.sglang_kit import addresses, attestation, companions, redaction, startup_log

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "roles/sglang_server/files/launcher.py"
STAND_IN = ROOT / "tests/unit/data/stand_in_engine.py"
BAR = "\rMulti-thread loading shards: {0:3d}% Completed | {1}/{2} [00:0{1}<00:0{1},  1.00it/s]"
FOREVER = ["sleep", 60]
# The launcher with shorter waits. It looks at the workers in each round, so that one that lives while /health
# is asked twice has been seen.
QUICK = {
    "TICK_S": 0.02,
    "BAR_INTERVAL_S": 60.0,
    "HEALTH_INTERVAL_S": 0.0,
    "LAST_WORDS_S": 0.3,
    "WORKERS_INTERVAL_S": 0.0,
    "LOST_GRACE_S": 0.3,
}


NEIGHBOURS = (addresses, attestation, companions, redaction, startup_log)


@pytest.fixture(scope="module")
def launcher():
    """Return the launcher as a module; it finds what it shares as it does on a node, among its neighbours."""
    for neighbour in NEIGHBOURS:
        sys.modules.setdefault(neighbour.__name__.rpartition(".")[2], neighbour)
    spec = importlib.util.spec_from_file_location("launcher", LAUNCHER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Run:
    """One start of the launcher as systemd would make it; notes what it tells systemd and the journal."""

    def __init__(self, tmp_path, steps, config="", drain=5.0, key=None, environ=None, **constants):
        self.home = tmp_path / "launcher"
        self.home.mkdir()
        (self.home / "quick.py").write_text(
            f"import sys\nsys.path.insert(0, {str(self.home)!r})\nimport launcher\n"
            f"vars(launcher).update({dict(QUICK, **constants)!r})\nsys.exit(launcher.main())\n"
        )
        shutil.copy(LAUNCHER, self.home)
        for neighbour in NEIGHBOURS:
            shutil.copy(neighbour.__file__, self.home)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.release = tmp_path / "releases" / "r1"
        (self.release / "engine" / "bin").mkdir(parents=True)
        python = self.release / "engine" / "bin" / "python"
        python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {STAND_IN} "$@"\n')
        python.chmod(0o755)
        engine = self.release / "engine"
        (engine / "lib/python3.11/site-packages/sglang-0.5.9.dist-info").mkdir(parents=True)
        (engine / attestation.NAME).write_text(json.dumps(attestation.look(str(engine), [])))
        (self.release / "server.yaml").write_text(f"host: 127.0.0.1\nport: {self.port}\n{config}")
        (self.release / "steps.json").write_text(json.dumps(steps))
        self.current = tmp_path / "current"
        self.current.symlink_to(self.release)
        self.runtime = tmp_path / "run"
        self.runtime.mkdir()
        self.environ = dict(environ or {})
        if key is not None:
            (self.runtime / "steps.json").write_text(json.dumps(steps))
            (tmp_path / "credentials").mkdir()
            (tmp_path / "credentials" / "engine-key").write_text(key)
            self.environ["CREDENTIALS_DIRECTORY"] = str(tmp_path / "credentials")
        self.drain = drain
        self.notified = []

    def start(self, pipe=False):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.runtime / "notify"))
        self.socket.settimeout(0.05)
        self.journal = (self.runtime / "journal").open("wb")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-I", str(self.home / "quick.py")),
                *("--release", str(self.current), "--drain-seconds", str(self.drain)),
            ],
            stdout=subprocess.PIPE if pipe else self.journal,
            stderr=subprocess.STDOUT,
            env={
                "PATH": os.environ["PATH"],
                "NOTIFY_SOCKET": str(self.runtime / "notify"),
                "RUNTIME_DIRECTORY": str(self.runtime),
                "INVOCATION_ID": "abc",
                **self.environ,
            },
        )
        return self

    def pump(self):
        try:
            while True:
                self.notified += self.socket.recv(65536).decode().split("\n")
        except socket.timeout:
            pass

    def until(self, condition, limit=20.0):
        end = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < end, (self.notified, self.text())
            self.pump()

    def finish(self, limit=20.0):
        self.until(lambda: self.process.poll() is not None, limit)
        self.pump()
        return self.process.returncode

    def touch(self, name):
        """Let the engine go on that waits for this file."""
        (self.release / name).touch()

    def connect(self):
        """Connect as a client does that waits for an answer."""
        return socket.create_connection(("127.0.0.1", self.port))

    def text(self):
        return (self.runtime / "journal").read_text()

    def statuses(self):
        return [item.split("=", 1)[1] for item in self.notified if item.startswith("STATUS=")]

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.socket.close()
        self.journal.close()


@pytest.fixture
def run(tmp_path):
    runs = []

    def start(steps, **options):
        runs.append(Run(tmp_path, steps, **options).start())
        return runs[-1]

    yield start
    for item in runs:
        item.close()


def test_ready_is_said_when_the_health_endpoint_answers_200_and_not_before(run):
    it = run(
        [
            ["write", "[2026-01-01 00:00:00] Load weight begin. avail mem=1 GB\n"],
            ["file", "loaded"],
            ["health", 503],
            ["write", "[2026-01-01 00:00:01] The server is fired up and ready to roll!\n"],
            ["write", "[2026-01-01 00:00:01] INFO:     Uvicorn running on http://127.0.0.1\n"],
            ["asked", 3],
            ["write", "now it may\n"],
            ["file", "go"],
            ["health", 200],
            FOREVER,
        ]
    )
    it.until(lambda: "loading weights" in it.statuses())
    it.touch("loaded")
    it.until(lambda: "now it may" in it.text())
    assert "READY=1" not in it.notified
    it.touch("go")
    it.until(lambda: "READY=1" in it.notified)
    assert it.statuses()[-1] == "serving"
    assert "launcher: the server answers\n" in it.text()


def test_bars_become_lines_and_the_last_frame_is_kept(run):
    frames = [["write", BAR.format(done * 100 // 8, done, 8)] for done in range(9)]
    it = run(
        [
            ["write", "[2026-01-01 00:00:00] Load weight begin. avail mem=1 GB\n"],
            *frames[:5],
            ["file", "go"],
            *frames[5:],
            ["write", "[2026-01-01 00:00:03] Load weight end. elapsed=2 s, type=K\n"],
            ["exit", 3],
        ]
    )
    # The first frame that is read comes out at once; which it is depends on how the pipe is read.
    it.until(lambda: any(re.fullmatch(r"loading weights [0-4]/8 \(\d+%\)", said) for said in it.statuses()))
    it.touch("go")
    assert it.finish() == 3
    lines = it.text().splitlines()
    bars = [line for line in lines if "shards" in line]
    assert len(bars) == 2
    assert "8/8" in bars[-1]
    assert "\r" not in it.text()
    assert lines[lines.index(bars[-1]) + 1].endswith("Load weight end. elapsed=2 s, type=K")


def test_a_frame_that_stands_for_a_while_is_one_line(launcher):
    seen = []
    lines = launcher.Lines(lambda line, now: seen.append((now, line)))
    lines.feed(BAR.format(0, 0, 4).encode(), 0.0)
    lines.feed(BAR.format(50, 2, 4).encode(), 3.0)
    lines.feed(BAR.format(75, 3, 4).encode(), 3.5)
    lines.tick(3.9)
    lines.feed(b"[2026-01-01 00:00:00 TP1] Load weight end. elapsed=1 s\n\nnext", 3.95)
    lines.close(5.0)
    assert [(now, line.split("|")[1].split()[0] if "|" in line else line) for now, line in seen] == [
        (0.0, "0/4"),
        (3.0, "2/4"),
        (3.95, "3/4"),
        (3.95, "[2026-01-01 00:00:00 TP1] Load weight end. elapsed=1 s"),
        (5.0, "next"),
    ]


@pytest.mark.parametrize(
    "step, status",
    [(["exit", 1], 1), (["exit", 2], 2), (["exit", 137], 137), (["kill", signal.SIGKILL], 137)],
)
def test_a_death_is_handed_on_at_once_though_a_grandchild_holds_the_output(run, step, status):
    it = run([["grandchild", 60], ["write", "last words"], step])
    assert it.finish() == status
    assert "last words\n" in it.text()
    assert f"launcher: the engine ended with status {status} while starting\n" in it.text()
    assert "READY=1" not in it.notified


WAIT = "import time; time.sleep(60)"
FAIL_WHEN_TOLD = (
    "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); print('told', flush=True); "
    "signal.sigwait([signal.SIGUSR1]); raise SystemExit(3)"
)
EXCEPTION = "[2026-01-01 00:00:00 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"


def children_of(pid):
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def seen(*workers):
    """Steps that start these workers and go on when the launcher has seen them."""
    return [["health", 503], *(["worker", worker] for worker in workers), ["asked", 2]]


def test_a_worker_killed_while_starting_ends_the_start_before_the_engine_notices(run):
    it = run([*seen(WAIT), ["kill_worker", signal.SIGKILL], FOREVER])
    assert it.finish() == 137
    assert re.search(
        r"^launcher: the engine's process worker \(pid \d+\) was killed by signal 9$", it.text(), re.M
    )
    assert it.statuses()[-1] == "lost while starting"
    assert "READY=1" not in it.notified


def test_a_stop_of_a_start_that_lost_a_worker_drains_nothing(run):
    # What systemd does when the kernel has killed a worker for its memory.
    it = run([["drain", 60.0], *seen(WAIT), ["write", "go\n"], FOREVER], drain=60.0)
    it.until(lambda: "go" in it.text())
    (engine,) = children_of(it.process.pid)
    (worker,) = children_of(engine)
    os.kill(worker, signal.SIGKILL)
    it.process.send_signal(signal.SIGTERM)
    assert it.finish() == 0
    assert "was killed by signal 9" in it.text()


def test_a_worker_that_failed_gives_its_status(run):
    it = run([["health", 503], ["worker", FAIL_WHEN_TOLD], ["asked", 2], ["write", "go\n"], FOREVER])
    it.until(lambda: "go" in it.text())
    (engine,) = children_of(it.process.pid)
    it.until(lambda: "told" in it.text())
    os.kill(children_of(engine)[0], signal.SIGUSR1)
    assert it.finish() == 3
    assert re.search(r"^launcher: the engine's process worker \(pid \d+\) ended with 3$", it.text(), re.M)


def test_a_worker_that_has_done_its_work_is_no_loss(run):
    it = run([["health", 503], ["worker", "pass"], ["asked", 9], ["health", 200], FOREVER])
    it.until(lambda: "READY=1" in it.notified)
    assert "the engine's process" not in it.text()


def test_a_worker_killed_while_serving_leaves_the_engine_time_for_a_dump(launcher, run):
    assert launcher.LOST_SERVING_GRACE_S >= 10 * launcher.LOST_GRACE_S
    it = run(
        [
            *seen(WAIT),
            ["health", 200],
            ["file", "kill"],
            ["kill_worker", signal.SIGKILL],
            ["file", "end"],
            ["exit", 137],
        ],
        LOST_GRACE_S=0.0,
    )
    it.until(lambda: "READY=1" in it.notified)
    it.touch("kill")
    it.until(lambda: "was killed by signal 9" in it.text())
    it.touch("end")
    assert it.finish() == 137
    assert "not waiting" not in it.text()


class Looks:
    """Workers as the launcher finds them, look by look: (dead, alive)."""

    def __init__(self, *looks):
        self.looks = list(looks)

    def look(self):
        return self.looks.pop(0)

    def alone(self):
        return False


def test_a_worker_that_died_as_soon_as_it_had_a_name_is_called_by_it(launcher, tmp_path):
    (tmp_path / "9/task/9").mkdir(parents=True)
    (tmp_path / "9/task/9/children").write_text("17 ")
    (tmp_path / "17").mkdir()
    (tmp_path / "17/cmdline").write_bytes(b"python\0-c\0spawn_main()\0--multiprocessing-fork\0")
    (tmp_path / "17/stat").write_text("17 (python) S" + " 0" * 49)
    workers = launcher.Workers(9, tmp_path)
    assert workers.look() == ([], 1)
    (tmp_path / "17/cmdline").write_bytes(b"")
    (tmp_path / "17/stat").write_text("17 (sglang::schedul) Z" + " 0" * 48 + " 9")
    assert workers.look() == ([("sglang::schedul", 17, 137)], 0)


KILLED = ("sglang::scheduler_TP1", 17, 137)


@pytest.mark.parametrize(
    "complaint, looks, found",
    [
        (False, [([KILLED], 2), ([KILLED], 2)], KILLED),
        (True, [([KILLED], 2), ([KILLED], 2)], KILLED),
        # The engine may ask for the dead one in between.
        (False, [([KILLED], 2), ([], 2)], KILLED),
        # It kills them one by one when it gives up.
        (True, [([KILLED], 2), ([KILLED] * 3, 0)], None),
        (False, [([KILLED], 2), ([KILLED] * 3, 0)], None),
        (False, [([KILLED] * 3, 0), ([KILLED] * 3, 0)], None),
        (False, [([], 3), ([], 3)], None),
    ],
)
def test_whom_the_engine_killed_is_not_taken_for_a_cause(launcher, tmp_path, capfd, complaint, looks, found):
    (tmp_path / "server.yaml").write_text("port: 1\n")
    it = launcher.Launcher(tmp_path, 1.0)
    it.workers = Looks(*looks)
    if complaint:
        it.log.feed(EXCEPTION)
    for second in range(len(looks)):
        it.look_for_death(1000.0 + second)
    assert it.death == found
    assert not it.workers.looks
    assert ("(pid 17) was killed by signal 9" in capfd.readouterr().out) is bool(found)


@pytest.mark.parametrize(
    "lost, status",
    [
        ("[2026-01-01 00:00:00 TP3] Scheduler hit an exception: Traceback (most recent call last):", 1),
        # The engine asked for its end before the launcher could.
        (
            "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9",
            137,
        ),
        ("[2026-01-01 00:00:00] Subprocess scheduler_0 (pid=17) crashed with exit code 3. Triggering", 3),
    ],
)
def test_a_start_that_is_lost_by_its_own_words_ends_after_its_last_ones(run, lost, status):
    it = run([["write", lost + "\n"], ["write", "last words\n"], FOREVER])
    assert it.finish() == status
    assert "last words\nlauncher: not waiting for the engine's own teardown\n" in it.text()


@pytest.mark.parametrize(
    "membership, file",
    [
        ("0::/system.slice/s.service\n", "system.slice/s.service/memory.events"),
        (
            "4:memory:/system.slice/s.service\n3:cpuset:/\n0::/system.slice/s.service\n",
            "memory/system.slice/s.service/memory.oom_control",
        ),
        ("9:name=systemd:/s\n5:cpu,memory:/s.service\n", "memory/s.service/memory.oom_control"),
    ],
)
def test_the_kernels_count_of_killed_processes(launcher, tmp_path, membership, file):
    (tmp_path / "membership").write_text(membership)
    counters = tmp_path / "cgroup" / file
    counters.parent.mkdir(parents=True)
    ask = [str(tmp_path / "membership"), str(tmp_path / "cgroup")]
    assert launcher.oom_kills(*ask) == 0
    counters.write_text("low 0\noom 1\noom_kill 2\noom_group_kill 0\n")
    assert launcher.oom_kills(*ask) == 2


def test_the_process_that_was_killed_is_told_though_another_complains_of_it_first(run):
    it = run([*seen(WAIT, WAIT), ["write", EXCEPTION], ["kill_worker", signal.SIGKILL], FOREVER])
    assert it.finish() == 137
    assert "was killed by signal 9" in it.text()


def test_processes_that_the_engine_kills_itself_are_no_cause(run):
    it = run([*seen(WAIT, WAIT), ["write", EXCEPTION], ["kill_workers", signal.SIGKILL], FOREVER])
    assert it.finish() == 1
    assert "was killed" not in it.text()


def test_no_line_brings_a_server_down(run):
    it = run(
        [
            ["health", 200],
            ["file", "go"],
            ["write", "[2026-01-01 00:00:00] Scheduler hit an exception: says a client\n"],
            ["file", "again"],
            ["write", "still here\n"],
            FOREVER,
        ],
        LOST_GRACE_S=0.0,
        LOST_SERVING_GRACE_S=0.0,
    )
    it.until(lambda: "READY=1" in it.notified)
    it.touch("go")
    it.until(lambda: "says a client" in it.text())
    it.touch("again")
    it.until(lambda: "still here" in it.text())
    assert it.process.poll() is None
    assert "not waiting" not in it.text()


def test_a_stop_lets_the_engine_drain_and_is_a_success(run):
    it = run([["drain", 0.2], ["health", 200], FOREVER])
    it.until(lambda: "READY=1" in it.notified)
    with it.connect():
        it.process.send_signal(signal.SIGTERM)
        assert it.finish() == 0
    assert "STOPPING=1" in it.notified
    assert "Gracefully exiting\n" in it.text()


def test_an_orderly_stop_that_ends_in_137_is_a_success(run):
    # Releases up to 0.5.19 kill themselves with SIGKILL at the end of a drain.
    it = run([["drain", 0.0], ["health", 200], FOREVER])
    it.until(lambda: "READY=1" in it.notified)
    with it.connect():
        os.kill(int(children_of(it.process.pid)[0]), signal.SIGSTOP)
        it.process.send_signal(signal.SIGTERM)
        it.until(lambda: "STOPPING=1" in it.notified)
        os.kill(int(children_of(it.process.pid)[0]), signal.SIGKILL)
        assert it.finish() == 0


def test_a_drain_without_end_is_cut_and_says_so(run):
    it = run([["drain", 60.0], ["health", 200], FOREVER], drain=0.2)
    it.until(lambda: "READY=1" in it.notified)
    with it.connect():
        it.process.send_signal(signal.SIGTERM)
        assert it.finish() == 0
    assert "launcher: still draining after 0 s, requests in flight are lost\n" in it.text()


def test_an_engine_that_serves_nobody_is_not_asked_to_drain(run):
    it = run([["drain", 60.0], ["health", 200], FOREVER], drain=60.0)
    it.until(lambda: "READY=1" in it.notified)
    it.process.send_signal(signal.SIGTERM)
    assert it.finish() == 0
    assert it.text().count("launcher: no client is connected; not waiting for the engine to drain\n") == 1


def test_a_drain_ends_with_the_last_client(run):
    it = run([["drain", 60.0], ["health", 200], FOREVER], drain=60.0)
    it.until(lambda: "READY=1" in it.notified)
    with it.connect() as first, it.connect():
        it.process.send_signal(signal.SIGTERM)
        it.until(lambda: "STOPPING=1" in it.notified)
        first.shutdown(socket.SHUT_WR)
        first.close()
        assert it.process.poll() is None
    assert it.finish() == 0
    assert "not waiting for the engine to drain\n" in it.text()


def test_an_engine_that_has_seen_itself_that_no_request_is_left_ends_by_itself(run):
    it = run([["drain", 0.5], ["health", 200], drains(0), FOREVER])
    it.until(lambda: "READY=1" in it.notified and "requests 0" in it.text())
    it.process.send_signal(signal.SIGTERM)
    assert it.finish() == 0
    assert "Gracefully exiting\n" in it.text()
    assert "not waiting for the engine to drain" not in it.text()


@pytest.mark.parametrize(
    "option",
    [
        "enable-hierarchical-cache: true",
        "hicache-ratio: 2",
        "cpu-offload-gb: 8",
        "disaggregation-mode: decode",
    ],
)
def test_an_engine_with_memory_outside_of_its_own_gives_it_back(run, option):
    it = run([["drain", 0.2], ["health", 200], FOREVER], config=option + "\n")
    it.until(lambda: "READY=1" in it.notified)
    it.process.send_signal(signal.SIGTERM)
    assert it.finish() == 0
    assert "Gracefully exiting\n" in it.text()


@pytest.mark.parametrize(
    "tcp, tcp6, count",
    [
        (None, None, None),
        ([], None, 0),
        (["0100007F:7530 0100007F:C001 01"], [], 1),
        (["0100007F:7530 0100007F:C001 08"], ["0" * 32 + ":7530 " + "0" * 32 + ":C002 01"], 2),
        # It listens, a connection has ended, and a client's own end on the same host.
        (["0100007F:7530 00000000:0000 0A", "0100007F:7530 0100007F:C001 06"], [], 0),
        (["0100007F:C001 0100007F:7530 01"], [], 0),
    ],
)
def test_the_clients_of_a_port(launcher, tmp_path, tcp, tcp6, count):
    for name, rows in (("tcp", tcp), ("tcp6", tcp6)):
        if rows is not None:
            numbered = [f"{number:4d}: {row} 00000000:00000000" for number, row in enumerate(rows)]
            (tmp_path / name).write_text("\n".join(["  sl  local_address rem_address   st", *numbered, ""]))
    assert launcher.clients(30000, tmp_path) == count


def drains(requests):
    line = f"Gracefully exiting... Remaining number of requests {requests}. Remaining requests x."
    return ["write", f"[2026-01-01 00:00:00] {line}\n"]


def test_the_requests_that_a_drain_cuts_are_counted(run):
    it = run([["drain", 60.0], ["health", 200], ["sleep", 2.5], drains(7), drains(3), FOREVER], drain=1.0)
    it.until(lambda: "READY=1" in it.notified and "requests 3" in it.text())
    with it.connect():
        it.process.send_signal(signal.SIGTERM)
        assert it.finish() == 0
    assert "launcher: still draining after 1 s, 3 requests in flight are lost\n" in it.text()


@pytest.fixture
def server():
    """A server of two hosts: config(rank), and start(rank), which is what is seen of the other launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    links = []

    class Server:
        @staticmethod
        def config(rank):
            return f'nnodes: 2\nnode-rank: {rank}\ndist-init-addr: "127.0.0.1:{port + 1}"\n'

        @staticmethod
        def start(rank):
            links.append(companions.Link(("127.0.0.1", port), 2, rank))
            threading.Thread(target=links[-1].gather, args=(lambda missing: True,), daemon=True).start()

        @staticmethod
        def end():
            for sock in links[-1]._peers:
                sock.close()

    return Server


def test_no_host_of_a_group_starts_before_all_are_there(run, server):
    it = run([["health", 200], FOREVER], config=server.config(0))
    it.until(lambda: "waiting for rank 1 of the group" in it.statuses())
    assert any(said.startswith("EXTEND_TIMEOUT_USEC=") for said in it.notified)
    assert "launcher: starting" not in it.text()
    server.start(1)
    it.until(lambda: "READY=1" in it.notified)


def test_a_host_that_waits_for_the_others_can_be_stopped(run, server):
    it = run([FOREVER], config=server.config(1))
    it.until(lambda: "waiting for rank 0 of the group" in it.statuses())
    it.process.send_signal(signal.SIGTERM)
    assert it.finish() == 0
    assert "launcher: starting" not in it.text()


@pytest.mark.parametrize("rank, other", [(0, "rank 1"), (1, "rank 0")])
def test_a_host_whose_companion_is_gone_ends_at_once(run, server, rank, other):
    it = run([["drain", 60.0], ["health", 200], FOREVER], config=server.config(rank))
    server.start(1 - rank)
    it.until(lambda: "READY=1" in it.notified)
    server.end()
    assert it.finish() == 1
    assert f"launcher: {other} of the group has gone, and the engine cannot go on without it\n" in it.text()


def test_a_host_of_a_group_waits_for_rank_0_to_stop_it(run, server):
    # A signal would end this engine at once, as releases before 0.5.21 do, and cut off what rank 0 drains.
    it = run([["health", 200], ["file", "end"], ["exit", 0]], config=server.config(1))
    server.start(0)
    it.until(lambda: "READY=1" in it.notified)
    it.process.send_signal(signal.SIGTERM)
    it.until(lambda: "waiting for rank 0 to stop the group" in it.statuses())
    assert it.process.poll() is None
    it.touch("end")
    assert it.finish() == 0


def test_a_stop_is_over_when_rank_0_has_gone(run, server):
    it = run([["health", 200], FOREVER], config=server.config(1), drain=60.0)
    server.start(0)
    it.until(lambda: "READY=1" in it.notified)
    it.process.send_signal(signal.SIGTERM)
    it.until(lambda: "waiting for rank 0 to stop the group" in it.statuses())
    server.end()
    assert it.finish() == 0


def test_a_host_of_a_group_does_not_wait_for_rank_0_for_ever(run, server):
    it = run([["health", 200], FOREVER], config=server.config(1), drain=0.2)
    server.start(0)
    it.until(lambda: "READY=1" in it.notified)
    it.process.send_signal(signal.SIGTERM)
    assert it.finish() == 0
    assert "launcher: rank 0 did not stop the group within 0 s; not waiting any longer\n" in it.text()


def test_a_host_of_a_group_that_rank_0_stopped_comes_back(run, server):
    # The engine ends in peace, which systemd would leave at that.
    it = run([["health", 200], ["exit", 0]], config=server.config(1))
    server.start(0)
    assert it.finish() == 1
    assert "launcher: rank 0 has stopped the group; this host joins it again when it starts\n" in it.text()


def test_rank_0_of_a_group_ends_by_its_own_orderly_stop(run, server):
    # It takes the others along; killed, it would leave them to find out.
    it = run([["drain", 0.2], ["health", 200], FOREVER], config=server.config(0))
    server.start(1)
    it.until(lambda: "READY=1" in it.notified)
    it.process.send_signal(signal.SIGTERM)
    assert it.finish() == 0
    assert "Gracefully exiting\n" in it.text()


def test_rank_0_that_cannot_listen_for_the_group_starts_no_engine(run, server):
    config = server.config(0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(config.split(":")[-1].strip('"\n')) - 1))
        taken.listen()
        it = run([FOREVER], config=config)
        assert it.finish() == 1
    assert "for the group: Address already in use; the engine was not started\n" in it.text()


def asks_for_interfaces(own):
    return [["env", "GLOO_SOCKET_IFNAME"], ["env", "NCCL_SOCKET_IFNAME"], ["exit", own]]


def test_the_ranks_speak_over_the_interface_of_their_address(run):
    it = run(asks_for_interfaces(3), environ={"SGLANG_HOST_IP": "127.0.0.1"})
    assert it.finish() == 3
    assert "GLOO_SOCKET_IFNAME=lo\nNCCL_SOCKET_IFNAME==lo\n" in it.text()


def test_an_interface_that_was_named_is_kept(run):
    it = run(asks_for_interfaces(3), environ={"SGLANG_HOST_IP": "127.0.0.1", "NCCL_SOCKET_IFNAME": "ib0"})
    assert it.finish() == 3
    assert "GLOO_SOCKET_IFNAME=lo\nNCCL_SOCKET_IFNAME=ib0\n" in it.text()


def test_an_address_that_no_interface_has_is_told_before_the_load(run):
    it = run(asks_for_interfaces(3), environ={"SGLANG_HOST_IP": "192.0.2.1"})
    assert it.finish() == 1
    assert "launcher: no interface of this host has 192.0.2.1, its address in the group" in it.text()
    assert "SOCKET_IFNAME" not in it.text()


def test_a_host_on_its_own_is_left_to_its_interfaces(run):
    it = run(asks_for_interfaces(3))
    assert it.finish() == 3
    assert "GLOO_SOCKET_IFNAME=None\nNCCL_SOCKET_IFNAME=None\n" in it.text()


@pytest.mark.parametrize("rank, allowed", [(0, 8 * 64), (1, 10 * 64)])
def test_a_load_without_bars_is_allowed_the_time_of_all_its_weights(launcher, tmp_path, rank, allowed):
    (tmp_path / "model").mkdir()
    for number in range(10):
        with (tmp_path / "model" / f"{number}.safetensors").open("wb") as sparse:
            sparse.truncate(4 << 30)
    (tmp_path / "server.yaml").write_text(f"port: 1\nnnodes: 2\nnode-rank: {rank}\ndist-init-addr: h:2\n")
    assert launcher.Launcher(tmp_path, 1.0).stall_s["loading_weights"] == allowed


def test_an_engine_that_others_stop_before_it_is_ready_is_watched_on(run):
    it = run([drains(1), ["sleep", 1], ["write", "last words\n"], ["exit", 4]])
    assert it.finish() == 4
    assert "last words\n" in it.text()


def test_an_output_that_nobody_reads_for_a_while_loses_no_line_and_no_engine(tmp_path):
    lines = [f"line {number} {'x' * 90}" for number in range(4000)]
    it = Run(tmp_path, [["write", "\n".join(lines) + "\n"], ["exit", 3]])
    it.start(pipe=True)

    def unread():
        return int.from_bytes(fcntl.ioctl(it.process.stdout, termios.FIONREAD, b"\0" * 4), sys.byteorder)

    # The launcher is stuck in its write, and the engine in its own.
    it.until(lambda: unread() > 60000)
    assert it.process.poll() is None
    assert len(children_of(it.process.pid)) == 1
    said = it.process.stdout.read().decode().splitlines()
    assert [line for line in said if line.startswith("line ")] == lines
    assert it.finish() == 3
    it.close()


def test_output_without_an_end_is_cut_and_passed_on(launcher, run):
    size = launcher.BUFFER_LIMIT * 2 + 5
    it = run([["write", "x" * size], ["exit", 3]])
    assert it.finish() == 3
    assert it.text().count("x") >= size


def test_compiled_kernels_are_kept_by_engine(launcher, tmp_path, monkeypatch):
    tree = tmp_path / "engines" / "0.5.9-abc"
    tree.mkdir(parents=True)
    (tmp_path / "engine").symlink_to(tree)
    (tmp_path / "server.yaml").write_text("port: 1\n")
    assert launcher.Launcher(tmp_path, 1.0).kernel_caches() == {}
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/sglang")
    caches = launcher.Launcher(tmp_path, 1.0).kernel_caches()
    assert caches["TRITON_CACHE_DIR"] == "/var/cache/sglang/0.5.9-abc/triton"
    assert len(set(caches.values())) == len(caches) >= 5


def test_a_stop_while_loading_is_a_success(run):
    it = run([["write", "[2026-01-01 00:00:00] Load weight begin. avail mem=1 GB\n"], FOREVER])
    it.until(lambda: "loading weights" in it.statuses())
    it.process.send_signal(signal.SIGTERM)
    assert it.finish() == 0


def test_a_port_in_use_is_found_before_the_load(tmp_path):
    it = Run(tmp_path, [["write", "engine started\n"], FOREVER])
    with socket.socket() as other:
        other.bind(("127.0.0.1", it.port))
        other.listen()
        it.start()
        assert it.finish() == 1
    assert f"cannot listen on 127.0.0.1:{it.port}: Address already in use" in it.text()
    assert "engine started" not in it.text()
    it.close()


def test_an_engine_that_is_not_there(run):
    it = run([])
    # the tree is gone by the time of the next start
    it.finish()
    (it.release / "engine" / "bin" / "python").unlink()
    env = {"RUNTIME_DIRECTORY": str(it.runtime)}
    done = subprocess.run(it.process.args, capture_output=True, text=True, env=env)
    assert done.returncode == 127
    assert "launcher: cannot start " in done.stdout
    assert "No such file or directory" in done.stdout


def test_started_json_says_what_really_runs(run):
    it = run([["health", 200], FOREVER])
    it.until(lambda: "READY=1" in it.notified)
    record = json.loads((it.runtime / "started.json").read_text())
    assert record["release"] == str(it.release)
    assert record["invocation"] == "abc"
    assert record["key"] is None
    # In the order of their names, as the role puts them together.
    program = sorted(
        map(pathlib.Path, (LAUNCHER, *(each.__file__ for each in NEIGHBOURS))), key=lambda path: path.name
    )
    assert record["launcher"] == hashlib.sha256(b"".join(path.read_bytes() for path in program)).hexdigest()


def test_an_engine_that_was_changed_is_not_started(run):
    it = run([["exit", 0]])
    it.finish()
    site = it.release / "engine/lib/python3.11/site-packages"
    (site / "sglang-0.5.9.dist-info").rename(site / "sglang-0.5.23.dist-info")
    env = {"RUNTIME_DIRECTORY": str(it.runtime)}
    done = subprocess.run(it.process.args, capture_output=True, text=True, env=env)
    assert done.returncode == 78
    assert "the engine is not what was attested: distributions are gone: sglang-0.5.9" in done.stdout
    assert "distributions were added: sglang-0.5.23" in done.stdout
    assert "starting" not in done.stdout


def test_the_engine_does_not_get_the_notify_socket(run):
    it = run([["env", "NOTIFY_SOCKET"], ["env", "INVOCATION_ID"], ["exit", 1]])
    it.finish()
    assert "NOTIFY_SOCKET=None\n" in it.text()
    assert "INVOCATION_ID=abc\n" in it.text()


def test_the_keys_of_the_config_reach_the_journal_in_no_form(run):
    line = "server_args={'api_key': 'k3y-user', 'admin_api_key': 'k3y-admin', 'note': 'k3y-user'}"
    it = run([["write", line + "\n"], ["exit", 1]], config="api-key: k3y-user\nadmin-api-key: 'k3y-admin'\n")
    it.finish()
    assert "k3y" not in it.text()
    assert "server_args={'api_key': '***', 'admin_api_key': '***', 'note': '***'}" in it.text()


def test_the_engine_gets_its_key_in_a_file_that_is_its_own(run):
    steps = [["write", "server_args={'api_key': 'k3y', 'note': 'k3y'}\n"], ["health", 200], FOREVER]
    it = run(steps, key="k3y\n", config="context-length: 5\n")
    it.until(lambda: "READY=1" in it.notified)
    merged = it.runtime / "server.yaml"
    assert merged.read_text() == (it.release / "server.yaml").read_text() + 'api-key: "k3y"\n'
    assert merged.stat().st_mode & 0o777 == 0o600
    (engine,) = children_of(it.process.pid)
    assert str(merged) in pathlib.Path(f"/proc/{engine}/cmdline").read_text().split("\0")
    assert b"k3y" not in pathlib.Path(f"/proc/{engine}/environ").read_bytes()
    assert "server_args={'api_key': '***', 'note': '***'}\n" in it.text()
    record = json.loads((it.runtime / "started.json").read_text())
    assert record["key"] == hashlib.sha256(b"k3y\n").hexdigest()


def test_an_empty_key_starts_no_engine(run):
    it = run([["write", "engine started\n"], FOREVER], key="\n")
    assert it.finish() == 78
    assert it.text() == (
        "launcher: the engine's key is empty; remove /etc/sglang/credentials/engine-key and deploy again\n"
    )


def test_time_is_bought_only_while_there_is_progress(launcher, tmp_path, monkeypatch, capfd):
    sent = []
    monkeypatch.setattr(launcher, "notify", lambda *items: sent.extend(items))
    (tmp_path / "server.yaml").write_text("port: 1\n")
    it = launcher.Launcher(tmp_path, 1.0, stall_s={"starting": 100, "loading_weights": 50, "serving": 30})
    start = it.log.last_progress_at = 1000.0

    def asked_at(seconds):
        sent.clear()
        it.buy_time(start + seconds)
        return "EXTEND_TIMEOUT_USEC=60000000" in sent

    assert asked_at(0)
    assert not asked_at(5)
    assert asked_at(10)
    assert asked_at(95)
    assert not asked_at(110)
    it.log.feed("Load weight begin. avail mem=1 GB", start + 120)
    assert asked_at(121)
    it.log.feed("Multi-thread loading shards:   1% Completed | 1/119 [00:01<01:00, 1it/s]", start + 165)
    assert asked_at(200)
    assert not asked_at(220)
    assert not asked_at(1200)
    # the log says that it serves, the health endpoint has not yet
    it.log.feed("The server is fired up and ready to roll!", start + 1300)
    it.log.feed("Uvicorn running on http://127.0.0.1:1", start + 1300)
    assert asked_at(1301)
    assert not asked_at(1331)
    said = capfd.readouterr().out.splitlines()
    assert said == [
        "launcher: no progress for 100 s while starting",
        "launcher: no progress for 50 s while loading weights 1/119 (1%)",
        "launcher: no progress for 30 s while serving",
    ]


def test_a_load_of_twenty_minutes_with_progress_never_runs_out_of_time(launcher, tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(launcher, "notify", lambda *items: sent.extend(items))
    (tmp_path / "server.yaml").write_text("port: 1\n")
    it = launcher.Launcher(tmp_path, 1.0)
    it.log.last_progress_at = 0.0
    it.log.feed("Load weight begin. avail mem=1 GB", 0.0)
    for second in range(1200):
        if second % 10 == 0:
            done = second // 10
            it.log.feed(f"loading shards: {done}% Completed | {done}/120 [00:01<01:00, 1it/s]", second)
        before = len(sent)
        it.buy_time(float(second))
        assert (len(sent) > before) == (second % 10 == 0)


@pytest.mark.parametrize(
    "text, key, expected",
    [
        ("port: 31000\nhost: 0.0.0.0\n", "port", "31000"),
        ("host: '0.0.0.0'\n", "host", "0.0.0.0"),
        ('a: 1\napi-key: "x y"\n', "api-key", "x y"),
        ("admin-api-key: x\n", "api-key", None),
        ("nested:\n  port: 5\n", "port", None),
    ],
)
def test_config_scalar(launcher, text, key, expected):
    assert launcher.config_scalar(text, key) == expected
