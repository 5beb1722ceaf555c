# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The model store where it takes longer: twenty kills, disks that fill up, as many files as Kimi has."""

import hashlib
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/unit"))
from hub_server import HubServer

REPO = "org/model"
MIB = 1 << 20
SHARDS, SHARD = 2, 160 * MIB
# What a kill may cost of each file under way: a block of the part, and what was between the two ends.
LOST_PER_KILL = 16 * MIB + 8 * MIB
MODULE = f"""
import json, sys
import ansible.module_utils
ansible.module_utils.__path__.append({str(ROOT / "module_utils")!r})
sys.path.insert(0, {str(ROOT / "library")!r})
import hf_snapshot
from ansible.module_utils.testing import patch_module_args
with patch_module_args(json.load(sys.stdin)):
    hf_snapshot.main()
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    (folder / "config.json").write_text("{}\n")
    for number in range(SHARDS):
        with (folder / f"model-{number}.safetensors").open("wb") as content:
            for _ in range(SHARD // MIB):
                content.write(os.urandom(MIB))
    with HubServer((REPO, folder)) as server:
        server.folder = folder
        yield server


@pytest.fixture
def start(hub):
    """Return a function that starts the module in a process of its own."""
    hub.order(rules=[], clear_log=True)
    children = []

    def go(dest, **arguments):
        child = subprocess.Popen(
            [sys.executable, "-c", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        children.append(child)
        defaults = {"repo_id": REPO, "revision": hub.revisions[REPO], "endpoint": hub.url, "timeout": 60}
        child.stdin.write(json.dumps({**defaults, "dest": str(dest), **arguments}))
        child.stdin.close()
        return child

    yield go
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def result(child):
    return json.loads(child.stdout.read())


def wait_for(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def allocated(folder):
    """Return the bytes of the parts and files so far; they come and go meanwhile."""
    found = 0
    for path in folder.rglob("*.safetensors"):
        try:
            found += path.stat().st_size
        except FileNotFoundError:
            continue
    return found


def digests(folder):
    found = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        with path.open("rb") as content:
            found[path.name] = hashlib.file_digest(content, "sha256").hexdigest()
    return found


def test_killed_twenty_times_in_mid_file(start, hub, tmp_path):
    kills, step = 20, SHARD // 10
    staging = tmp_path / REPO / f".{hub.revisions[REPO]}.partial"
    final = tmp_path / REPO / hub.revisions[REPO]
    for _ in range(kills):
        # Both files stop a bit further on, wherever they begin.
        hub.order(rules=[{"path": "_cdn", "do": "stall", "after": step + 4 * MIB, "seconds": 20}])
        enough = allocated(staging) + 2 * MIB
        child = start(tmp_path)
        wait_for(lambda enough=enough: allocated(staging) >= enough, "more bytes")
        child.kill()
        child.wait()
        assert not final.exists()
    hub.order(rules=[])
    done = result(start(tmp_path))
    assert digests(final) == digests(hub.folder)
    sent = sum(entry["sent"] for entry in hub.log() if "/_cdn/" in entry["path"])
    twice = sent - SHARDS * SHARD
    print(
        f"{kills} kills: {twice / MIB:.0f} MiB twice, of which {done['refetched_bytes'] / MIB:.0f} at the end"
    )
    assert twice <= kills * SHARDS * LOST_PER_KILL
    assert result(start(tmp_path))["changed"] is False


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1.5 GiB, of which as much is used as is written."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1536m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_disk_that_fills_up_meanwhile(start, hub, small_disk):
    hub.order(rules=[{"path": "_cdn", "do": "stall", "after": 40 * MIB, "seconds": 5, "times": 2}])
    child = start(small_disk)
    staging = small_disk / REPO / f".{hub.revisions[REPO]}.partial"
    final = small_disk / REPO / hub.revisions[REPO]
    wait_for(lambda: allocated(staging) >= 80 * MIB, "the first bytes")
    filler = small_disk / "filler"
    subprocess.run(["fallocate", "-l", str(1400 * MIB), str(filler)], check=True)
    failed = result(child)
    assert failed["failed"] is True
    assert "cannot be written: [Errno 28] No space left on device" in failed["msg"]
    assert "see what else writes there, make room and run again" in failed["msg"]
    assert not final.exists()
    filler.unlink()
    hub.order(rules=[])
    done = result(start(small_disk))
    assert done["changed"] is True
    assert done["refetched_bytes"] <= SHARDS * LOST_PER_KILL
    assert digests(final) == digests(hub.folder)


def test_too_few_inodes_are_refused_before_the_first_byte(start, hub, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=50", "tmpfs", str(folder)], check=True)
    try:
        failed = result(start(folder))
        assert "free inodes; expected 106 for 3 files. Nothing was fetched" in failed["msg"]
        assert list(folder.iterdir()) == []
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_unchanged_run_over_119_shards_takes_less_than_a_second(start, tmp_path_factory, tmp_path):
    """Of processor time: what the machine does beside is not the module's."""
    folder = tmp_path_factory.mktemp("shards")
    for number in range(119):
        (folder / f"model-{number:05}-of-00119.safetensors").write_bytes(b"%d" % number)
    for number in range(20):
        (folder / f"code_{number}.py").write_text("pass\n")
    with HubServer(("org/big", folder)) as hub:
        there = {"repo_id": "org/big", "revision": hub.revisions["org/big"], "endpoint": hub.url}
        assert result(start(tmp_path, **there))["files"] == 139
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        child = start(tmp_path, **there)
        assert result(child)["changed"] is False
        child.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


