# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The module as a whole, with the real hub client, against the lab's hub on loopback."""

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import signal
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
import types

import hf_snapshot
import pytest
from ansible.module_utils.sglang_kit import (
    snapshot_http,
    snapshot_part,
    snapshot_ranges,
    snapshot_store,
    snapshot_transfer,
)
from ansible.module_utils.testing import patch_module_args
from hub_server import HubServer

ROOT = pathlib.Path(__file__).resolve().parents[2]
REPO = "org/tiny"
WEIGHTS = bytes(range(256)) * 12000
FILES = {
    "config.json": b'{"model_type": "kimi_k25"}\n',
    "chat_template.jinja": b"{{ messages }}",
    "code/tokenization.py": b"pass\n",
    "tiktoken.model": b"IQ== 0\n" * 1000,
    "model-00001-of-000002.safetensors": WEIGHTS,
    "model-00002-of-000002.safetensors": WEIGHTS[::-1],
    "training_state.pt": b"\x80\x04N.",
}
KEPT = {path: content for path, content in FILES.items() if path != "training_state.pt"}
# Where the shards' bytes come from, as the hub's fault rules see it.
FIRST_SHARD, SECOND_SHARD = "_cdn.*model-00001", "_cdn.*model-00002"
RETURNED = ("changed", "path", "revision", "files", "bytes", "fetched_bytes")
# Runs the module in a process of its own, which can be killed; arguments on standard input.
PROCESS = f"""
import json, sys
import ansible.module_utils
ansible.module_utils.__path__.append({str(ROOT / "module_utils")!r})
sys.path.insert(0, {str(ROOT / "library")!r})
import hf_snapshot
from ansible.module_utils.sglang_kit import snapshot_part
from ansible.module_utils.testing import patch_module_args
arguments = json.load(sys.stdin)
snapshot_part.BLOCK = arguments.pop("block", snapshot_part.BLOCK)
with patch_module_args(arguments):
    hf_snapshot.main()
"""


def write(folder, files):
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    older = write(tmp_path_factory.mktemp("older"), {"config.json": b"{}\n"})
    newer = write(tmp_path_factory.mktemp("newer"), FILES)
    with HubServer((REPO, older), (REPO, newer)) as hub:
        yield hub


@pytest.fixture
def hub(server):
    yield server
    server.order(rules=[], token=None, page=1000, cdn=None, clear_log=True)


@pytest.fixture
def run(hub, tmp_path, capsys):
    """Return a function that runs the module and returns what it prints."""

    def run_module(check=False, **arguments):
        parameters = arguments_for(hub, tmp_path, **arguments)
        with patch_module_args(dict(parameters, _ansible_check_mode=check)), pytest.raises(SystemExit):
            hf_snapshot.main()
        return json.loads(capsys.readouterr().out)

    return run_module


def arguments_for(hub, tmp_path, **arguments):
    defaults = {
        "repo_id": REPO,
        "revision": hub.revisions[REPO],
        "dest": str(tmp_path / "models"),
        "endpoint": hub.url,
        "timeout": 20,
    }
    return {**defaults, **arguments}


def final(hub, tmp_path):
    return tmp_path / "models" / REPO / hub.revisions[REPO]


def contents(folder):
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if not path.is_dir()}
    return {name: path.read_bytes() for name, path in found.items() if name != "manifest.json"}


def downloads(hub):
    """Return how often each file's content was sent, by name."""
    sent = [entry["path"].rpartition("/")[2] for entry in hub.log() if is_download(entry)]
    return {name: sent.count(name) for name in sorted(set(sent))}


def is_download(entry):
    in_repo = "/resolve/" in entry["path"] or "/_cdn/" in entry["path"]
    return in_repo and entry["method"] == "GET" and entry["status"] in (200, 206)


def wait_for(condition, what):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


