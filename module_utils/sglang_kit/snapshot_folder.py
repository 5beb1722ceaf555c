# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Another store of snapshots, on a path of this node, in a hub's place: a disk that was carried, NFS."""

from __future__ import annotations

import concurrent.futures
import os
import shutil

from . import snapshot
from .snapshot_store import Store, make_folders

WORK = ".parts"
READ = 1 << 22


class FolderHub:
    """Answers what snapshot_hub.Hub does, from the manifests of the store."""

    def __init__(self, repo_id, endpoint):
        self.repo_id = repo_id
        self.endpoint = endpoint

    def resolve(self, revision):
        raise snapshot.SnapshotError(
            f"revision is {revision}, and the endpoint {self.endpoint} is a folder, which knows no branches; "
            "expected a full commit hash, as the name of a folder in it."
        )

    def files(self, commit):
        """Return the RemoteFiles of a commit, by path; raise SnapshotError."""
        store = Store(self.endpoint, self.repo_id, commit)
        manifest = store.manifest()
        if manifest is None or manifest.get("format") != snapshot.MANIFEST_FORMAT:
            raise snapshot.SnapshotError(
                f"{store.final} has no {snapshot.MANIFEST} that can be read; expected a snapshot that this "
                "module made there. Check endpoint, and whether it is mounted."
            )
        return sorted(
            snapshot.RemoteFile(path, entry["size"], entry["blob_id"], entry["sha256"])
            for path, entry in manifest["files"].items()
        )


class FolderTransfer:
    """Copies, several files at once (the duties: snapshot_transfer)."""

    def __init__(self, repo_id, revision, endpoint, token, folder, timeout, workers, progress):
        self.source = Store(endpoint, repo_id, revision).final
        self.folder = folder
        self.workers = workers
        self.progress = progress
        self.received = self.refetched = 0

    def fetch(self, files):
        with concurrent.futures.ThreadPoolExecutor(self.workers) as pool:
            for file in pool.map(self._file, files):
                self.received += file.size
                yield file

    def clean(self):
        shutil.rmtree(os.path.join(self.folder, WORK), ignore_errors=True)

    def _file(self, file):
        part = os.path.join(self.folder, WORK, file.path)
        target = os.path.join(self.folder, file.path)
        try:
            make_folders(os.path.dirname(part))
            make_folders(os.path.dirname(target))
            with open(os.path.join(self.source, file.path), "rb") as source, open(part, "wb") as copy:
                for data in iter(lambda: source.read(READ), b""):
                    copy.write(data)
                    self.progress.gained(len(data))
            os.rename(part, target)
        except OSError as error:
            raise snapshot.SnapshotError(
                f"{file.path} cannot be copied from {self.source}: {error}. What has come is kept: check "
                "both disks and run again."
            ) from error
        return file
