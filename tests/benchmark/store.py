#!/usr/bin/env python3
"""A checkpoint of a few GB through the whole model store, held against plain tools in the same run.

    tests/benchmark/store.py [--gib 4] [--shards 32] [--folder /var/tmp]

Everything is on one machine, the hub too, so that the ratios count, not the rates. Prints the table of
docs/model-store.md.
"""

import argparse
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/unit"))
from hub_server import HubServer

REPO, MIB, GIB = "org/model", 1 << 20, 1 << 30
MODULE = f"""
import importlib, json, sys
import ansible.module_utils
ansible.module_utils.__path__.append({str(ROOT / "module_utils")!r})
sys.path.insert(0, {str(ROOT / "library")!r})
from ansible.module_utils.testing import patch_module_args
with patch_module_args(json.loads(sys.argv[2])):
    importlib.import_module(sys.argv[1]).main()
"""
CLIENT = """
import sys
from huggingface_hub import snapshot_download
repo, revision, hub, folder = sys.argv[1:]
snapshot_download(repo, revision=revision, endpoint=hub, local_dir=folder, max_workers=8, token=False)
"""


def make_checkpoint(folder, size, shards):
    """Write shards of random tensors with true headers, and their index."""
    folder.mkdir()
    weights, width = {}, size // shards // 4 // 4096 * 4096
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        names = [f"layers.{number}.{part}" for part in "abcd"]
        header = {
            tensor: {"dtype": "U8", "shape": [width], "data_offsets": [at * width, (at + 1) * width]}
            for at, tensor in enumerate(names)
        }
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as content:
            content.write(struct.pack("<Q", len(text)) + text)
            for _ in names:
                left = width
                while left:
                    left -= content.write(os.urandom(min(left, MIB)))
        weights.update(dict.fromkeys(names, name))
    index = {"metadata": {"total_size": width * 4 * shards}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"architectures": ["KimiK25ForConditionalGeneration"]}\n')


def run(command, **options):
    """Return (seconds, processor seconds, most MiB of memory, what it said) of a process and its children."""
    since = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    said = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"{command} failed: {said[-2000:]}")
    return time.monotonic() - since, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, said


def module(name, **arguments):
    return run([sys.executable, "-c", MODULE, name, json.dumps(arguments)])


def drop_cache(folder):
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as content:
                os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def steps(hub, source, work, size):
    """Yield (step, seconds, processor seconds, MiB, note)."""
    names = [path.name for path in sorted(source.iterdir())]
    revision = hub.revisions[REPO]
    base = f"{hub.url}/{REPO}/resolve/{revision}/"
    fetched, copied, cloned = work / "curl", work / "cp", work / "client"
    settings = {"repo_id": REPO, "revision": revision, "endpoint": hub.url, "dest": str(work / "models")}
    final = work / "models" / REPO / revision

    yield "plan (check mode)", *module("hf_snapshot", **settings, _ansible_check_mode=True)
    fetched.mkdir()
    urls = [part for name in names for part in ("-o", str(fetched / name), base + name)]
    yield (
        "`curl`, 8 at once, then `sync`",
        *run(
            ["sh", "-c", 'curl -sSfLZ --no-progress-meter --parallel-max 8 "$@" && sync -f .', "sh", *urls],
            cwd=fetched,
        ),
    )
    yield (
        "`sha256sum` on all cores",
        *run(["sh", "-c", f"ls | xargs -P{os.cpu_count()} -n1 sha256sum"], cwd=fetched),
    )
    subprocess.run(["rm", "-r", fetched], check=True)
    yield (
        "the hub's client, 8 at once, checks nothing",
        *run(
            [sys.executable, "-c", CLIENT, REPO, revision, hub.url, str(cloned)],
            env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HOME": str(work / "home")},
            stderr=subprocess.DEVNULL,
        ),
    )
    subprocess.run(["rm", "-r", cloned], check=True)
    yield "fetch, verify, on the disk, under its name", *module("hf_snapshot", **settings)
    yield "again, nothing changed", *module("hf_snapshot", **settings)
    yield "again, `verify: full`, from memory", *module("hf_snapshot", **settings, verify="full")
    drop_cache(final)
    yield "again, `verify: full`, from the disk", *module("hf_snapshot", **settings, verify="full")
    drop_cache(final)
    yield "headers against the index", *module("model_content", path=str(final), tokenizer=False)
    drop_cache(final)
    yield "`weights_read`: how fast is the disk", *module("weights_read", path=str(final))
    yield "`cat` of all files, from the disk", *run(["sh", "-c", "cat *.safetensors > /dev/null"], cwd=final)
    drop_cache(final)
    yield "`weights_read` with `warm`", *module("weights_read", path=str(final), warm=True, reserve_gib=0)
    yield "`cat` of all files, after that", *run(["sh", "-c", "cat *.safetensors > /dev/null"], cwd=final)
    yield "a copy by `cp -a`, then `sync`", *run(["sh", "-c", f"cp -a {final} {copied} && sync -f {copied}"])
    # The copy takes the place of the store's own.
    subprocess.run(["sh", "-c", f"chmod -R u+w {final} && rm -r {final} && mv {copied} {final}"], check=True)
    yield "again, after it was copied here", *module("hf_snapshot", **settings)


def notes(said):
    """Return what a module said of its work, in a few words."""
    try:
        result = json.loads(said)
    except ValueError:
        return ""
    if "to_fetch" in result:
        changed = "changed" if result["changed"] else "nothing changed"
        return f"{result['to_fetch']['files']} of {result['files']} files to fetch, {changed}"
    if result.get("rate"):
        return f"{result['rate'] / 1e6:.0f} MB/s, {result['seconds']} s to read; warmed: {result['warmed']}"
    return f"{len(result['problems'])} problems" if "problems" in result else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--shards", type=int, default=32)
    parser.add_argument("--folder", default="/var/tmp", help="on the disk to measure")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        source = pathlib.Path(work, "source")
        make_checkpoint(source, int(args.gib * GIB), args.shards)
        size = sum(path.stat().st_size for path in source.iterdir())
        print(f"{size / 1e9:.2f} GB in {args.shards} shards, {os.cpu_count()} cores\n")
        print("| step | seconds | MB/s | CPU s a GiB | MiB of memory | says |\n|---|---|---|---|---|---|")
        with HubServer((REPO, source)) as hub:
            for step, seconds, cpu, memory, said in steps(hub, source, pathlib.Path(work), size):
                cells = [
                    f"{seconds:.1f}",
                    f"{size / seconds / 1e6:.0f}",
                    f"{cpu * GIB / size:.2f}",
                    f"{memory:.0f}",
                ]
                print("| " + " | ".join([step, *cells, notes(said)]) + " |", flush=True)
        # Folders of a snapshot are read-only.
        subprocess.run(["chmod", "-R", "u+w", work], check=True)


if __name__ == "__main__":
    main()
