#!/usr/bin/env python3
"""What brings a model's bytes best: the hub's client as it is, aria2, or our own HTTP with ranges?

    tests/benchmark/transfer.py --client-python /opt/sglang/tools/hub/bin/python [--megabytes 1024]

All three fetch from the lab's hub on loopback, under the same faults, in one run; then they race without
faults, and our hashing is held against sha256sum. Prints the tables of docs/model-store.md. Needs aria2c, and
root for the full disk (tmpfs).
"""

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/unit"))
from hub_server import HubServer

REPO, NAME, MIB = "org/model", "model.safetensors", 1 << 20
SIZE = 48 * MIB
# So long a tool waits for a byte; all three are told.
SILENCE = 3
# So long it may take in all, before it counts as hanging.
LIMIT = 45
TOKEN = "hf_benchmark"

CLIENT = """
import json, sys
from huggingface_hub import hf_hub_download
job = json.loads(sys.argv[1])
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(job["workers"]) as pool:
    list(pool.map(lambda name: hf_hub_download(job["repo"], name, revision=job["revision"],
        endpoint=job["hub"], local_dir=job["folder"], token=job["token"] or False), job["files"]))
"""
RANGES = """
import json, sys
import ansible.module_utils
ansible.module_utils.__path__.append(sys.argv[2])
from ansible.module_utils.sglang_kit import snapshot, snapshot_part, snapshot_ranges
job = json.loads(sys.argv[1])
snapshot_ranges.SILENCE = job["silence"]
class Silent:
    def gained(self, number): pass
files = [snapshot.RemoteFile(name, size, "", sha256) for name, (size, sha256) in job["files"].items()]
transfer = snapshot_ranges.RangeTransfer(job["repo"], job["revision"], job["hub"], job["token"],
    job["folder"], job["limit"], job["workers"], Silent())
try:
    for _ in range(2):
        # As the module does: what was read back and is wrong is fetched once more.
        wrong = []
        for file in transfer.fetch(files):
            path = job["folder"] + "/" + file.path
            if job["verify"] and not snapshot.is_right(file, snapshot.read(path, large=True)):
                import os
                os.unlink(path)
                wrong.append(file)
        files = wrong
        if not files:
            break
    else:
        sys.exit("came wrong twice")
except snapshot.SnapshotError as error:
    sys.exit(str(error))
"""


def sha256(path):
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def make(path, size):
    # In another process: the memory of this one would count for the tools that it starts.
    subprocess.run(
        ["dd", "if=/dev/urandom", f"of={path}", "bs=1M", f"count={size // MIB}", "status=none"], check=True
    )


