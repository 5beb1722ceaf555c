#!/usr/bin/env python3
"""A stand-in for SGLang's server process: plays steps.json, which lies beside its --config file.

Steps: ["write", text], ["file", name] (wait for a file of that name beside steps.json), ["health", status]
(listen and answer /health so), ["asked", n] (wait until /health was asked n times more), ["env", name],
["exit", status], ["kill", signal], ["grandchild", seconds] (a process that keeps the output open),
["worker", program] (a process as multiprocessing starts one), ["kill_worker", signal] (the newest),
["kill_workers", signal] (all), ["sleep", seconds].
On SIGTERM it drains for `drain` seconds, where a step ["drain", seconds] says so, and ends with 0.
"""

import http.server
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

config = pathlib.Path(sys.argv[sys.argv.index("--config") + 1])
port = next(int(line.split()[1]) for line in config.read_text().splitlines() if line.startswith("port:"))
state = {"status": 503, "drain": 0.0, "asked": 0}
workers = []


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(state["status"] if self.path == "/health" else 404)
        self.end_headers()
        state["asked"] += 1

    def log_message(self, *args):
        pass


def on_term(number, frame):
    time.sleep(state["drain"])
    sys.stdout.write("Gracefully exiting\n")
    sys.stdout.flush()
    os._exit(0)


for action, value in json.loads((config.parent / "steps.json").read_text()):
    if action == "write":
        sys.stderr.write(value)
        sys.stderr.flush()
    elif action == "file":
        while not (config.parent / value).exists():
            time.sleep(0.01)
    elif action == "asked":
        wanted = state["asked"] + value
        while state["asked"] < wanted:
            time.sleep(0.01)
    elif action == "sleep":
        time.sleep(value)
    elif action == "health":
        if "server" not in state:
            state["server"] = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
            threading.Thread(target=state["server"].serve_forever, daemon=True).start()
        state["status"] = value
    elif action == "drain":
        state["drain"] = value
        signal.signal(signal.SIGTERM, on_term)
    elif action == "env":
        sys.stderr.write(f"{value}={os.environ.get(value)}\n")
    elif action == "grandchild":
        subprocess.Popen(["sleep", str(value)])
    elif action == "worker":
        workers.append(subprocess.Popen([sys.executable, "-c", value, "--multiprocessing-fork"]))
    elif action == "kill_worker":
        workers[-1].send_signal(value)
    elif action == "kill_workers":
        for worker in workers:
            worker.send_signal(value)
    elif action == "kill":
        os.kill(os.getpid(), value)
    elif action == "exit":
        sys.exit(value)
