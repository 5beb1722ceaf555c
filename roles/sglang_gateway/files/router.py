#!/usr/bin/python3 -I
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Run the router (smg) in this process, with its keys, and keep it to its list of workers.

Runs under the interpreter of the router's virtual environment, between systemd and the router:
- smg takes keys as arguments alone, which every user of the host could read: here they come from systemd's
  credentials ("control-key", "worker-key") and never leave this process;
- smg forgets its workers when it ends, gives up on one that is away for long, and cannot take back a
  registration that it has begun: so the list is a file, and a thread registers and removes by it, a worker
  only when its health is seen;
- READY is said when the router answers.

usage: router.py FOLDER             run with the files of this folder: arguments.json (the flags, as a list
                                    of words), workers.json (gateway.py says how it looks), inputs (a digest
                                    of all that this start is made from, shown in the runtime directory)
       router.py --check ARGUMENTS  start with the flags of this file on free ports, without workers, and end:
                                    0 if the router takes them; its own words, and not 0, if not
"""

import argparse
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -I leaves the script's own folder out

import gateway
import gateway_http
from smg import launch_router

START_S = 20
KEEP_INTERVAL_S = 5
# Nodes that are away are asked one after the other.
HEALTH_S = 10
# Its logo is no line of a log.
launch_router.print_banner = lambda *_words: None


def say(message, **fields):
    """Write one line in the form of the router's own log."""
    record = {
        "timestamp": time.strftime("%F %T"),
        "level": "INFO",
        "message": message,
        **fields,
        "target": "keeper",
    }
    print(json.dumps({**record, **fields}), flush=True)


def credential(name):
    """Return one of systemd's credentials."""
    return (Path(os.environ["CREDENTIALS_DIRECTORY"]) / name).read_text(encoding="ascii").strip()


def notify(state):
    """Tell systemd, where it asks to be told."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
            sock.sendall(state.encode())


def free_port():
    """Return a port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def value_of(words, flag):
    """Return the word after a flag, or None."""
    return words[words.index(flag) + 1] if flag in words else None


def wait_for(url):
    """Return whether the router answers within START_S."""
    limit = time.monotonic() + START_S
    while time.monotonic() < limit:
        if gateway_http.ask("GET", url + "/liveness", timeout_s=2).status == 200:
            return True
        time.sleep(0.2)
    return False


def check(words):
    """Start the router beside the one that runs; this process ends with the verdict."""
    port = free_port()
    words = [*words, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]

    def watch():
        answers = wait_for(f"http://127.0.0.1:{port}")
        sys.stdout.flush()
        os._exit(0 if answers else 1)

    threading.Thread(target=watch, daemon=True).start()
    launch_router.launch_router(launch_router.parse_router_args(words))


class Keeper(threading.Thread):
    """Brings the router to the list in the file, again and again."""

    def __init__(self, router, url, workers_file, worker_key, ca_file):
        super().__init__(daemon=True)
        self.router, self.url, self.workers_file = router, url, workers_file
        self.worker_key, self.ca_file = worker_key, ca_file
        self.begun = {}

    def run(self):
        if not wait_for(self.url):
            say("the router does not answer", level="ERROR")
            os._exit(1)
        self.keep()
        notify("READY=1")
        while True:
            time.sleep(KEEP_INTERVAL_S)
            self.keep()

    def keep(self):
        try:
            kept = gateway.parse_kept(self.workers_file.read_text(encoding="utf-8"))
            found = gateway.read_workers(self.router.workers().text)
        except (OSError, ValueError) as error:
            say(f"the list of workers cannot be kept: {error}", level="WARN")
            return
        add, remove = gateway.correct(kept, found)
        for worker in remove:
            say("removes a worker", worker=worker.url, answer=self.router.remove(worker.id).status)
        for url in add:
            if time.monotonic() - self.begun.get(url, -gateway.PENDING_S) < gateway.PENDING_S:
                continue
            health = gateway_http.ask("GET", url + "/health", self.worker_key, None, self.ca_file, HEALTH_S)
            if health.status == 200:
                self.begun[url] = time.monotonic()
                say("adds a worker", worker=url, answer=self.router.add(url).status)


def run(folder):
    """Run the router until it ends."""
    words = json.loads((folder / "arguments.json").read_text(encoding="utf-8"))
    control_key, worker_key = credential("control-key"), credential("worker-key")
    url = f"http://{value_of(words, '--host')}:{value_of(words, '--port')}"
    (Path(os.environ["RUNTIME_DIRECTORY"]) / "inputs").write_bytes((folder / "inputs").read_bytes())
    router = gateway_http.Router(url, control_key, worker_key)
    Keeper(router, url, folder / "workers.json", worker_key, value_of(words, "--ca-cert-paths")).start()
    # Words of a command line for smg's own parser; the command line of this process does not hold them.
    secret = ["--api-key", worker_key, "--control-plane-api-keys", "ansible:ansible:admin:" + control_key]
    launch_router.launch_router(launch_router.parse_router_args([*words, *secret]))


def main():
    parser = argparse.ArgumentParser(description="Run the router, or try its flags.")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("path", type=Path)
    options = parser.parse_args()
    if options.check:
        check(json.loads(options.path.read_text(encoding="utf-8")))
    else:
        run(options.path)


if __name__ == "__main__":
    main()