class Bench:
    def __init__(self, hub, folder, files, client_python):
        self.hub, self.folder, self.files = hub, folder, files
        self.client_python = client_python
        self.verify = True
        self.tools = {"client 0.36.2": self.client, "aria2": self.aria2, "ranges": self.ranges}

    def job(self, workers, names, token):
        return {
            "repo": REPO,
            "revision": self.hub.revisions[REPO],
            "hub": self.hub.url,
            "folder": str(self.folder),
            "token": token,
            "workers": workers,
            "silence": SILENCE,
            "limit": LIMIT - 5,
            "verify": self.verify,
            "files": {name: self.files[name] for name in names},
        }

    def client(self, workers, names, token=None):
        job = self.job(workers, names, token)
        environment = {
            "HF_HOME": str(self.folder / ".home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": str(SILENCE),
            "HF_HUB_ETAG_TIMEOUT": str(SILENCE),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        return [self.client_python, "-c", CLIENT, json.dumps(job)], environment

    def aria2(self, workers, names, token=None):
        lines = []
        for name in names:
            url = f"{self.hub.url}/{REPO}/resolve/{self.hub.revisions[REPO]}/{name}"
            lines.append(f"{url}\n  out={name}\n  checksum=sha-256={self.files[name][1]}\n")
            if token:
                lines.append(f"  header=Authorization: Bearer {token}\n")
        (self.folder / "aria2.in").write_text("".join(lines))
        return [
            "aria2c",
            "--no-conf",
            "--quiet",
            f"--input-file={self.folder / 'aria2.in'}",
            f"--dir={self.folder}",
            f"--max-concurrent-downloads={workers}",
            "--continue",
            "--auto-file-renaming=false",
            "--check-integrity",
            "--file-allocation=none",
            "--auto-save-interval=1",
            f"--timeout={SILENCE}",
            f"--connect-timeout={SILENCE}",
            "--max-tries=8",
            "--retry-wait=1",
        ], {}

    def ranges(self, workers, names, token=None):
        command = [sys.executable, "-c", RANGES, json.dumps(self.job(workers, names, token))]
        return [*command, str(ROOT / "module_utils")], {}

    # -- one case

    def start(self, tool, workers=1, names=(NAME,), **more):
        command, environment = self.tools[tool](workers, names, **more)
        return subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def finish(self, child, limit=LIMIT):
        """Return the exit status; None if it had to be killed."""
        try:
            return child.wait(limit)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return None

    def state(self, status):
        """Say what the outcome is: the exit status, and the file under the final name."""
        path = self.folder / NAME
        # aria2 writes under the final name; its control file beside says that it is not finished.
        there = path.is_file() and not (self.folder / (NAME + ".aria2")).exists()
        if there and sha256(path) == self.files[NAME][1]:
            return "right" if status == 0 else "right, but failed"
        if status == 0:
            return "WRONG, success" if there else "NOTHING, success"
        end = "hung" if status is None else "failed"
        return f"{end}, WRONG file stays" if there else end

    def sent(self):
        time.sleep(0.3)
        return sum(entry["sent"] for entry in self.hub.log() if "/_cdn/" in entry["path"])

    def clear(self):
        self.hub.order(rules=[], token=None, clear_log=True)
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def under_rules(self, tool, rules, **more):
        self.hub.order(rules=rules)
        since = time.monotonic()
        text = self.state(self.finish(self.start(tool, **more)))
        text += f", {time.monotonic() - since:.0f} s"
        sent = self.sent()
        if not text.startswith("right"):
            self.hub.order(rules=[])
            text += "; again: " + self.state(self.finish(self.start(tool, **more)))
            sent = self.sent()
        twice = (sent - SIZE) / MIB
        return text + (f"; {twice:.0f} MiB twice" if twice >= 1 else "")

    def kill(self, tool, times, damage=False):
        """Kill the tool in mid-file again and again; each time a bit further."""
        for number in range(times):
            stop = (number + 1) * (SIZE // (times + 1))
            rules = [{"path": "_cdn", "do": "stall", "after": SIZE // (times + 1), "seconds": 60}]
            self.hub.order(rules=rules, clear_log=number == 0)
            child = self.start(tool)
            deadline = time.monotonic() + 8
            while self.on_disk() < stop - 2 * MIB and time.monotonic() < deadline and child.poll() is None:
                time.sleep(0.02)
            child.send_signal(signal.SIGKILL)
            child.wait()
        if damage:
            part = max(self.partials(), key=lambda path: path.stat().st_size)
            with part.open("r+b") as content:
                content.seek(MIB)
                content.write(b"damage")
        self.hub.order(rules=[])
        text = self.state(self.finish(self.start(tool)))
        if not text.startswith("right"):
            text += "; again: " + self.state(self.finish(self.start(tool)))
        # What a killed tool had not read yet was sent in vain as well; it is counted for all.
        twice = (self.sent() - SIZE) / MIB
        return f"{text}; {max(0, twice):.0f} MiB twice"

    def partials(self):
        return [p for p in self.folder.rglob("*") if p.is_file() and p.name not in ("aria2.in",)]

    def on_disk(self):
        found = 0
        for path in self.partials():
            with contextlib.suppress(FileNotFoundError):
                found = max(found, path.stat().st_size)
        return found

    def full_disk(self, tool):
        small = pathlib.Path(tempfile.mkdtemp())
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(small)], check=True)
        mine, self.folder = self.folder, small
        try:
            since = time.monotonic()
            text = self.state(self.finish(self.start(tool)))
            return f"{text}, {time.monotonic() - since:.0f} s"
        finally:
            self.folder = mine
            subprocess.run(["umount", str(small)], check=True)
            small.rmdir()

    def token(self, tool):
        """Say whether the token goes on to the host that the hub redirects to."""
        self.hub.order(token=TOKEN, cdn=self.hub.url.replace("127.0.0.1", "localhost"))
        text = self.state(self.finish(self.start(tool, token=TOKEN)))
        leaked = any(entry["token"] for entry in self.hub.log() if "/_cdn/" in entry["path"])
        self.hub.order(cdn=None)
        return f"{text}, token {'LEAKED' if leaked else 'kept'}"


def cdn(do, **more):
    return {"path": "_cdn", "method": "GET", "do": do, **more}


def faults(bench):
    """Yield (name, what to do with a tool's name)."""

    def rules(*rules):
        return lambda tool: bench.under_rules(tool, list(rules))

    around = {"Location": f"{bench.hub.url}/{REPO}/resolve/x/{NAME}"}
    after = 20 * MIB + 5
    yield "none", rules()
    yield "cut at 20 MiB, once", rules(cdn("truncate", after=after, times=1))
    yield "reset at 20 MiB, once", rules(cdn("reset", after=after, times=1))
    yield "cut every 5 MiB", rules(cdn("truncate", after=5 * MIB))
    yield "cut once, then ranges ignored", rules(cdn("truncate", after=after, times=1), cdn("whole"))
    yield "stall for a minute, once", rules(cdn("stall", after=after, seconds=60, times=1))
    yield "one byte wrong, once", rules(cdn("corrupt", after=after, times=1))
    yield "one byte always wrong", rules(cdn("corrupt", after=after))
    yield "file shorter than listed", rules(cdn("resize", after=after))
    yield (
        "429, Retry-After 2, twice",
        rules(
            {"path": "resolve|_cdn", "method": "GET", "do": "status", "code": 429, "times": 2}
            | {"headers": {"Retry-After": "2"}}
        ),
    )
    yield (
        "503, three times",
        rules({"path": "resolve|_cdn", "method": "GET", "do": "status", "code": 503, "times": 3}),
    )
    yield (
        "redirects in a circle",
        rules({"path": "/resolve/", "do": "status", "code": 302, "headers": around}),
    )
    yield (
        "403 gated",
        rules({"path": "/resolve/", "do": "status", "code": 403, "headers": {"X-Error-Code": "GatedRepo"}}),
    )
    yield "kill -9 once", lambda tool: bench.kill(tool, 1)
    yield "kill -9, five times", lambda tool: bench.kill(tool, 5)
    yield "kill -9, part damaged", lambda tool: bench.kill(tool, 1, damage=True)
    yield "disk full", bench.full_disk
    yield "redirect to another host", bench.token


def race(bench, names, workers):
    """Fetch all; return {tool: text}, the median of three."""
    size = sum(bench.files[name][0] for name in names)
    found = {}
    # The bytes alone: reading back is the module's, whatever brought them.
    bench.verify = False
    for tool in bench.tools:
        runs = []
        for _ in range(3):
            bench.clear()
            since = time.monotonic()
            child = bench.start(tool, workers, names)
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            assert child.returncode == 0, (tool, child.returncode)
            cpu = usage.ru_utime + usage.ru_stime
            runs.append((time.monotonic() - since, cpu, usage.ru_maxrss >> 10))
        seconds, cpu, memory = sorted(runs)[1]
        found[tool] = (
            f"{size / seconds / 1e6:.0f} MB/s, {cpu * (1 << 30) / size:.1f} CPU s a GiB, {memory} MiB"
        )
    return found


def hashing(folder, names):
    """Hash all; return {way: text}, the median of three."""
    program = """
import sys
import ansible.module_utils
ansible.module_utils.__path__.append(sys.argv[1])
from ansible.module_utils.sglang_kit import snapshot, snapshot_store
with snapshot_store.hashers() as pool:
    list(pool.map(lambda path: snapshot.read(path, large=True), sys.argv[2:]))
"""
    paths = [str(folder / name) for name in names]
    cores = str(len(os.sched_getaffinity(0)))
    ways = {
        "the module's": [sys.executable, "-c", program, str(ROOT / "module_utils"), *paths],
        "sha256sum on all cores": ["xargs", "-P", cores, "-n", "1", "sha256sum"],
    }
    size = sum((folder / name).stat().st_size for name in names)
    found = {}
    for way, command in ways.items():
        runs = []
        for _ in range(3):
            since, before = time.monotonic(), os.times()
            subprocess.run(command, input="\n".join(paths), text=True, stdout=subprocess.DEVNULL, check=True)
            after = os.times()
            cpu = after.children_user + after.children_system - before.children_user - before.children_system
            runs.append((time.monotonic() - since, cpu))
        seconds, cpu = sorted(runs)[1]
        found[way] = f"{size / seconds / 1e6:.0f} MB/s, {cpu * (1 << 30) / size:.1f} CPU s a GiB"
    return found


def table(head, rows):
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--client-python", required=True)
    parser.add_argument("--megabytes", type=int, default=1024, help="of the race")
    parser.add_argument("--only", default="", help="only faults with this in their name; race")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as work:
        source, target = pathlib.Path(work, "source"), pathlib.Path(work, "target")
        source.mkdir()
        target.mkdir()
        make(source / NAME, SIZE)
        make(source / "large.safetensors", args.megabytes * MIB)
        for number in range(8):
            make(source / f"race-{number}.safetensors", args.megabytes // 8 * MIB)
        files = {path.name: (path.stat().st_size, sha256(path)) for path in source.iterdir()}
        with HubServer((REPO, source)) as hub:
            bench = Bench(hub, target, files, args.client_python)

            def rows():
                for name, act in faults(bench):
                    if args.only in name and args.only != "race":
                        cells = []
                        for tool in bench.tools:
                            bench.clear()
                            cells.append(act(tool))
                        yield [name, *cells]

            table(["fault", *bench.tools], rows())
            print()
            racers = [name for name in files if name.startswith("race")]
            if args.only in ("", "race"):
                table(
                    ["without faults", *bench.tools],
                    (
                        [
                            f"{len(names)} x {files[names[0]][0] // MIB} MiB, {workers} at once",
                            *race(bench, names, workers).values(),
                        ]
                        for names, workers in ((["large.safetensors"], 1), (racers, 1), (racers, 8))
                    ),
                )
                print()
                compared = hashing(source, racers)
                table(["hashing", *compared], [["8 files at once", *compared.values()]])


if __name__ == "__main__":
    main()
