# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""One start of the engine, by the launcher or directly, followed by the project's own log reader."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
KIT = HERE / "kit"
POLL_S = 0.2
HEALTH_TIMEOUT_S = 25
# The same for every start; what a case needs comes on top.
ARGUMENTS = {
    "trust-remote-code": True,
    "host": "127.0.0.1",
    "served-model-name": "kimi-k2.5",
    "enable-metrics": True,
    "attention-backend": "triton",
    "mm-attention-backend": "sdpa",
    "moe-runner-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "mm-feature-transport": "cpu",
    # As one map: 0.5.17's reader of the file refuses the single options, since they have deprecated aliases.
    "cuda-graph-config": {"decode": {"max_bs": 8}, "prefill": {"backend": "disabled"}},
    "skip-server-warmup": True,
    "mem-fraction-static": 0.3,
    "max-total-tokens": 16384,
    "max-running-requests": 8,
}
SPECULATION = {
    "speculative-algorithm": "EAGLE3",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
}


# What a release's file `environment` would hold.
SETTINGS = {
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "SGLANG_DISABLE_CUDNN_CHECK": "1",
    # Several engines of the trial share the GPUs.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
    # NVLink multicast stays off: it belongs to all who share the host's GPUs.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def environment(work):
    """Return the environment of the engine (dict)."""
    env = dict(
        os.environ,
        HOME=str(work / "home"),
        XDG_CACHE_HOME=str(work / "cache"),
        HF_HOME=str(work / "cache" / "hf"),
        TRITON_CACHE_DIR=str(work / "cache" / "triton"),
        TVM_FFI_CACHE_DIR=str(work / "cache" / "tvm-ffi"),
        TORCHINDUCTOR_CACHE_DIR=str(work / "cache" / "inductor"),
        PYTHONDONTWRITEBYTECODE="1",
        PYTHONUNBUFFERED="1",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        **SETTINGS,
    )
    for name in ("PYTHONPATH", "PYTHONHOME", "NOTIFY_SOCKET"):
        env.pop(name, None)
    for folder in ("home", "cache"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    return env


def install_launcher(folder):
    """Put the launcher and what it shares with the modules side by side, as the role does."""
    folder.mkdir(parents=True)
    shutil.copy2(KIT / "roles" / "sglang_server" / "files" / "launcher.py", folder)
    for name in ("addresses.py", "attestation.py", "companions.py", "redaction.py", "startup_log.py"):
        shutil.copy2(KIT / "ansible" / "module_utils" / "sglang_kit" / name, folder)
    return folder / "launcher.py"


def configuration(arguments):
    """Return the text of server.yaml, as the role sglang_server writes it."""
    lines = []
    for key, value in sorted(arguments.items()):
        # The engine wants a map as a string of JSON.
        text = json.dumps(value) if isinstance(value, dict) else value
        lines.append(f"{key}: {json.dumps(text)}\n")
    return "".join(lines)


def write_release(folder, engine, checkpoint, arguments):
    """Lay out a release as the role sglang_server does."""
    folder.mkdir(parents=True)
    (folder / "engine").symlink_to(engine)
    (folder / "model").symlink_to(checkpoint / "target")
    (folder / "drafter").symlink_to(checkpoint / "draft")
    (folder / "server.yaml").write_text(configuration(arguments), encoding="utf-8")


class Systemd(threading.Thread):
    """Listens where systemd would; `said` holds (seconds, assignment)."""

    def __init__(self, address, clock):
        super().__init__(daemon=True)
        self.said = []
        self._clock = clock
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(address))

    def run(self):
        while True:
            for assignment in self._socket.recv(65536).decode().split("\n"):
                self.said.append((self._clock(), assignment))

    @property
    def ready(self):
        """True once the launcher said READY."""
        return any(assignment == "READY=1" for _at, assignment in self.said)


class Start:
    """A start of a release. `launcher` is its path, or None for the engine without it."""

    def __init__(self, release, port, env, log_path, launcher, reader, lines_class):
        self.release, self.port, self.log_path = release, port, log_path
        self.log = reader(at=0.0)
        self.ended_at = self.lost_at = self.answers_at = None
        self._begun = time.monotonic()
        self._lines = lines_class(self._take)
        self.systemd = None
        env = dict(env)
        if launcher:
            runtime = release / "run"
            runtime.mkdir()
            # The address of a socket has room for 107 bytes only.
            address = pathlib.Path("/tmp") / f"gpu-trial-{os.getpid()}-{port}"
            address.unlink(missing_ok=True)
            self.systemd = Systemd(address, self.clock)
            self.systemd.start()
            env.update(NOTIFY_SOCKET=str(address), RUNTIME_DIRECTORY=str(runtime))
            argv = [sys.executable, "-I", str(launcher), "--release", str(release), "--drain-seconds", "20"]
        else:
            python = release / "engine" / "bin" / "python"
            argv = [
                str(python),
                "-m",
                "sglang.launch_server",
                "--config",
                str(release.resolve() / "server.yaml"),
            ]
        self.process = subprocess.Popen(
            argv,
            env=env,
            cwd=str(release),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.log_path.touch()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def clock(self):
        """Return the seconds since the start."""
        return time.monotonic() - self._begun

    def _take(self, line, now):
        self.log.feed(line, now)
        if self.log.lost and self.lost_at is None:
            self.lost_at = now

    def _read(self):
        with self.log_path.open("wb") as copy:
            while True:
                data = os.read(self.process.stdout.fileno(), 65536)
                if not data:
                    break
                copy.write(data)
                copy.flush()
                self._lines.feed(data, self.clock())
        self._lines.close(self.clock())

    def ended(self):
        """Return True if the main process has ended."""
        if self.ended_at is None and self.process.poll() is not None:
            self.ended_at = self.clock()
            # What its children still hold open is not waited for.
            self._reader.join(2)
        return self.ended_at is not None

    def answers(self, server_class):
        """Return True once the server answers; by the launcher's word, or by asking after the log says so."""
        if self.answers_at is None:
            if self.systemd:
                if self.systemd.ready:
                    self.answers_at = self.clock()
            elif self.log.phase == "serving":
                server = server_class(f"http://127.0.0.1:{self.port}", HEALTH_TIMEOUT_S)
                if server.get("/health").status == 200:
                    self.answers_at = self.clock()
        return self.answers_at is not None

    def wait(self, until, seconds):
        """Wait until the function returns true; False if the time ran out."""
        deadline = time.monotonic() + seconds
        while not until():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    @property
    def status(self):
        """The exit status, 128 + n for signal n; None while it runs."""
        code = self.process.returncode
        return 128 - code if code is not None and code < 0 else code

    def stop(self):
        """Send SIGTERM to the main process alone."""
        self.process.send_signal(signal.SIGTERM)

    def clean_up(self):
        """Kill what is left of the start's own processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.ended()


def schedulers(group):
    """Return {title: pid} of the schedulers among the processes of a group (int)."""
    found = {}
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            title = (entry / "cmdline").read_bytes().split(b"\0")[0].decode("utf-8", "replace")
            if title.startswith("sglang::scheduler") and os.getpgid(int(entry.name)) == group:
                found[title.split()[0]] = int(entry.name)
        except (OSError, ProcessLookupError):
            continue  # it ended while it was looked at
    return found
