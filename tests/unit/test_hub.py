# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The lab's hub: real requests to the real server; the real client is in test_hf_snapshot."""

import hashlib
import http.client
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from hub_server import SCRIPT, HubServer

REPO = "org/tiny"
BIG = bytes(range(256)) * 1200


def write(folder, files):
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    files = {"config.json": b"{}\n", "sub/deep/a.txt": b"a", "sub/b.txt": b"b", "w.safetensors": BIG}
    return write(tmp_path_factory.mktemp("repo"), files)


@pytest.fixture
def hub(folder):
    with HubServer((REPO, folder)) as server:
        yield server


def ask(hub, path, method="GET", headers=None, body=None):
    """Return (status, headers, body) of one request; redirects are not followed."""
    connection = http.client.HTTPConnection(hub.url[len("http://") :], timeout=10)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def revision_of(*folders):
    arguments = [f"--repo={REPO}={folder}" for folder in folders]
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--print-revisions", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout)[REPO]


def test_revision_follows_from_paths_and_contents(hub, folder, tmp_path):
    copy = write(tmp_path / "copy", {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.*")})
    changed = write(tmp_path / "changed", {"config.json": b"[]\n"})
    assert revision_of(folder) == revision_of(copy) == hub.revisions[REPO]
    assert revision_of(changed) != revision_of(folder)
    assert revision_of(folder, changed) == revision_of(changed)


def test_older_commit_stays_while_main_moves_on(folder, tmp_path):
    newer = write(tmp_path, {"config.json": b"[]\n"})
    with HubServer((REPO, folder), (REPO, newer)) as hub:
        for revision, content in (
            ("main", b"[]\n"),
            (hub.revisions[REPO], b"[]\n"),
            (revision_of(folder), b"{}\n"),
        ):
            assert ask(hub, f"/{REPO}/resolve/{revision}/config.json")[2] == content


def test_digests_are_those_of_git_and_sha256(hub, folder):
    listing = json.loads(ask(hub, f"/api/models/{REPO}/tree/main?recursive=True")[2])
    items = {item["path"]: item for item in listing if item["type"] == "file"}
    git = subprocess.run(
        ["git", "hash-object", "--no-filters", str(folder / "config.json")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert items["config.json"]["oid"] == git.stdout.strip()
    assert items["w.safetensors"]["lfs"]["oid"] == hashlib.sha256(BIG).hexdigest()
    assert "lfs" not in items["config.json"]


def test_tree_comes_in_pages_that_link_to_this_address(hub):
    hub.order(page=2)
    path, seen = f"/api/models/{REPO}/tree/main?recursive=true&expand=False", []
    while path:
        status, headers, body = ask(hub, path)
        assert status == 200
        assert len(json.loads(body)) <= 2
        seen += [item["path"] for item in json.loads(body)]
        link = headers.get("Link", "")
        path = link[link.index(hub.url) + len(hub.url) : link.index(">")] if link else None
    assert seen == ["config.json", "sub", "sub/b.txt", "sub/deep", "sub/deep/a.txt", "w.safetensors"]


def test_listing_of_a_folder_is_flat_unless_recursive(hub):
    listing = json.loads(ask(hub, f"/api/models/{REPO}/tree/main/sub")[2])
    assert [item["path"] for item in listing] == ["sub/b.txt", "sub/deep"]


def test_large_file_redirects_to_the_address_the_client_used(hub):
    port = hub.url.rpartition(":")[2]
    status, headers, body = ask(
        hub, f"/{REPO}/resolve/main/w.safetensors", "HEAD", {"Host": "localhost:" + port}
    )
    assert (status, body) == (302, b"")
    assert headers["X-Linked-Size"] == str(len(BIG))
    assert headers["X-Linked-Etag"] == f'"{hashlib.sha256(BIG).hexdigest()}"'
    assert headers["X-Repo-Commit"] == hub.revisions[REPO]
    start = f"http://localhost:{port}"
    assert headers["Location"].startswith(start + "/")
    assert ask(hub, headers["Location"][len(start) :])[2] == BIG


@pytest.mark.parametrize(
    ("wanted", "status", "content"),
    [
        ("bytes=5-", 206, BIG[5:]),
        ("bytes=5-9", 206, BIG[5:10]),
        ("bytes=-3", 206, BIG[-3:]),
        (f"bytes={len(BIG)}-", 416, b""),
        ("pages=1", 200, BIG),
    ],
)
def test_ranges(hub, wanted, status, content):
    location = ask(hub, f"/{REPO}/resolve/main/w.safetensors")[1]["Location"]
    answer = ask(hub, location[len(hub.url) :], headers={"Range": wanted})
    assert (answer[0], answer[2]) == (status, content)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/api/models/org/other", 401, "RepoNotFound"),
        (f"/api/models/{REPO}/revision/v2", 404, "RevisionNotFound"),
        (f"/{REPO}/resolve/{'0' * 40}/config.json", 404, "RevisionNotFound"),
        (f"/{REPO}/resolve/main/none.json", 404, "EntryNotFound"),
        ("/elsewhere", 404, None),
    ],
)
def test_errors_carry_the_hubs_codes(hub, path, status, code):
    answer = ask(hub, path)
    assert (answer[0], answer[1].get("X-Error-Code")) == (status, code)


def test_token_is_asked_for_once_it_is_set(hub):
    path = f"/api/models/{REPO}"
    hub.order(token="hf_right")
    assert ask(hub, path)[1]["X-Error-Code"] == "GatedRepo"
    assert ask(hub, path, headers={"Authorization": "Bearer hf_wrong"})[0] == 401
    assert ask(hub, path, headers={"Authorization": "Bearer hf_right"})[0] == 200


def fetch_big(hub):
    with urllib.request.urlopen(f"{hub.url}/{REPO}/resolve/main/w.safetensors", timeout=5) as answer:
        return answer.read()


def test_fault_status_skips_and_ends_as_ordered(hub):
    headers = {"Retry-After": "1"}
    hub.order(
        rules=[{"path": "config", "do": "status", "code": 429, "headers": headers, "skip": 1, "times": 1}]
    )
    answers = [ask(hub, f"/{REPO}/resolve/main/config.json") for _ in range(3)]
    assert [answer[0] for answer in answers] == [200, 429, 200]
    assert answers[1][1]["Retry-After"] == "1"


def test_fault_truncate_ends_the_body_early(hub):
    hub.order(rules=[{"path": "_cdn", "do": "truncate", "after": 1000}])
    with pytest.raises(http.client.IncompleteRead) as error:
        fetch_big(hub)
    assert error.value.partial == BIG[:1000]


def test_fault_reset_drops_the_connection(hub):
    hub.order(rules=[{"path": "_cdn", "do": "reset", "after": 1000}])
    with pytest.raises(ConnectionResetError):
        fetch_big(hub)


def test_fault_corrupt_changes_one_byte(hub):
    hub.order(rules=[{"path": "_cdn", "do": "corrupt", "after": 1000}])
    content = fetch_big(hub)
    assert len(content) == len(BIG)
    assert [index for index in range(len(BIG)) if content[index] != BIG[index]] == [1000]


@pytest.mark.parametrize("do", ["stall", "delay"])
def test_fault_that_waits_sends_everything_in_the_end(hub, do):
    hub.order(rules=[{"path": "_cdn", "do": do, "after": 1000, "seconds": 0.3}])
    start = time.monotonic()
    assert fetch_big(hub) == BIG
    assert time.monotonic() - start >= 0.3


def test_other_size_is_kept_up_in_every_header(hub):
    hub.order(rules=[{"path": "_cdn", "do": "resize", "after": 1000}])
    assert fetch_big(hub) == BIG[:1000]


def test_range_is_ignored_where_ordered(hub):
    hub.order(rules=[{"path": "config.json", "do": "whole"}])
    status, _, body = ask(hub, f"/{REPO}/resolve/main/config.json", headers={"Range": "bytes=1-"})
    assert (status, body) == (200, b"{}\n")


def test_large_files_come_from_another_address_where_ordered(hub):
    hub.order(cdn="http://elsewhere")
    _, headers, _ = ask(hub, f"/{REPO}/resolve/main/w.safetensors", "HEAD")
    assert headers["Location"].startswith("http://elsewhere/_cdn/")


def test_unknown_fault_is_refused_with_the_known_ones(hub):
    with pytest.raises(urllib.error.HTTPError) as error:
        hub.order(rules=[{"path": "x", "do": "explode"}])
    assert error.value.code == 400
    assert "'explode'; expected one of status, delay, truncate" in error.value.read().decode()


def test_log_has_what_was_asked_and_sent(hub):
    ask(hub, f"/{REPO}/resolve/main/config.json", headers={"Range": "bytes=1-"})
    deadline = time.monotonic() + 10
    while hub.log()[0]["sent"] != 2:
        assert time.monotonic() < deadline, "the number of bytes was not noted"
    assert hub.log() == [
        {
            "method": "GET",
            "path": f"/{REPO}/resolve/main/config.json",
            "status": 206,
            "sent": 2,
            "range": "bytes=1-",
            "token": False,
        }
    ]


def test_folder_that_is_not_there_is_refused(tmp_path):
    run = subprocess.run(
        [sys.executable, str(SCRIPT), f"--repo={REPO}={tmp_path / 'none'}"], capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "expected org/name=/folder with a folder that exists" in run.stderr
