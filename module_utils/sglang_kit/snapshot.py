# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What a snapshot of a model is: its files, their digests, its manifest. Reads files, never writes."""

from __future__ import annotations

import collections
import fnmatch
import hashlib
import os
import re
import stat

from ansible.module_utils.common.text.formatters import bytes_to_human

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 2

# Loading any of these runs code that the file contains.
PICKLE_PATTERNS = [
    "*.bin",
    "*.ckpt",
    "*.dill",
    "*.joblib",
    "*.npy",
    "*.npz",
    "*.pickle",
    "*.pkl",
    "*.pt",
    "*.pth",
]

# Free space that must be left when everything is fetched, in bytes.
HEADROOM = 1 << 30

BLOCK = 1 << 22

RemoteFile = collections.namedtuple("RemoteFile", "path size blob_id sha256")
RemoteFile.__doc__ = """A file as the hub states it: size in bytes; the digest of its content is sha256
for a large file and blob_id, git's name for it, for a small one (whose sha256 is None)."""

LocalFile = collections.namedtuple("LocalFile", "size blob_id sha256")
LocalFile.__doc__ = """A file as it lies on the disk: size in bytes and the digests of its content, in hex;
blob_id is None if it was not asked for."""


class SnapshotError(Exception):
    """Says what was found, what was expected and what to do."""


def is_commit(revision):
    """Say whether the revision is a full commit hash, the only kind that never moves."""
    return re.fullmatch("[0-9a-f]{40}", revision) is not None


def check_repo_id(repo_id):
    """Raise SnapshotError unless the id is one that may become a folder."""
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", repo_id, re.ASCII):
        raise SnapshotError(
            f"repo_id is {repo_id!r}; expected organisation/name of letters, digits, dots, dashes and "
            "underscores."
        )


def select(files, allow, ignore):
    """Return the files whose path matches a pattern of `allow` (None: all) and none of `ignore`.

    Patterns are matched on the whole path, so that C(*) also covers folders, as the hub's client does.
    """

    def matches(path, patterns):
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)

    return [
        file
        for file in files
        if (allow is None or matches(file.path, allow)) and not matches(file.path, ignore)
    ]


def check_paths(files):
    """Raise SnapshotError for a path that would lie outside of the snapshot or in the manifest's place."""
    for file in files:
        if file.path.startswith("/") or not set(file.path.split("/")).isdisjoint(["", ".", ".."]):
            raise SnapshotError(
                f"the hub lists a file named {file.path!r}; expected a relative path. "
                "Do not use this repository."
            )
        if file.path == MANIFEST:
            raise SnapshotError(
                f"the repository has a file {MANIFEST} of its own, where the snapshot's manifest would be. "
                f"Add {MANIFEST} to ignore_patterns if the model works without it."
            )


def read(path, large=False):
    """Return the LocalFile of a regular file; None if there is none, or a link in its place.

    large: leave out the blob id, which would take about as long as the sha256
    """
    try:
        found = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    blob_id, sha256 = hashlib.sha1(b"blob %d\0" % found.st_size), hashlib.sha256()
    with open(path, "rb", buffering=0) as content:
        block = memoryview(bytearray(BLOCK))
        for size in iter(lambda: content.readinto(block), 0):
            sha256.update(block[:size])
            if not large:
                blob_id.update(block[:size])
    return LocalFile(found.st_size, None if large else blob_id.hexdigest(), sha256.hexdigest())


def is_right(expected, found):
    """Say whether a LocalFile has the size and digest of a RemoteFile."""
    if found is None or found.size != expected.size:
        return False
    return found.sha256 == expected.sha256 if expected.sha256 else found.blob_id == expected.blob_id


def mismatch(expected, found):
    """Say in words how a LocalFile differs from a RemoteFile."""
    if found is None:
        return f"{expected.path}: not there"
    if found.size != expected.size:
        return f"{expected.path}: {found.size} bytes, expected {expected.size}"
    if expected.sha256:
        return f"{expected.path}: sha256 {found.sha256}, expected {expected.sha256}"
    return f"{expected.path}: git blob id {found.blob_id}, expected {expected.blob_id}"


def make_manifest(repo_id, revision, allow, ignore, folder, found):
    """Return the manifest of the folder's files, given {path: LocalFile} of those that were verified."""
    entries = {}
    for path in sorted(found):
        status = os.lstat(os.path.join(folder, path))
        entries[path] = {
            "size": found[path].size,
            "mtime_ns": status.st_mtime_ns,
            "inode": status.st_ino,
            "sha256": found[path].sha256,
            "blob_id": found[path].blob_id,
        }
    return {
        "format": MANIFEST_FORMAT,
        "repo_id": repo_id,
        "revision": revision,
        "allow_patterns": allow,
        "ignore_patterns": ignore,
        "files": entries,
    }


def covers(manifest, allow, ignore):
    """Say whether the manifest was made for the same choice of files."""
    return (
        manifest.get("format") == MANIFEST_FORMAT
        and manifest["allow_patterns"] == allow
        and manifest["ignore_patterns"] == ignore
    )


def changed_files(manifest, folder):
    """Compare a folder with its manifest by size, time and inode; reads no contents.

    Returns ({path: what is wrong with it}, [path of those that only their content can prove: not the
    ones that were verified here, such as a copy]).
    """
    wrong, doubtful = {}, []
    for path, entry in manifest["files"].items():
        try:
            found = os.lstat(os.path.join(folder, path))
        except OSError:
            wrong[path] = "not there"
            continue
        if not stat.S_ISREG(found.st_mode):
            wrong[path] = "not a regular file"
        elif found.st_size != entry["size"]:
            wrong[path] = f"{found.st_size} bytes, expected {entry['size']}"
        elif (found.st_mtime_ns, found.st_ino) != (entry["mtime_ns"], entry["inode"]):
            doubtful.append(path)
    return wrong, doubtful


def total(files):
    return sum(file.size for file in files)


def check_space(to_fetch, there, free, inodes, folder):
    """Raise SnapshotError if the disk cannot take the files and keep the headroom.

    there: bytes of them that lie on the disk already, as parts
    free: bytes; inodes: number, or None if the file system sets no limit
    """
    needed = max(0, total(to_fetch) - there)
    if to_fetch and needed + HEADROOM > free:
        raise SnapshotError(
            f"{folder} has {bytes_to_human(free)} free; expected {bytes_to_human(needed)} for "
            f"{len(to_fetch)} files and {bytes_to_human(HEADROOM)} of headroom. Nothing was fetched. Free "
            f"{bytes_to_human(needed + HEADROOM - free)} there, or choose a root on a larger disk."
        )
    # Each comes with a list of checksums while it is fetched; folders, the manifest and the like.
    expected = 2 * len(to_fetch) + 100
    if to_fetch and inodes is not None and expected > inodes:
        raise SnapshotError(
            f"{folder} is on a disk with {inodes} free inodes; expected {expected} for {len(to_fetch)} "
            "files. Nothing was fetched. Remove small files there (df -i), or choose another root."
        )


def describe(files):
    """Return one line per file, for a diff."""
    return "".join(f"{file.path} {file.size} {file.sha256 or file.blob_id}\n" for file in files)