# -- on a real host, through Ansible

NAME, OCTET, CONTROLLER = "store1", "55", "10.99.7.1"


def sh(script):
    command = ["ssh", "-F", str(ROOT / ".lab/ssh/config"), NAME, "sudo", "bash", "-s"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def play(hub, tmp_path_factory):
    """Bring a host up; return a function that starts the fetch on it by ansible-playbook."""
    work = tmp_path_factory.mktemp("play")
    subprocess.run([ROOT / "lab/hosts", "up", NAME, OCTET], check=True)
    host = {
        "ansible_ssh_common_args": f"-F {ROOT}/.lab/ssh/config",
        "ansible_become": True,
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    (work / "hosts.yml").write_text(yaml.safe_dump({"sglang": {"hosts": {NAME: host}}}))
    with HubServer((REPO, hub.folder), address=CONTROLLER) as server:
        task = {
            "name": "Fetch",
            "hf_snapshot": {"repo_id": REPO, "revision": server.revisions[REPO], "endpoint": server.url},
        }
        (work / "play.yml").write_text(
            yaml.safe_dump([{"hosts": NAME, "gather_facts": False, "tasks": [task]}])
        )

        def go():
            return subprocess.Popen(
                [ROOT / ".venv/bin/ansible-playbook", "-i", work / "hosts.yml", work / "play.yml"],
                env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

        go.hub = server
        yield go
    subprocess.run([ROOT / "lab/hosts", "down", NAME], check=True)


@pytest.fixture
def fetching(play):
    """A fetch from nothing that is under way, and takes ten seconds more."""
    sh("rm -rf /srv/models")
    play.hub.order(rules=[{"path": "_cdn", "do": "stall", "after": 20 * MIB, "seconds": 10, "times": 2}])
    running = play()
    wait_for(lambda: sh("du -sm /srv/models | cut -f1").isdigit(), "the first bytes")
    yield running
    running.kill()
    running.wait()


def digests_there(play):
    lines = sh(f"cd /srv/models/{REPO}/{play.hub.revisions[REPO]} && sha256sum *.safetensors").splitlines()
    return {name: digest for digest, name in map(str.split, lines)}


def test_connection_that_is_cut_does_not_end_the_fetch(play, hub, fetching):
    # Every session, and not the daemon that would let the next one in.
    sh("kill -9 $(pgrep -f 'sshd.*:.*@' | grep -vx $PPID)")
    output, _ = fetching.communicate(timeout=120)
    assert fetching.returncode == 0, output
    assert "no connection, trying again while the fetch goes on" in output
    assert digests_there(play) == digests(hub.folder)
    assert "ok=1    changed=0" in play().communicate(timeout=60)[0]


def test_interrupted_ansible_does_not_end_the_fetch_and_the_next_run_joins_it(play, hub, fetching):
    fetching.send_signal(signal.SIGINT)
    fetching.communicate(timeout=60)
    output, _ = (again := play()).communicate(timeout=120)
    assert again.returncode == 0, output
    assert f"{REPO}: file " in output
    assert digests_there(play) == digests(hub.folder)
    sent = sum(entry["sent"] for entry in play.hub.log() if "/_cdn/" in entry["path"])
    assert sent % (SHARDS * SHARD) == 0, "bytes came twice"
