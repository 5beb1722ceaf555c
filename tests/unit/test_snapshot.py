# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What a snapshot is: choice of files, digests, manifest, space, names."""

import concurrent.futures
import hashlib
import os
import shutil
import subprocess

import pytest
from ansible.module_utils.sglang_kit import snapshot, snapshot_store
from ansible.module_utils.sglang_kit.snapshot import RemoteFile, SnapshotError


def remote(path, content=b"", large=False):
    blob_id = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return RemoteFile(path, len(content), blob_id, hashlib.sha256(content).hexdigest() if large else None)


KIMI = [
    ".gitattributes",
    "chat_template.jinja",
    "config.json",
    "figures/banner.png",
    "model-00001-of-000119.safetensors",
    "model.safetensors.index.json",
    "tiktoken.model",
    "tokenization_kimi.py",
]


@pytest.mark.parametrize(
    ("allow", "ignore", "left_out"),
    [
        (None, snapshot.PICKLE_PATTERNS, []),
        (None, ["figures/*"], ["figures/banner.png"]),
        (["*.json"], [], [name for name in KIMI if not name.endswith(".json")]),
        (["*.json"], ["model*"], [name for name in KIMI if name != "config.json"]),
        ([], [], KIMI),
    ],
)
def test_patterns_choose(allow, ignore, left_out):
    chosen = snapshot.select([remote(name) for name in KIMI], allow, ignore)
    assert [name for name in KIMI if name not in {file.path for file in chosen}] == left_out


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "training_state.pt", "a/optimizer.pkl", "x.ckpt", "x.pth", "x.npz"]
)
def test_pickles_are_left_out_by_default(name):
    assert snapshot.select([remote(name)], None, snapshot.PICKLE_PATTERNS) == []


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a//b", "./x"])
def test_path_outside_of_the_snapshot_is_refused(path):
    with pytest.raises(SnapshotError, match="expected a relative path"):
        snapshot.check_paths([remote("config.json"), remote(path)])


def test_file_in_the_manifests_place_is_refused_with_the_way_out():
    with pytest.raises(SnapshotError, match=r"Add manifest\.json to ignore_patterns"):
        snapshot.check_paths([remote("manifest.json")])
    snapshot.check_paths([remote("sub/manifest.json")])


@pytest.mark.parametrize("repo_id", ["name", "a/b/c", "../b", "a/..", "a/", "a b/c", "a/b\n"])
def test_repo_id_that_is_no_folder_is_refused(repo_id):
    with pytest.raises(SnapshotError, match="expected organisation/name"):
        snapshot.check_repo_id(repo_id)


def test_repo_ids_in_use_are_accepted():
    for repo_id in ("nvidia/Kimi-K2.5-NVFP4", "AQ-MedAI/Kimi-K25-eagle3", "0xSero/a_b"):
        snapshot.check_repo_id(repo_id)


@pytest.mark.parametrize(
    ("revision", "commit"), [("0" * 40, True), ("A" * 40, False), ("0" * 39, False), ("main", False)]
)
def test_only_a_full_hash_is_a_commit(revision, commit):
    assert snapshot.is_commit(revision) is commit


def test_digests_are_those_of_the_usual_tools(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"some content\n" * 1000)

    def first_word(*command):
        run = subprocess.run([*command, str(path)], capture_output=True, text=True, check=True)
        return run.stdout.split()[0]

    assert snapshot.read(str(path)) == (
        13000,
        first_word("git", "hash-object", "--no-filters"),
        first_word("sha256sum"),
    )


def test_link_is_no_file(tmp_path):
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real")
    assert snapshot.read(str(tmp_path / "link")) is None
    assert snapshot.read(str(tmp_path / "none")) is None


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize(
    ("content", "says"), [(b"right", None), (b"wrong", "expected"), (b"righ", "4 bytes, expected 5")]
)
def test_content_is_compared_with_what_the_hub_states(tmp_path, content, says, large):
    (tmp_path / "x").write_bytes(content)
    expected, found = remote("x", b"right", large), snapshot.read(str(tmp_path / "x"))
    assert snapshot.is_right(expected, found) is (says is None)
    if says:
        assert says in snapshot.mismatch(expected, found)


def manifest_of(folder, names):
    found = {name: snapshot.read(str(folder / name)) for name in names}
    return snapshot.make_manifest("org/name", "0" * 40, None, ["*.bin"], str(folder), found)


def test_manifest_finds_what_changed(tmp_path):
    for name in ("same", "gone", "short", "touched", "linked", "copied"):
        (tmp_path / name).write_bytes(b"abc")
    manifest = manifest_of(tmp_path, [path.name for path in tmp_path.iterdir()])
    assert snapshot.changed_files(manifest, str(tmp_path)) == ({}, [])
    (tmp_path / "gone").unlink()
    (tmp_path / "short").write_bytes(b"ab")
    os.utime(tmp_path / "touched", (1, 1))
    (tmp_path / "linked").unlink()
    (tmp_path / "linked").symlink_to("same")
    shutil.copy2(tmp_path / "copied", tmp_path / "copy")
    (tmp_path / "copy").rename(tmp_path / "copied")
    wrong, doubtful = snapshot.changed_files(manifest, str(tmp_path))
    assert wrong == {
        "gone": "not there",
        "short": "2 bytes, expected 3",
        "linked": "not a regular file",
    }
    assert sorted(doubtful) == ["copied", "touched"]


@pytest.mark.parametrize(
    ("allow", "ignore", "format_", "covered"),
    [
        (None, ["*.bin"], 2, True),
        (["*"], ["*.bin"], 2, False),
        (None, [], 2, False),
        (None, ["*.bin"], 1, False),
    ],
)
def test_manifest_covers_only_the_choice_it_was_made_for(tmp_path, allow, ignore, format_, covered):
    manifest = dict(manifest_of(tmp_path, []), format=format_)
    assert snapshot.covers(manifest, allow, ignore) is covered


def test_space_keeps_headroom():
    to_fetch = [RemoteFile("x", 10 << 30, "", None)]
    snapshot.check_space(to_fetch, 0, 11 << 30, None, "/srv/models")
    with pytest.raises(SnapshotError, match=r"^/srv/models has 11\.00 GB free; expected 10\.00 GB") as error:
        snapshot.check_space(to_fetch, 0, (11 << 30) - 1, None, "/srv/models")
    assert "Nothing was fetched" in str(error.value)
    snapshot.check_space([], 0, 0, 0, "/srv/models")


def test_parts_that_are_there_need_no_room_again():
    to_fetch = [RemoteFile("x", 10 << 30, "", None)]
    snapshot.check_space(to_fetch, 4 << 30, 7 << 30, None, "/srv/models")
    with pytest.raises(SnapshotError, match=r"has 7\.00 GB free; expected 7\.00 GB"):
        snapshot.check_space(to_fetch, 3 << 30, 7 << 30, None, "/srv/models")


def test_inodes_are_counted_as_well():
    to_fetch = [remote("x")]
    snapshot.check_space(to_fetch, 0, 2 << 30, 102, "/srv/models")
    with pytest.raises(SnapshotError, match=r"101 free inodes; expected 102 for 1 files.*df -i"):
        snapshot.check_space(to_fetch, 0, 2 << 30, 101, "/srv/models")


def test_folders_are_made_by_many_threads_at_once(tmp_path):
    """Whichever comes first, none fails."""
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for number in range(50):
            path = str(tmp_path / str(number) / "a" / "b")
            assert list(pool.map(snapshot_store.make_folders, [path] * 16)) == [None] * 16
    assert (tmp_path / "49/a/b").is_dir()