@contextlib.contextmanager
def process(hub, tmp_path, **arguments):
    """Start the module beside the test; it is killed at the end if it still runs."""
    child = subprocess.Popen(
        [sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        child.stdin.write(json.dumps(arguments_for(hub, tmp_path, **arguments)))
        child.stdin.close()
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


# -- the ordinary way


def test_fetches_everything_but_pickles_under_the_commits_name(run, hub, tmp_path):
    result = run()
    folder = final(hub, tmp_path)
    assert contents(folder) == KEPT
    size = sum(map(len, KEPT.values()))
    assert {
        name: result[name] for name in ("changed", "path", "revision", "files", "bytes", "fetched_bytes")
    } == {
        "changed": True,
        "path": str(folder),
        "revision": hub.revisions[REPO],
        "files": len(KEPT),
        "bytes": size,
        "fetched_bytes": size,
    }
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(manifest["files"]) == sorted(KEPT)
    assert [path.name for path in folder.parent.iterdir() if path.name != ".lock"] == [folder.name]


def test_files_are_real_and_read_only(run, hub, tmp_path):
    run()
    folder = final(hub, tmp_path)
    found = [folder, *folder.rglob("*")]
    assert not any(path.is_symlink() for path in found)
    assert {path.stat().st_mode & 0o777 for path in found if path.is_dir()} == {0o555}
    assert {path.stat().st_mode & 0o777 for path in found if path.is_file()} == {0o444}
    assert {path.stat().st_uid for path in found} == {os.getuid()}


def test_second_run_asks_nobody(run, hub):
    run()
    hub.order(clear_log=True)
    result = run()
    assert (result["changed"], result["fetched_bytes"], result["files"]) == (False, 0, len(KEPT))
    assert hub.log() == []


def test_listing_in_pages_is_read_to_its_end(run, hub, tmp_path):
    hub.order(page=2)
    run()
    assert contents(final(hub, tmp_path)) == KEPT


def test_branch_is_resolved_once_recorded_and_reported(hub, tmp_path):
    with process(hub, tmp_path, revision="main") as child:
        result = json.loads(child.stdout.read())
    pinned = hub.revisions[REPO]
    assert (result["revision"], result["path"]) == (pinned, str(final(hub, tmp_path)))
    assert f"main of {REPO} is {pinned} on this node, and stays so" in json.dumps(result["warnings"])
    assert f"Pin {pinned} in the inventory" in json.dumps(result["warnings"])
    hub.order(clear_log=True)
    with process(hub, tmp_path, revision="main") as child:
        result = json.loads(child.stdout.read())
    assert (result["changed"], result["revision"], hub.log()) == (False, pinned, [])


def test_branch_does_not_move_by_itself(run, hub, tmp_path):
    older = "0123456789abcdef0123456789abcdef01234567"
    refs = final(hub, tmp_path).parent / ".refs"
    run(check=True, revision="main")
    assert not refs.exists()
    refs.parent.mkdir(parents=True)
    refs.write_text(json.dumps({"main": older}))
    assert f"revision {older} is not in {REPO}" in run(revision="main")["msg"]
    refs.write_text("{")
    assert f"{refs} is damaged" in run(revision="main")["msg"]


def test_token_is_sent_from_its_file_and_shown_nowhere(run, hub, tmp_path):
    hub.order(token="hf_right")
    (tmp_path / "token").write_text("hf_right\n")
    result = run(token_file=str(tmp_path / "token"))
    assert result["changed"] is True
    assert "hf_right" not in json.dumps(result)


# -- what is there already


def test_check_mode_shows_the_plan_and_writes_nothing(run, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_transfer, "client_missing", lambda: "no client on a fresh node")
    result = run(check=True, transfer="client")
    size = sum(map(len, KEPT.values()))
    assert (result["changed"], result["to_fetch"]) == (True, {"files": len(KEPT), "bytes": size})
    assert result["free_bytes"] > 0
    assert result["path"] == str(final(hub, tmp_path))
    assert result["diff"]["before"] == ""
    assert [line.split()[0] for line in result["diff"]["after"].splitlines()] == sorted(KEPT)
    assert not (tmp_path / "models").exists()
    assert downloads(hub) == {}


@pytest.mark.parametrize("verify", ["fast", "full"])
def test_only_the_missing_file_is_fetched_again(run, hub, tmp_path, verify):
    run()
    (final(hub, tmp_path) / "config.json").unlink()
    hub.order(clear_log=True)
    assert run(check=True, verify=verify)["to_fetch"]["files"] == 1
    result = run(verify=verify)
    assert (result["changed"], result["fetched_bytes"]) == (True, len(KEPT["config.json"]))
    assert downloads(hub) == {"config.json": 1}
    assert contents(final(hub, tmp_path)) == KEPT
    assert run()["changed"] is False


def test_wrong_bytes_of_the_right_size_and_time_are_found_by_full(run, hub, tmp_path):
    run()
    shard = final(hub, tmp_path) / "model-00002-of-000002.safetensors"
    before = shard.stat()
    shard.chmod(0o644)
    shard.write_bytes(b"\0" * before.st_size)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert run()["changed"] is False
    hub.order(clear_log=True)
    assert run(check=True, verify="full")["to_fetch"] == {"files": 1, "bytes": len(WEIGHTS)}
    assert run(verify="full")["changed"] is True
    assert downloads(hub) == {shard.name: 1}
    assert contents(final(hub, tmp_path)) == KEPT


def test_another_choice_of_files_keeps_what_is_there(run, hub, tmp_path):
    run(allow_patterns=["*.json", "*.safetensors"])
    assert sorted(contents(final(hub, tmp_path))) == [
        name for name in sorted(KEPT) if "json" in name or "safe" in name
    ]
    hub.order(clear_log=True)
    run()
    assert downloads(hub) == {"chat_template.jinja": 1, "tiktoken.model": 1, "tokenization.py": 1}
    assert contents(final(hub, tmp_path)) == KEPT


def test_files_put_there_by_hand_are_taken_over_if_they_are_right(run, hub, tmp_path):
    write(final(hub, tmp_path), {**KEPT, "config.json": b'{"model_type": "kimi_k26"}\n', "note.txt": b"mine"})
    run()
    assert downloads(hub) == {"config.json": 1}
    assert contents(final(hub, tmp_path)) == KEPT


# -- what goes wrong


def test_wrong_byte_is_caught_and_the_file_fetched_again(run, hub, tmp_path):
    hub.order(rules=[{"path": FIRST_SHARD, "method": "GET", "do": "corrupt", "after": 70000, "times": 1}])
    result = run()
    assert result["fetched_bytes"] == result["bytes"] + len(WEIGHTS)
    assert downloads(hub)["model-00001-of-000002.safetensors"] == 2
    assert contents(final(hub, tmp_path)) == KEPT


@pytest.mark.parametrize(
    ("path", "digest"), [("model-00001-of-000002.safetensors", "sha256"), ("config.json", "git blob id")]
)
def test_file_that_stays_wrong_fails_and_nothing_gets_the_final_name(run, hub, tmp_path, path, digest):
    hub.order(rules=[{"path": path, "method": "GET", "do": "corrupt", "after": 5}])
    result = run()
    assert result["failed"] is True
    assert result["msg"].startswith(f"1 of 6 files came wrong twice, first {path}: {digest} ")
    assert "try another endpoint" in result["msg"]
    assert not final(hub, tmp_path).exists()
    hub.order(rules=[], clear_log=True)
    assert run()["fetched_bytes"] == len(KEPT[path])
    assert contents(final(hub, tmp_path)) == KEPT


@pytest.mark.parametrize("do", ["truncate", "reset"])
def test_broken_stream_goes_on_where_it_broke(run, hub, tmp_path, do):
    rule = {"path": SECOND_SHARD, "method": "GET", "do": do, "after": 1 << 20}
    hub.order(rules=[{**rule, "times": 2}])
    result = run()
    assert contents(final(hub, tmp_path)) == KEPT
    assert downloads(hub)["model-00002-of-000002.safetensors"] == 3
    # A reset throws away what the system had received and not yet handed over.
    assert result["refetched_bytes"] == 0
    assert result["fetched_bytes"] == result["bytes"]


def test_server_that_ignores_ranges_is_outlasted(run, hub, tmp_path):
    cut = {"path": SECOND_SHARD, "method": "GET", "do": "truncate", "after": 1 << 20, "times": 1}
    hub.order(rules=[cut, {"path": SECOND_SHARD, "do": "whole"}])
    result = run()
    assert contents(final(hub, tmp_path)) == KEPT
    assert (result["fetched_bytes"], result["refetched_bytes"]) == (result["bytes"] + (1 << 20), 1 << 20)


def test_stalled_stream_is_opened_anew(run, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_ranges, "SILENCE", 1)
    hub.order(rules=[{"path": SECOND_SHARD, "do": "stall", "after": 1 << 20, "seconds": 60, "times": 1}])
    start = time.monotonic()
    assert run()["refetched_bytes"] == 0
    assert time.monotonic() - start < 15
    assert contents(final(hub, tmp_path)) == KEPT


@pytest.mark.parametrize("code", [429, 500, 503])
def test_busy_server_is_asked_again_when_it_says(run, hub, tmp_path, code):
    answer = {"do": "status", "code": code, "headers": {"Retry-After": "1"}, "times": 1}
    hub.order(rules=[{"path": SECOND_SHARD, **answer}, {"path": "resolve.*config.json", **answer}])
    start = time.monotonic()
    run()
    assert 1 <= time.monotonic() - start < 15
    assert contents(final(hub, tmp_path)) == KEPT


def test_server_that_asks_for_too_long_a_wait_is_given_up_at_once(run, hub):
    hub.order(rules=[{"path": SECOND_SHARD, "do": "status", "code": 429, "headers": {"Retry-After": "3600"}}])
    start = time.monotonic()
    result = run()
    assert time.monotonic() - start < 15
    assert "it asked to wait for longer (3600 s)" in result["msg"]
    assert "answered 429" in result["msg"]


def test_file_of_another_size_than_the_listing_is_refused(run, hub, tmp_path):
    hub.order(rules=[{"path": SECOND_SHARD, "do": "resize", "after": 5000}])
    result = run()
    assert (
        f"model-00002-of-000002.safetensors: 5000 bytes are offered, expected {len(WEIGHTS)}" in result["msg"]
    )
    assert not final(hub, tmp_path).exists()
    assert downloads(hub)["model-00002-of-000002.safetensors"] == 3


def test_redirects_in_a_circle_are_named(run, hub, tmp_path):
    around = {
        "do": "status",
        "code": 302,
        "headers": {"Location": f"{hub.url}/{REPO}/resolve/x/config.json?a=b"},
    }
    hub.order(rules=[{"path": "resolve.*config.json", **around}])
    result = run()
    expected = (
        f"config.json: {hub.url} redirects in a circle, at {hub.url}/{REPO}/resolve/x/config.json. Check"
    )
    assert result["msg"].startswith(expected)
    assert not final(hub, tmp_path).exists()


def test_token_does_not_follow_to_another_host(run, hub, tmp_path):
    hub.order(token="hf_right", cdn=hub.url.replace("127.0.0.1", "localhost"))
    (tmp_path / "token").write_text("hf_right\n")
    assert run(token_file=str(tmp_path / "token"))["changed"] is True
    log = hub.log()
    assert {entry["token"] for entry in log if "/_cdn/" in entry["path"]} == {False}
    assert {entry["token"] for entry in log if "/_cdn/" not in entry["path"]} == {True}


def test_token_follows_a_redirect_on_the_same_host(run, hub, tmp_path):
    """As for a repository that was renamed."""
    (tmp_path / "token").write_text("hf_right\n")
    to = {"Location": f"{hub.url}/{REPO}/resolve/{hub.revisions[REPO]}/config.json?renamed"}
    hub.order(token="hf_right")
    hub.order(rules=[{"path": "resolve/.*/config.json$", "do": "status", "code": 308, "headers": to}])
    assert run(token_file=str(tmp_path / "token"))["changed"] is True
    assert [entry["token"] for entry in hub.log() if "config.json" in entry["path"]] == [True, True]


def test_gated_file_in_an_open_listing_ends_it_at_once(run, hub, tmp_path):
    answer = {"do": "status", "code": 403, "headers": {"X-Error-Code": "GatedRepo"}}
    hub.order(rules=[{"path": "/resolve/.*safetensors", **answer}])
    result = run()
    assert "safetensors could not be fetched: the hub" in result["msg"]
    assert "answered 403 GatedRepo" in result["msg"]
    assert not final(hub, tmp_path).exists()


def test_address_that_expired_is_asked_for_anew(run, hub, tmp_path):
    hub.order(cdn=hub.url.replace("127.0.0.1", "localhost"))
    hub.order(rules=[{"path": SECOND_SHARD, "do": "status", "code": 403, "times": 1}])
    run()
    assert contents(final(hub, tmp_path)) == KEPT


def test_transfer_without_progress_is_given_up_in_time(run, hub, tmp_path):
    rule = {"path": SECOND_SHARD, "method": "GET", "do": "stall", "seconds": 60}
    hub.order(rules=[{**rule, "after": 100000, "times": 1}, rule])
    start = time.monotonic()
    result = run(timeout=1)
    assert time.monotonic() - start < 15
    assert f"no byte of {REPO} came from {hub.url} for 1 s" in result["msg"]
    assert f"model-00002-of-000002.safetensors stands at 100000 of {len(WEIGHTS)} bytes" in result["msg"]
    assert not final(hub, tmp_path).exists()


def test_silent_hub_is_given_up_in_time(run, hub):
    hub.order(rules=[{"path": "/api/", "do": "delay", "seconds": 60}])
    start = time.monotonic()
    result = run(timeout=1)
    assert time.monotonic() - start < 10
    assert result["msg"].startswith(f"no usable answer from the hub {hub.url} for {REPO}: ")
    assert f"firewall on this node: curl -sS '{hub.url}/api/models/{REPO}/tree/" in result["msg"]


def test_busy_hub_is_asked_again(run, hub):
    answer = {"do": "status", "code": 429, "headers": {"Retry-After": "1"}, "times": 1}
    hub.order(rules=[{"path": "/api/models/.*/tree", **answer}])
    assert run()["changed"] is True


def test_unreachable_hub_names_the_address_and_the_check(run):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        result = run(endpoint=address)
    assert result["msg"].startswith(f"no usable answer from the hub {address} for {REPO}: ")
    assert "Connection refused. Expected JSON" in result["msg"]


def test_unknown_revision_names_what_main_is(run, hub):
    for revision in ("f" * 40, "v2"):
        result = run(revision=revision)
        assert result["msg"].startswith(f"revision {revision} is not in {REPO} on {hub.url}; its main is")
        assert hub.revisions[REPO] in result["msg"]


@pytest.mark.parametrize(
    ("arguments", "token", "sent"),
    [
        ({"repo_id": "org/tinny"}, None, "No token was sent."),
        ({}, None, "No token was sent."),
        ({}, "hf_expired", "A token was sent."),
    ],
)
def test_401_lists_what_it_can_mean(run, hub, tmp_path, arguments, token, sent):
    if "repo_id" not in arguments:
        hub.order(token="hf_right")
    if token:
        (tmp_path / "token").write_text(token)
        arguments = {**arguments, "token_file": str(tmp_path / "token")}
    result = run(**arguments)
    for part in ("answered 401", "misspelt", "private or gated", "expired", sent, "Check the spelling"):
        assert part in result["msg"]
    assert "hf_" not in json.dumps(result)


@pytest.mark.parametrize(
    ("content", "says"), [(None, "cannot be read"), ("", "holds no token"), ("two words", "holds no token")]
)
def test_unusable_token_file_is_named(run, tmp_path, content, says):
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    assert run(token_file=str(path))["msg"].startswith(f"token_file {path} {says}")


def test_too_little_space_is_refused_before_the_first_byte(run, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hf_snapshot, "free_space", lambda path: (1 << 20, None))
    for check in (True, False):
        result = run(check=check)
        assert result["msg"].startswith(
            f"{tmp_path / 'models'} has 1.00 MB free; expected 5.87 MB for 6 files"
        )
    assert downloads(hub) == {}
    assert not (tmp_path / "models").exists()


def test_missing_client_says_which_interpreter_to_use(run, monkeypatch):
    nothing = types.SimpleNamespace(find_spec=lambda name: None)
    monkeypatch.setattr(snapshot_transfer, "importlib", types.SimpleNamespace(util=nothing))
    assert "Run this task with the interpreter of the tools environment" in run(transfer="client")["msg"]


def test_patterns_that_leave_nothing_are_refused(run):
    assert "has 7 files and the patterns leave none" in run(allow_patterns=["*.gguf"])["msg"]


def test_link_in_the_final_place_is_refused(run, hub, tmp_path):
    final(hub, tmp_path).parent.mkdir(parents=True)
    final(hub, tmp_path).symlink_to(tmp_path)
    assert "is a link or a file; expected a folder" in run()["msg"]


# -- interrupted, and two at once


def staging(hub, tmp_path):
    return final(hub, tmp_path).parent / f".{hub.revisions[REPO]}.partial"


def wait_for_second_shard(hub, tmp_path, size):
    part = staging(hub, tmp_path) / ".parts/model-00002-of-000002.safetensors"
    first = staging(hub, tmp_path) / "model-00001-of-000002.safetensors"
    wait_for(lambda: first.exists() and part.exists() and part.stat().st_size == size, "the second shard")
    return part


def test_killed_run_leaves_no_snapshot_and_the_next_one_completes(run, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_part, "BLOCK", 1 << 20)
    hub.order(rules=[{"path": SECOND_SHARD, "do": "stall", "after": (2 << 20) + 5, "seconds": 60}])
    with process(hub, tmp_path, block=1 << 20) as child:
        wait_for_second_shard(hub, tmp_path, (2 << 20) + 5)
        child.kill()
    assert not final(hub, tmp_path).exists()
    hub.order(rules=[], clear_log=True)
    planned = run(check=True)
    result = run()
    assert contents(final(hub, tmp_path)) == KEPT
    assert "model-00001-of-000002.safetensors" not in downloads(hub), "a finished file was fetched again"
    # The part, and two lines of checksums.
    assert planned["needed_bytes"] == len(WEIGHTS) - (2 << 20) - 5 - 2 * 9
    assert [entry["range"] for entry in hub.log() if "_cdn" in entry["path"]] == [f"bytes={2 << 20}-"]
    assert (result["fetched_bytes"], result["refetched_bytes"]) == (len(WEIGHTS) - (2 << 20), 5)
    assert not staging(hub, tmp_path).exists()


def test_part_that_was_damaged_is_used_up_to_the_damage(run, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_part, "BLOCK", 1 << 20)
    hub.order(rules=[{"path": SECOND_SHARD, "do": "stall", "after": (2 << 20) + 5, "seconds": 60}])
    with process(hub, tmp_path, block=1 << 20) as child:
        part = wait_for_second_shard(hub, tmp_path, (2 << 20) + 5)
        child.kill()
    with part.open("r+b") as content:
        content.seek((1 << 20) + 77)
        content.write(b"damage")
    hub.order(rules=[])
    assert run()["refetched_bytes"] == (1 << 20) + 5
    assert contents(final(hub, tmp_path)) == KEPT


def test_second_run_at_once_is_refused_and_names_the_first(run, hub, tmp_path):
    hub.order(rules=[{"path": SECOND_SHARD, "method": "GET", "do": "stall", "after": 100, "seconds": 2}])
    lock = final(hub, tmp_path).parent / ".lock"
    with process(hub, tmp_path) as child:
        wait_for(lambda: lock.exists() and lock.read_text(), "the first run's lock")
        result = run()
        assert result["msg"].startswith(f"process {child.pid} on this node is already fetching {REPO}")
        assert json.loads(child.stdout.read())["changed"] is True
    assert run()["changed"] is False
    assert contents(final(hub, tmp_path)) == KEPT


def test_run_that_waited_its_turn_finds_the_work_done(run, hub, tmp_path, monkeypatch):
    """Between its plan and its lock another run finishes."""
    lock = snapshot_store.Store.lock

    @contextlib.contextmanager
    def late_lock(store):
        monkeypatch.undo()
        with process(hub, tmp_path) as child:
            assert json.loads(child.stdout.read())["changed"] is True
        hub.order(clear_log=True)
        with lock(store):
            yield

    monkeypatch.setattr(snapshot_store.Store, "lock", late_lock)
    assert run()["changed"] is False
    assert hub.log() == []


def test_lock_goes_with_its_holder(hub, tmp_path):
    store = snapshot_store.Store(str(tmp_path), REPO, hub.revisions[REPO])
    with store.lock():
        pass
    with (tmp_path / REPO / ".lock").open() as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


# -- in a process of its own, which the module starts and looks at


def follow(hub, tmp_path, **arguments):
    """One short call of the module in a process of its own, as Ansible makes it."""
    with process(hub, tmp_path, **{"wait": 0.3, **arguments}) as child:
        return json.loads(child.stdout.read())


def follow_to_the_end(hub, tmp_path, job, seen=None):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        result = follow(hub, tmp_path, job=job)
        if "job" not in result:
            return result
        assert "lost" not in result
        if seen is not None and result["progress"]:
            seen.append(result["progress"])
    raise AssertionError("waited in vain for the end")


def test_fetch_outlives_the_call_and_tells_how_far_it_is(hub, tmp_path):
    hub.order(rules=[{"path": SECOND_SHARD, "do": "stall", "after": 1 << 20, "seconds": 2, "times": 1}])
    begun = follow(hub, tmp_path)
    assert begun["changed"] is False
    seen = []
    result = follow_to_the_end(hub, tmp_path, begun["job"], seen)
    assert (result["changed"], result["fetched_bytes"]) == (True, sum(map(len, KEPT.values())))
    assert contents(final(hub, tmp_path)) == KEPT
    assert {(state["phase"], state["files"], state["bytes"]) for state in seen[-1:]} == {
        ("fetch", len(KEPT), sum(map(len, KEPT.values())))
    }
    assert seen[-1]["files_done"] == len(KEPT) - 1
    assert seen[-1]["bytes_done"] == seen[-1]["bytes"] - len(WEIGHTS) + (1 << 20)
    left = sorted(path.name for path in final(hub, tmp_path).parent.iterdir())
    assert left == [".lock", final(hub, tmp_path).name]
    assert follow(hub, tmp_path)["changed"] is False


def test_second_run_joins_the_first(hub, tmp_path):
    hub.order(rules=[{"path": SECOND_SHARD, "do": "stall", "after": 1 << 20, "seconds": 2, "times": 1}])
    job = follow(hub, tmp_path)["job"]
    assert follow(hub, tmp_path)["job"] == job
    assert follow_to_the_end(hub, tmp_path, job)["changed"] is True
    assert follow(hub, tmp_path, job=job)["lost"] is True


def test_failure_of_the_fetch_is_the_calls_own(hub, tmp_path):
    hub.order(rules=[{"path": SECOND_SHARD, "do": "resize", "after": 5000}])
    begun = follow(hub, tmp_path)
    result = begun if "job" not in begun else follow_to_the_end(hub, tmp_path, begun["job"])
    assert result["failed"] is True
    assert "5000 bytes are offered" in result["msg"]


def test_fetch_that_was_killed_is_lost_and_can_be_begun_again(hub, tmp_path):
    hub.order(rules=[{"path": SECOND_SHARD, "do": "stall", "after": 1 << 20, "seconds": 60}])
    job = follow(hub, tmp_path)["job"]
    part = wait_for_second_shard(hub, tmp_path, 1 << 20)
    os.kill(int((final(hub, tmp_path).parent / ".lock").read_text()), signal.SIGKILL)
    assert follow(hub, tmp_path, job=job)["lost"] is True
    assert part.exists()
    hub.order(rules=[])
    begun = follow(hub, tmp_path)
    assert (begun if "job" not in begun else follow_to_the_end(hub, tmp_path, begun["job"]))[
        "changed"
    ] is True
    assert contents(final(hub, tmp_path)) == KEPT


def test_reading_everything_again_is_part_of_the_fetch(run, hub, tmp_path):
    run()
    begun = follow(hub, tmp_path, verify="full")
    result = begun if "job" not in begun else follow_to_the_end(hub, tmp_path, begun["job"])
    assert (result["changed"], result["files"]) == (False, len(KEPT))


# -- a copy, and a folder in the hub's place


def copied(hub, tmp_path):
    """Move a finished snapshot aside and copy it back: same contents and times, other inodes."""
    folder = final(hub, tmp_path)
    shutil.copytree(folder, tmp_path / "copy")
    snapshot_store.remove_tree(str(folder))
    (tmp_path / "copy").rename(folder)
    return folder


def test_copy_is_read_once_without_the_hub_and_then_trusted(run, hub, tmp_path):
    run()
    folder = copied(hub, tmp_path)
    hub.order(clear_log=True)
    planned = run(check=True)
    assert (planned["changed"], planned["to_fetch"]["files"]) == (True, 0)
    result = run()
    assert (result["changed"], result["fetched_bytes"]) == (True, 0)
    assert run()["changed"] is False
    assert hub.log() == []
    assert folder.stat().st_mode & 0o777 == 0o555
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o444}


def test_copy_with_wrong_bytes_is_noticed_without_being_asked(run, hub, tmp_path):
    run()
    shard = copied(hub, tmp_path) / "model-00001-of-000002.safetensors"
    before = shard.stat()
    shard.chmod(0o644)
    shard.write_bytes(b"\0" * before.st_size)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    hub.order(clear_log=True)
    assert run()["changed"] is True
    assert downloads(hub) == {shard.name: 1}
    assert contents(final(hub, tmp_path)) == KEPT


def test_folder_in_the_hubs_place(run, hub, tmp_path):
    run(dest=str(tmp_path / "carried"))
    hub.order(clear_log=True)
    carried = {"endpoint": str(tmp_path / "carried")}
    assert run(check=True, **carried)["to_fetch"]["files"] == len(KEPT)
    result = run(**carried)
    assert (result["changed"], result["fetched_bytes"]) == (True, sum(map(len, KEPT.values())))
    assert contents(final(hub, tmp_path)) == KEPT
    assert run(**carried)["changed"] is False
    assert hub.log() == []


def test_wrong_file_in_the_folder_never_gets_the_final_name(run, hub, tmp_path):
    carried = run(dest=str(tmp_path / "carried"))["path"]
    shard = pathlib.Path(carried, "model-00001-of-000002.safetensors")
    shard.chmod(0o644)
    shard.write_bytes(b"\0" * len(WEIGHTS))
    result = run(endpoint=str(tmp_path / "carried"))
    assert result["msg"].startswith(f"1 of 6 files came wrong twice, first {shard.name}: sha256 ")
    assert not final(hub, tmp_path).exists()


def test_folder_without_the_snapshot_says_so(run, tmp_path):
    assert "has no manifest.json that can be read" in run(endpoint=str(tmp_path))["msg"]
    assert "which knows no branches" in run(endpoint=str(tmp_path), revision="main")["msg"]


# -- the hub's own client, the other way to bring the bytes


def test_client_brings_the_same(run, hub, tmp_path):
    assert run(transfer="client")["fetched_bytes"] == sum(map(len, KEPT.values()))
    assert contents(final(hub, tmp_path)) == KEPT


def test_one_way_goes_on_where_the_other_was_stopped(run, hub, tmp_path):
    hub.order(rules=[{"path": SECOND_SHARD, "do": "status", "code": 403}])
    assert "failed" in run(timeout=1)
    assert staging(hub, tmp_path).exists()
    hub.order(rules=[])
    run(transfer="client")
    assert contents(final(hub, tmp_path)) == KEPT
    assert sorted(path.name for path in final(hub, tmp_path).iterdir()) == sorted(
        [*(name.partition("/")[0] for name in KEPT), "manifest.json"]
    )


def test_wrong_byte_by_the_client_is_caught_as_well(run, hub, tmp_path):
    hub.order(rules=[{"path": FIRST_SHARD, "method": "GET", "do": "corrupt", "after": 70000, "times": 1}])
    assert run(transfer="client")["refetched_bytes"] == len(WEIGHTS)
    assert contents(final(hub, tmp_path)) == KEPT


def test_killed_run_takes_the_client_with_it(hub, tmp_path):
    hub.order(rules=[{"path": SECOND_SHARD, "method": "GET", "do": "stall", "after": 100, "seconds": 60}])
    with process(hub, tmp_path, transfer="client") as child:
        wait_for(lambda: list(staging(hub, tmp_path).rglob("*.incomplete")), "the start of the transfer")
        children = pathlib.Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        assert len(children) == 1
        child.kill()
        wait_for(lambda: not pathlib.Path("/proc", children[0]).exists(), "the end of the orphan")


# -- over TLS


@pytest.fixture
def secure(hub, tmp_path):
    """The hub's address by TLS, with a certificate of its own in certificate.pem."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    target = hub.url.rpartition("/")[2].split(":")

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            # One request a connection, as the module asks.
            inside = context.wrap_socket(self.request, server_side=True)
            with inside, socket.create_connection(target) as outside:
                outside.sendall(inside.recv(1 << 16))
                for data in iter(lambda: outside.recv(1 << 16), b""):
                    inside.sendall(data)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, *_):
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"https://localhost:{server.server_address[1]}"
        hub.order(cdn=url)
        yield url
        server.shutdown()


def test_hub_by_tls_is_believed_if_its_certificate_is(run, hub, secure, tmp_path, monkeypatch):
    refused = run(endpoint=secure)
    assert refused["failed"] and "CERTIFICATE_VERIFY_FAILED" in refused["msg"]
    assert not (tmp_path / "models" / REPO / hub.revisions[REPO]).exists()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
    fetched = run(endpoint=secure)
    assert fetched.get("changed") is True, fetched
    assert contents(final(hub, tmp_path)) == KEPT


# -- another node, asked for the bytes

SHARE = ROOT / "roles/model_store/files/share.py"


@contextlib.contextmanager
def sharing(root, tmp_path, address="127.0.0.1"):
    """Share the models below a folder as the role does, by a port that is free; gives the address."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(30)
        child = subprocess.Popen(
            [sys.executable, SHARE, root, address, str(port)],
            env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")},
        )
        try:
            assert systemd.recv(100) == b"READY=1"
            yield f"http://{address}:{port}"
        finally:
            child.kill()
            child.wait()


@pytest.fixture
def giver(run, hub, tmp_path):
    """A node that has the model; the hub has forgotten that it came from there."""
    run(dest=str(tmp_path / "giver"))
    hub.order(clear_log=True)
    return tmp_path / "giver"


def test_bytes_come_from_the_other_node_and_the_list_from_the_hub(run, hub, giver, tmp_path, monkeypatch):
    # A proxy is on the way to the hub, not to a neighbour.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", hub.url.rpartition("/")[2])
    with sharing(giver, tmp_path) as peer:
        result = run(peer=peer)
    size = sum(map(len, KEPT.values()))
    assert (result["fetched_bytes"], result["peer_bytes"]) == (size, size)
    assert contents(final(hub, tmp_path)) == KEPT
    assert all("/tree/" in entry["path"] for entry in hub.log())


def test_wrong_file_of_the_other_node_is_fetched_from_the_hub(run, hub, giver, tmp_path):
    shard = giver / REPO / hub.revisions[REPO] / "model-00001-of-000002.safetensors"
    shard.chmod(0o644)
    shard.write_bytes(b"x" + WEIGHTS[1:])
    with sharing(giver, tmp_path) as peer:
        result = run(peer=peer)
    assert contents(final(hub, tmp_path)) == KEPT
    assert downloads(hub) == {shard.name: 1}
    assert result["refetched_bytes"] == len(WEIGHTS)


def test_other_node_that_has_nothing_or_is_away_is_done_without(run, hub, tmp_path):
    (tmp_path / "empty").mkdir()
    with sharing(tmp_path / "empty", tmp_path) as peer:
        result = run(peer=peer)
    assert (result["peer_bytes"], contents(final(hub, tmp_path))) == (0, KEPT)
    again = run(peer=peer, dest=str(tmp_path / "again"))
    assert (again["changed"], again["peer_bytes"], again["bytes"]) == (True, 0, result["bytes"])


def test_other_node_that_breaks_off_is_gone_on_from(run, hub, tmp_path):
    """The other node is a hub here, which can break off, and is told of the token if there is one."""
    (tmp_path / "token").write_text("secret\n")
    with HubServer((REPO, write(tmp_path / "other", FILES))) as other:
        other.order(rules=[{"path": FIRST_SHARD, "do": "truncate", "after": 1 << 20}])
        result = run(peer=other.url, token_file=str(tmp_path / "token"))
        sent = {entry["path"].rpartition("/")[2]: entry["token"] for entry in other.log()}
    assert contents(final(hub, tmp_path)) == KEPT
    assert not any(sent.values())
    assert result["peer_bytes"] >= 1 << 20


def test_only_what_a_manifest_names_is_shared(hub, giver, tmp_path):
    (giver / "secret").write_text("x")
    (giver / REPO / ".refs").write_text("{}")
    revision = hub.revisions[REPO]
    with sharing(giver, tmp_path) as peer:
        for path in (
            f"/{REPO}/resolve/{revision}/manifest.json",
            f"/{REPO}/resolve/{revision}/../.refs",
            f"/{REPO}/resolve/{'0' * 40}/config.json",
            f"/org/../resolve/{revision}/config.json",
            "/secret",
            "/",
        ):
            with socket.create_connection(peer[7:].split(":"), timeout=30) as raw:
                raw.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                assert raw.recv(100).split()[1] == b"404", path


def test_shared_file_is_sent_from_a_byte_on(hub, giver, tmp_path):
    url = f"/{REPO}/resolve/{hub.revisions[REPO]}/model-00001-of-000002.safetensors"
    with sharing(giver, tmp_path) as peer:
        whole = snapshot_http.get(peer + url, None, 30)
        assert (whole.status, whole.read()) == (200, WEIGHTS)
        rest = snapshot_http.get(peer + url, None, 30, {"Range": "bytes=1000-"})
        assert (rest.status, rest.read()) == (206, WEIGHTS[1000:])
        assert rest.headers["Content-Range"] == f"bytes 1000-{len(WEIGHTS) - 1}/{len(WEIGHTS)}"
