# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The lab's hub as a process on a free port, for the tests that download from it."""

import json
import pathlib
import subprocess
import sys
import urllib.request

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "lab" / "hub" / "hub.py"


class HubServer:
    """Serves (repo id, folder) pairs while the `with` block runs; a repeated id is a newer commit."""

    def __init__(self, *repos, address="127.0.0.1"):
        self.address = address
        self.arguments = [f"--repo={repo_id}={folder}" for repo_id, folder in repos]
        self.revisions = {}

    def __enter__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--listen", f"{self.address}:0", *self.arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        for line in self.process.stdout:
            if line.startswith("listening on "):
                self.url = line.split()[-1]
                return self
            repo_id, _, revision = line.split()
            self.revisions[repo_id] = revision
        raise RuntimeError(f"the hub ended with {self.process.wait()} before it listened")

    def __exit__(self, *exception):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def order(self, **orders):
        body = json.dumps(orders).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + "/_ctl", body), timeout=10):
            pass

    def log(self):
        with urllib.request.urlopen(self.url + "/_log", timeout=10) as answer:
            return json.load(answer)
