# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Model repositories made from folders, with the digests and commit hashes that a hub states."""

import fnmatch
import hashlib
import json
import os
import pathlib

# What the public hub keeps in large-file storage, so that its digest is a sha256.
LFS_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.model")
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"


def git_blob_id(content):
    """Return the name git gives to a file of this content (sha1, hex)."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Entry:
    """One file of a commit. The content is read once; it must not change while the hub runs."""

    def __init__(self, disk):
        self.disk = disk
        self.size = disk.stat().st_size
        self.sha256 = self.pointer_size = None
        if any(fnmatch.fnmatch(disk.name, pattern) for pattern in LFS_PATTERNS):
            with disk.open("rb") as content:
                self.sha256 = hashlib.file_digest(content, "sha256").hexdigest()
            pointer = LFS_POINTER.format(self.sha256, self.size).encode()
            self.pointer_size = len(pointer)
            # For a large file git holds the pointer; its blob id says nothing of the content.
            self.blob_id = git_blob_id(pointer)
        else:
            self.blob_id = git_blob_id(disk.read_bytes())
        self.etag = self.sha256 or self.blob_id


def read_folder(folder):
    """Return {path in the repository: Entry}, sorted by path."""
    entries = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            disk = pathlib.Path(parent, name)
            entries[disk.relative_to(folder).as_posix()] = Entry(disk)
    return dict(sorted(entries.items()))


class Repo:
    """Commits by hash, and `main`, the one that was added last."""

    def __init__(self):
        self.commits = {}
        self.main = None

    def add(self, folder):
        """Add the folder as the newest commit; its hash follows from paths and contents alone."""
        entries = read_folder(folder)
        digests = json.dumps({path: entry.etag for path, entry in entries.items()})
        self.main = hashlib.sha1(digests.encode()).hexdigest()
        self.commits[self.main] = entries

    def resolve(self, revision):
        """Return the full hash of a branch or full hash; None for anything else, as the hub does."""
        if revision == "main":
            return self.main
        return revision if revision in self.commits else None


def load(specs):
    """Return {repo id: Repo} from "org/name=/folder" texts; a repeated id is a newer commit."""
    repos = {}
    for spec in specs:
        repo_id, separator, folder = spec.partition("=")
        if not separator or repo_id.count("/") != 1 or not pathlib.Path(folder).is_dir():
            raise SystemExit(f"--repo {spec}: expected org/name=/folder with a folder that exists")
        repos.setdefault(repo_id, Repo()).add(pathlib.Path(folder))
    return repos
