# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Where snapshots lie, and how one gets its name: staged beside it, whole, verified, then renamed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import json
import os
import shutil
import stat

from . import snapshot


def existing_parent(path):
    """Return the path or the nearest folder above it that exists."""
    while not os.path.isdir(path):
        path = os.path.dirname(path) or "."
    return path


def free_bytes(path):
    """Return the free space, in bytes, of the disk where the path is or would be."""
    return shutil.disk_usage(existing_parent(path)).free


def make_folders(path):
    """Make the folder and those above it, enterable by all whatever the umask."""
    if not os.path.isdir(path):
        make_folders(os.path.dirname(path))
        os.mkdir(path)
        os.chmod(path, 0o755)


def files_below(folder):
    """Return the paths, relative to the folder, of everything in it that is no folder."""
    found = []
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        found += [os.path.relpath(os.path.join(parent, name), folder) for name in names + links]
    return found


def read_all(folder, paths):
    """Return {path: LocalFile or None}; as many at once as there are cores to hash with."""
    workers = min(8, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda path: snapshot.read(os.path.join(folder, path)), paths)
        return dict(zip(paths, found))


def sync(path):
    """Bring a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_tree(folder):
    """Remove a folder whose folders may be read-only."""
    for parent, _, _ in os.walk(folder):
        os.chmod(parent, 0o755)
    shutil.rmtree(folder)


class Store:
    """The place of one revision of one model below `dest`."""

    def __init__(self, dest, repo_id, revision):
        self.parent = os.path.join(dest, *repo_id.split("/"))
        self.repo_id = repo_id
        self.final = os.path.join(self.parent, revision)
        self.staging = os.path.join(self.parent, f".{revision}.partial")
        self._replaced = os.path.join(self.parent, f".{revision}.replaced")

    def manifest(self):
        """Return the manifest of the finished snapshot; None if there is none that can be read.

        Raises SnapshotError if something other than a folder has the snapshot's name.
        """
        if os.path.lexists(self.final) and (os.path.islink(self.final) or not os.path.isdir(self.final)):
            raise snapshot.SnapshotError(
                f"{self.final} is a link or a file; expected a folder, or nothing. Engines that load code "
                "with the model fail on links: remove it and run again."
            )
        try:
            with open(os.path.join(self.final, snapshot.MANIFEST), encoding="utf-8") as content:
                return json.load(content)
        except (OSError, ValueError):
            return None

    @contextlib.contextmanager
    def lock(self):
        """Keep others away from this model; raise SnapshotError if somebody is at it.

        The lock goes with the process, so a killed one leaves none.
        """
        make_folders(self.parent)
        handle = os.open(os.path.join(self.parent, ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
                raise snapshot.SnapshotError(
                    f"process {pid} on this node is already fetching {self.repo_id} into {self.parent}. An "
                    "interrupted ansible leaves it running: it goes on by itself. Wait for its end and run "
                    f"again (it finds the work done), or stop it: kill {pid}"
                ) from None
            os.ftruncate(handle, 0)
            os.pwrite(handle, b"%d\n" % os.getpid(), 0)
            yield
        finally:
            os.close(handle)

    def likely_there(self, files):
        """Return those of the RemoteFiles that lie in the final or staging folder, by their size."""
        there = []
        for file in files:
            for folder in (self.final, self.staging):
                try:
                    found = os.lstat(os.path.join(folder, file.path))
                except OSError:
                    continue
                if stat.S_ISREG(found.st_mode) and found.st_size == file.size:
                    there.append(file)
                    break
        return there

    def stage(self, files, work):
        """Make the staging folder hold what is there of the files already; return those that are right.

        Files of the finished snapshot are linked into it: they cost nothing, and the finished one stays
        as it is. What is neither one of the files nor in the folder named `work` is removed, and so is
        what is wrong.
        """
        if os.path.isdir(self._replaced):
            remove_tree(self._replaced)
        make_folders(self.staging)
        for parent, _, _ in os.walk(self.staging):
            os.chmod(parent, 0o755)
        wanted = {file.path for file in files}
        for path in files_below(self.staging):
            if path not in wanted and path.split(os.sep)[0] != work:
                os.unlink(os.path.join(self.staging, path))
        for path in wanted:
            source, target = os.path.join(self.final, path), os.path.join(self.staging, path)
            if os.path.isfile(source) and not os.path.islink(source) and not os.path.exists(target):
                make_folders(os.path.dirname(target))
                os.link(source, target)
        return self.verify(files)[0]

    def verify(self, files):
        """Read the staged files; return ({path: LocalFile} of the right ones, {path: text} of the others).

        Wrong ones are removed, or the transfer would take them for fetched.
        """
        found = read_all(self.staging, [file.path for file in files])
        right, wrong = {}, {}
        for file in files:
            if snapshot.is_right(file, found[file.path]):
                right[file.path] = found[file.path]
                continue
            wrong[file.path] = snapshot.mismatch(file, found[file.path])
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.staging, file.path))
        return right, wrong

    def publish(self, manifest):
        """Give the staged files, all verified, their final name, on the disk and read-only."""
        with open(os.path.join(self.staging, snapshot.MANIFEST), "w", encoding="utf-8") as content:
            json.dump(manifest, content, indent=1, sort_keys=True)
            content.write("\n")
        for path in files_below(self.staging):
            path = os.path.join(self.staging, path)
            os.chmod(path, 0o444)
            sync(path)
        for parent, _, _ in os.walk(self.staging, topdown=False):
            os.chmod(parent, 0o555)
            sync(parent)
        if os.path.isdir(self.final):
            os.rename(self.final, self._replaced)
        os.rename(self.staging, self.final)
        sync(self.parent)
        if os.path.isdir(self._replaced):
            remove_tree(self._replaced)
