# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Where snapshots lie, and how one gets its name: staged beside it, whole, verified, then renamed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import glob
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


def free_space(path):
    """Return (bytes, inodes or None) that are free on the disk where the path is or would be."""
    found = os.statvfs(existing_parent(path))
    # Some file systems make inodes as they go, and state none.
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def make_folders(path):
    """Make the folder and those above it, enterable by all whatever the umask."""
    if not os.path.isdir(path):
        make_folders(os.path.dirname(path))
        # Another thread may be making it for a file of its own.
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            os.chmod(path, 0o755)


def files_below(folder):
    """Return the paths, relative to the folder, of everything in it that is no folder."""
    found = []
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        found += [os.path.relpath(os.path.join(parent, name), folder) for name in names + links]
    return found


def hashers():
    """Return a pool with as many workers as there are cores to hash with."""
    return concurrent.futures.ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0))))


def sync(path):
    """Bring a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _dump(manifest, content):
    json.dump(manifest, content, indent=1, sort_keys=True)
    content.write("\n")


def remove_tree(folder):
    """Remove a folder whose folders may be read-only, or a file."""
    if not os.path.isdir(folder):
        os.unlink(folder)
        return
    for parent, _, _ in os.walk(folder):
        os.chmod(parent, 0o755)
    shutil.rmtree(folder)


class Refs:
    """The commits that branches and tags of one model were when they were first asked for."""

    def __init__(self, dest, repo_id):
        self.path = os.path.join(dest, *repo_id.split("/"), ".refs")

    def _all(self):
        try:
            with open(self.path, encoding="utf-8") as content:
                return json.load(content)
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise snapshot.SnapshotError(
                f"{self.path} is damaged: {error}. It says which commit a branch was when it was first asked "
                "for; remove it, and pin the commit that you want instead of a branch."
            ) from error

    def get(self, revision):
        return self._all().get(revision)

    def record(self, revision, commit):
        make_folders(os.path.dirname(self.path))
        with open(self.path + ".new", "w", encoding="utf-8") as content:
            _dump(dict(self._all(), **{revision: commit}), content)
        os.rename(content.name, self.path)


def prunable(dest, repo_id, wanted, in_use, keep):
    """Return (folders that may go, bytes that this frees, revisions that a link needs).

    wanted: revisions that stay; in_use: patterns of links to what stays
    keep: number of other whole revisions that stay, the newest
    """
    parent = os.path.realpath(os.path.join(dest, *repo_id.split("/")))
    linked = {os.path.realpath(path) for pattern in in_use for path in glob.glob(pattern)}
    names = sorted(os.listdir(parent)) if os.path.isdir(parent) else []
    needed = {name for name in names if os.path.join(parent, name) in linked}
    whole, rest = [], []
    for name in names:
        path = os.path.join(parent, name)
        revision = name.strip(".").partition(".")[0]
        if not snapshot.is_commit(revision) or revision in wanted or revision in needed:
            continue
        if name != revision:
            rest.append(path)
        elif Store(dest, repo_id, revision).manifest() is not None:
            # The manifest is the last file of a snapshot.
            whole.append((os.stat(os.path.join(path, snapshot.MANIFEST)).st_mtime, path))
    going = [path for _, path in sorted(whole, reverse=True)[keep:]] + rest
    size = sum(os.lstat(os.path.join(path, name)).st_size for path in going for name in files_below(path))
    return going, size, sorted(needed)


class Store:
    """The place of one revision of one model below `dest`."""

    def __init__(self, dest, repo_id, revision):
        self.parent = os.path.join(dest, *repo_id.split("/"))
        self.repo_id = repo_id
        self.final = os.path.join(self.parent, revision)
        self.staging = os.path.join(self.parent, f".{revision}.partial")
        self.job = os.path.join(self.parent, f".{revision}.job")
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

        The lock goes with the process, so a killed one leaves none. A child that is to hold it for
        longer calls what this gives.
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

            def claim():
                os.ftruncate(handle, 0)
                os.pwrite(handle, b"%d\n" % os.getpid(), 0)

            claim()
            yield claim
        finally:
            os.close(handle)

    def busy(self):
        """Say whether somebody is at this model."""
        try:
            handle = os.open(os.path.join(self.parent, ".lock"), os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

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

    def parts_bytes(self, work):
        """Return the size of what a transfer has left of unfinished files, in its folder named `work`."""
        folder = os.path.join(self.staging, work)
        return sum(os.lstat(os.path.join(folder, path)).st_size for path in files_below(folder))

    def stage(self, files, work, known):
        """Make the staging folder hold what is there of the files already; return those RemoteFiles.

        Files of the finished snapshot are linked into it: they cost nothing, and the finished one stays
        as it is; those whose paths are `known` to be right there come from nowhere else. What is neither
        one of the files nor in the folder named `work` is removed.
        """
        if os.path.isdir(self._replaced):
            remove_tree(self._replaced)
        make_folders(self.staging)
        for parent, _, _ in os.walk(self.staging):
            os.chmod(parent, 0o755)
        wanted = {file.path for file in files}
        for path in files_below(self.staging):
            if path in known or (path not in wanted and path.split(os.sep)[0] != work):
                os.unlink(os.path.join(self.staging, path))
        for path in wanted:
            source, target = os.path.join(self.final, path), os.path.join(self.staging, path)
            if os.path.isfile(source) and not os.path.islink(source) and not os.path.exists(target):
                make_folders(os.path.dirname(target))
                os.link(source, target)
        return [file for file in files if os.path.lexists(os.path.join(self.staging, file.path))]

    def verify(self, files, progress):
        """Read the staged files, remove the wrong ones and return {path: LocalFile} of the right ones.

        files: RemoteFiles that are there
        """
        progress.phase("check", len(files), snapshot.total(files))
        right = {}
        with hashers() as pool:
            for file, (found, _) in zip(files, pool.map(self.check, files)):
                progress.gained(file.size)
                progress.file_done()
                if found:
                    right[file.path] = found
        return right

    def check(self, file):
        """Read one staged file; return (LocalFile, None) if it is right, else remove it: (None, text)."""
        path = os.path.join(self.staging, file.path)
        found = snapshot.read(path, large=file.sha256 is not None)
        if snapshot.is_right(file, found):
            return found, None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return None, snapshot.mismatch(file, found)

    def recheck(self, manifest, paths, progress):
        """Read finished files again; return {path: what is wrong with it} against the manifest."""
        progress.phase("check", len(paths), sum(manifest["files"][path]["size"] for path in paths))

        def look(path):
            found = snapshot.read(os.path.join(self.final, path), large=True)
            progress.gained(found.size if found else 0)
            progress.file_done()
            return found.sha256 if found else "of nothing"

        with hashers() as pool:
            found = dict(zip(paths, pool.map(look, paths)))
        expected = {path: manifest["files"][path]["sha256"] for path in paths}
        return {
            path: f"sha256 {sha256}, expected {expected[path]}"
            for path, sha256 in found.items()
            if sha256 != expected[path]
        }

    def renew(self, manifest):
        """Write the manifest of the finished files anew, with the times and inodes that they have now."""
        for path, entry in manifest["files"].items():
            status = os.lstat(os.path.join(self.final, path))
            entry.update(mtime_ns=status.st_mtime_ns, inode=status.st_ino)
        os.chmod(self.final, 0o755)
        with open(os.path.join(self.final, f".{snapshot.MANIFEST}"), "w", encoding="utf-8") as content:
            _dump(manifest, content)
        os.chmod(content.name, 0o444)
        sync(content.name)
        os.rename(content.name, os.path.join(self.final, snapshot.MANIFEST))
        os.chmod(self.final, 0o555)
        sync(self.final)

    def publish(self, manifest):
        """Give the staged files, all verified, their final name, on the disk and read-only."""
        with open(os.path.join(self.staging, snapshot.MANIFEST), "w", encoding="utf-8") as content:
            _dump(manifest, content)
        for path in files_below(self.staging):
            path = os.path.join(self.staging, path)
            os.chmod(path, 0o444)
            sync(path)
        for parent, _, _ in os.walk(self.staging, topdown=False):
            if not os.listdir(parent):
                # Left by a transfer of another kind.
                os.rmdir(parent)
                continue
            os.chmod(parent, 0o555)
            sync(parent)
        if os.path.isdir(self.final):
            os.rename(self.final, self._replaced)
        os.rename(self.staging, self.final)
        sync(self.parent)
        if os.path.isdir(self._replaced):
            remove_tree(self._replaced)
