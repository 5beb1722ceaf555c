#!/usr/bin/python
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: a pinned revision of a model, complete and verified."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: hf_snapshot
short_description: Ensure that a pinned revision of a model is there, complete and verified
description:
  - Brings one revision of a model repository from a hub into C(<dest>/<organisation>/<name>/<commit>/), as
    real, read-only files. The folder gets that name only when every file has been read back and has the size
    and digest that the hub states; until then the files are in a hidden folder beside it, and a later run
    goes on with those that are right.
  - The folder holds C(manifest.json), with the size, time, sha256 and git blob id of each file. A snapshot
    with its manifest is compared with that, without asking the hub, so that a pinned revision needs no
    network.
  - A file that has gone missing or wrong is fetched again, and only that one.
  - What to fetch is asked of the hub's API. The bytes come by plain HTTP with ranges, or by
    C(huggingface_hub); neither one's own success is relied on.
  - An action plugin of the same name repeats short calls of this module, prints how far the fetch is, and
    outlasts a connection that is lost. The fetch itself goes on in a process of its own on the node, also
    when Ansible is interrupted; the next run joins it.
options:
  repo_id:
    description:
      - The repository, as organisation/name.
    type: str
    required: true
  revision:
    description:
      - The full commit hash. A branch or tag is accepted too. It is resolved to a hash once, when it is first
        asked for on this node; that is recorded in C(<dest>/<organisation>/<name>/.refs) and stays so, until
        another hash is pinned or the record is removed.
    type: str
    required: true
  dest:
    description:
      - Folder of all models. It is created if need be.
    type: path
    default: /srv/models
  endpoint:
    description:
      - Address of the hub or a mirror of it.
      - An absolute path is a folder in this module's own layout, such as another node's O(dest) on NFS; the
        files are copied from there, and held against the manifests in it.
    type: str
    default: https://huggingface.co
  token_file:
    description:
      - File on the node that holds a token for the hub. Public models need none.
    type: path
  allow_patterns:
    description:
      - Take only files whose path matches one of these shell patterns. C(*) also matches C(/).
      - Without it, all are taken.
    type: list
    elements: str
  ignore_patterns:
    description:
      - Leave out files whose path matches one of these shell patterns. The default leaves out the formats
        whose loading runs code from within the file.
    type: list
    elements: str
    default: ["*.bin", "*.ckpt", "*.dill", "*.joblib", "*.npy", "*.npz", "*.pickle", "*.pkl", "*.pt", "*.pth"]
  verify:
    description:
      - How a finished snapshot is compared with its manifest.
      - V(fast) looks at the existence, size and time of each file.
      - V(full) reads each file and compares its digest.
    type: str
    choices: [fast, full]
    default: fast
  transfer:
    description:
      - What brings the bytes from a hub.
      - V(ranges) is plain HTTP by this module. It needs nothing installed.
      - V(client) is C(huggingface_hub), which may use Xet storage with the public hub.
    type: str
    choices: [ranges, client]
    default: ranges
  peer:
    description:
      - Address of another node that shares the snapshot, such as C(http://10.0.0.1:8471). It is asked for the
        bytes first; what is right, the hub says all the same. Once it fails, or for what came wrong from it,
        the hub is asked.
      - For O(transfer=ranges). It gets no token, and is asked without a proxy.
    type: str
  workers:
    description:
      - Number of files that come at once. With V(ranges) each takes about 2 MiB of memory.
    type: int
    default: 8
  timeout:
    description:
      - Seconds after which a question to the hub, or a file that brings no more bytes, is given up. Until
        then what broke is tried again, with growing pauses or after those that the hub asks for.
      - A transfer that goes on may take any time.
    type: int
    default: 600
  wait:
    description:
      - Seconds after which the module returns though the fetch still goes on, with RV(job) and
        RV(progress). The action plugin sets it. Without it the module fetches in its own process.
    type: float
  job:
    description:
      - Say how far the fetch of this name is. Needs O(wait) and a full hash as O(revision).
    type: str
  state:
    description:
      - The snapshot is there.
    type: str
    choices: [present]
    default: present
attributes:
  check_mode:
    support: full
    description:
      - Asks the hub and says what would be fetched. Needs neither C(huggingface_hub) nor O(dest), and takes
        files that are there already to be right if their size is.
  diff_mode:
    support: full
    description: Shows the files, their sizes and digests.
requirements:
  - huggingface_hub 0.36.2 or later, for O(transfer=client), in the interpreter that runs the module
notes:
  - One process per model and node may fetch. A second one with O(wait) joins the first; without, it fails
    at once and names the first.
  - Files that a person put into the snapshot's folder are removed when it is made anew.
author:
  - the sglang-kit contributors
"""

EXAMPLES = r"""
- name: Ensure the target model is there
  hf_snapshot:
    repo_id: nvidia/Kimi-K2.5-NVFP4
    revision: "{{ model_store_target.revision }}"
  vars:
    ansible_python_interpreter: /opt/sglang/tools/hub/bin/python

- name: Read every byte of the drafter again, and fetch anew what is wrong
  hf_snapshot:
    repo_id: AQ-MedAI/Kimi-K25-eagle3
    revision: "{{ model_store_drafter.revision }}"
    endpoint: https://hub.example.com
    token_file: /etc/sglang/credentials/hub_token
    verify: full
  vars:
    ansible_python_interpreter: /opt/sglang/tools/hub/bin/python
"""

RETURN = r"""
path:
  description: Folder of the snapshot; in check mode it may not exist yet.
  type: str
  returned: success
  sample: /srv/models/org/name/0123456789abcdef0123456789abcdef01234567
revision:
  description: The commit hash, also where a branch was asked for.
  type: str
  returned: success
  sample: 0123456789abcdef0123456789abcdef01234567
files:
  description: Number of files in the snapshot.
  type: int
  returned: success
bytes:
  description: Their size together, in bytes.
  type: int
  returned: success
to_fetch:
  description: What was missing or wrong at the start.
  type: dict
  returned: success
  contains:
    files:
      description: Number of files.
      type: int
    bytes:
      description: Their size together, in bytes.
      type: int
free_bytes:
  description: Free space of the disk of O(dest), in bytes, before anything is fetched.
  type: int
  returned: success
needed_bytes:
  description: Space that these still need on the disk, in bytes; parts of them may be there.
  type: int
  returned: success
fetched_bytes:
  description: Bytes that came, in all; what came twice counts twice.
  type: int
  returned: success
peer_bytes:
  description: Those of them that came from O(peer).
  type: int
  returned: success
refetched_bytes:
  description:
    - Those of them that came, or will have to come, more than once, such as the end of a file whose
      transfer was killed. With O(transfer=client) it is not known.
  type: int
  returned: success
seconds:
  description: Time that the fetch took, with its checks.
  type: float
  returned: success
job:
  description: Name of the fetch that goes on, for O(job).
  type: str
  returned: when O(wait) was over first
progress:
  description:
    - How far it is. A dict with phase (check, fetch or publish), files, files_done, bytes, bytes_done, rate
      in bytes a second, eta_s in seconds.
  type: dict
  returned: when O(wait) was over first
lost:
  description: The fetch named O(job) has ended without a result, such as by a reboot; begin again.
  type: bool
  returned: when it did
"""

import functools
import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit import (
    snapshot,
    snapshot_folder,
    snapshot_hub,
    snapshot_job,
    snapshot_ranges,
    snapshot_transfer,
)
from ansible.module_utils.sglang_kit.snapshot_store import Refs, Store, free_space, hashers


class Source:
    """Where a model comes from: `hub` says what there is, `make` makes a transfer, `work` is its folder."""

    def __init__(self, params, endpoint, token):
        if endpoint.startswith("/"):
            self.hub = snapshot_folder.FolderHub(params["repo_id"], endpoint)
            kind = snapshot_folder
            self.make = snapshot_folder.FolderTransfer
        else:
            self.hub = snapshot_hub.Hub(params["repo_id"], endpoint, token, params["timeout"])
            if params["transfer"] == "client":
                kind, self.make = snapshot_transfer, snapshot_transfer.ClientTransfer
            else:
                kind = snapshot_ranges
                self.make = functools.partial(snapshot_ranges.RangeTransfer, peer=params["peer"])
        self.work = kind.WORK

    def missing(self):
        """Return what is not installed here that the transfer needs, or None."""
        return snapshot_transfer.client_missing() if self.work == snapshot_transfer.WORK else None


class Silent:
    """Hears of progress and tells nobody."""

    def phase(self, *_):
        pass

    def gained(self, number):
        pass

    def file_done(self):
        pass


class Plan:
    """What there is to do. `result` is the module's; `wrong` is {path: text} of the finished snapshot."""

    def __init__(self, manifest, wrong, doubtful):
        self.manifest = manifest
        self.wrong = wrong
        self.doubtful = doubtful
        self.done = False
        self.files = self.result = None

    def known(self):
        """Return {path: LocalFile} of the finished files that are as the hub states."""
        if self.manifest is None:
            return {}
        known = {}
        for file in self.files:
            entry = self.manifest["files"].get(file.path)
            if entry and file.path not in self.wrong:
                found = snapshot.LocalFile(entry["size"], entry["blob_id"], entry["sha256"])
                if snapshot.is_right(file, found):
                    known[file.path] = found
        return known


def read_token(path):
    """Return the token in the file; None if there is no path. Raises SnapshotError."""
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as content:
            token = content.read().strip()
    except (OSError, ValueError) as error:
        raise snapshot.SnapshotError(
            f"token_file {path} cannot be read: {error}. Put the token there, or leave token_file out."
        ) from error
    if not token or len(token.split()) != 1:
        raise snapshot.SnapshotError(f"token_file {path} holds no token; expected one word and nothing else.")
    return token


def standing(store, params):
    """Return the manifest of the finished snapshot if it is one of the files that are asked for."""
    manifest = store.manifest()
    if manifest is None or not snapshot.covers(manifest, params["allow_patterns"], params["ignore_patterns"]):
        return None
    return manifest


def suspects(manifest, folder, full):
    """Return ({path: what is wrong}, [paths whose contents must be read to know])."""
    wrong, doubtful = snapshot.changed_files(manifest, folder)
    return wrong, [path for path in manifest["files"] if path not in wrong] if full else doubtful


def report(store, revision, params, sizes, to_fetch, **more):
    """Return the module's result, given the sizes of the snapshot's files and the RemoteFiles to fetch."""
    return {
        "changed": True,
        "path": store.final,
        "revision": revision,
        "files": len(sizes),
        "bytes": sum(sizes),
        "to_fetch": {"files": len(to_fetch), "bytes": snapshot.total(to_fetch)},
        "free_bytes": free_space(params["dest"])[0],
        "needed_bytes": 0,
        "fetched_bytes": 0,
        "peer_bytes": 0,
        "refetched_bytes": 0,
        "seconds": 0.0,
        **more,
    }


def check_space(source, store, to_fetch, dest):
    snapshot.check_space(to_fetch, store.parts_bytes(source.work), *free_space(dest), dest)


def make_plan(source, store, commit, params, progress, check_mode=False):
    """Return the Plan; asks the hub unless the finished snapshot is right. Raises SnapshotError."""
    manifest, full = standing(store, params), params["verify"] == "full"
    wrong, doubtful = {}, []
    if manifest:
        wrong, doubtful = suspects(manifest, store.final, full)
        # A dry run need not know what a copy of 600 GB is worth, but when it is asked to.
        if doubtful and (full or not check_mode):
            wrong.update(store.recheck(manifest, doubtful, progress))
    plan = Plan(manifest, wrong, snapshot.changed_files(manifest, store.final)[1] if manifest else [])
    if manifest and not wrong:
        sizes = [entry["size"] for entry in manifest["files"].values()]
        plan.done = True
        plan.result = report(store, commit, params, sizes, [], changed=bool(plan.doubtful))
        return plan

    listed = source.hub.files(commit)
    plan.files = snapshot.select(listed, params["allow_patterns"], params["ignore_patterns"])
    snapshot.check_paths(plan.files)
    if not plan.files:
        raise snapshot.SnapshotError(
            f"{params['repo_id']} at {commit} has {len(listed)} files and the patterns leave none of them."
        )
    there = [file for file in store.likely_there(plan.files) if file.path not in wrong]
    to_fetch = [file for file in plan.files if file not in there]
    needed = max(0, snapshot.total(to_fetch) - store.parts_bytes(source.work))
    sizes = [file.size for file in plan.files]
    plan.result = report(store, commit, params, sizes, to_fetch, needed_bytes=needed)
    plan.result["diff"] = {
        "before": snapshot.describe(there) if store.manifest() else "",
        "after": snapshot.describe(plan.files),
        "before_header": store.final,
        "after_header": store.final,
    }
    # Whoever holds the lock looks again; meanwhile parts come and go.
    if not store.busy():
        check_space(source, store, to_fetch, params["dest"])
    return plan


def fetch(transfer, store, files, right, progress):
    """Bring the files that are not right; return all as {path: LocalFile}.

    Files are read back as they come. Those that come wrong are fetched once more; raises SnapshotError if
    that does not help.
    """
    right, wrong = dict(right), {}
    for _ in range(2):
        missing = [file for file in files if file.path not in right]
        if not missing:
            break
        with hashers() as pool:

            def check(file):
                found, text = store.check(file)
                if found:
                    progress.file_done()
                else:
                    progress.gained(-file.size)
                return file, found, text

            checks = [pool.submit(check, file) for file in transfer.fetch(missing)]
        wrong = {}
        for file, found, text in (done.result() for done in checks):
            if found:
                right[file.path] = found
            else:
                wrong[file.path] = text
                transfer.refetched += file.size
    if wrong:
        first = next(iter(wrong.values()))
        raise snapshot.SnapshotError(
            f"{len(wrong)} of {len(files)} files came wrong twice, first {first}. They were removed, and "
            "the snapshot was not put in place. Something between this node and the hub changes or cuts "
            "what passes through: try another endpoint, or without the proxy."
        )
    return right


def ensure(source, store, commit, params, token, progress):
    """Make it so, given the lock; return the module's result. Raises SnapshotError."""
    since = time.monotonic()
    # Another process may have done the work in the meantime.
    plan = make_plan(source, store, commit, params, progress)
    if plan.done:
        if plan.doubtful:
            store.renew(plan.manifest)
        return plan.result
    known, files = plan.known(), plan.files
    transfer = source.make(
        params["repo_id"],
        commit,
        params["endpoint"],
        token,
        store.staging,
        params["timeout"],
        params["workers"],
        progress,
    )
    staged = store.stage(files, source.work, known)
    right = dict(store.verify([file for file in staged if file.path not in known], progress), **known)
    to_fetch = [file for file in files if file.path not in right]
    check_space(source, store, to_fetch, params["dest"])
    size = snapshot.total(files)
    progress.phase("fetch", len(files), size, len(right), size - snapshot.total(to_fetch))
    right = fetch(transfer, store, files, right, progress)
    transfer.clean()
    progress.phase("publish", len(files), size, len(files), size)
    store.publish(
        snapshot.make_manifest(
            params["repo_id"],
            commit,
            params["allow_patterns"],
            params["ignore_patterns"],
            store.staging,
            right,
        )
    )
    return dict(
        plan.result,
        to_fetch={"files": len(to_fetch), "bytes": snapshot.total(to_fetch)},
        fetched_bytes=transfer.received,
        peer_bytes=getattr(transfer, "from_peer", 0),
        refetched_bytes=transfer.refetched,
        seconds=round(time.monotonic() - since, 1),
    )


def find_commit(module, source):
    """Return the commit of the revision; a branch stays what it was when it was first asked for here."""
    revision, repo_id = module.params["revision"], module.params["repo_id"]
    if snapshot.is_commit(revision):
        return revision
    refs = Refs(module.params["dest"], repo_id)
    commit = refs.get(revision)
    if commit is None:
        commit = source.hub.resolve(revision)
        if not module.check_mode:
            refs.record(revision, commit)
    module.warn(
        f"{revision} of {repo_id} is {commit} on this node, and stays so ({refs.path}); other nodes may have "
        f"found it elsewhere. Pin {commit} in the inventory"
    )
    return commit


def follow(store, job, wait):
    result = snapshot_job.follow(store, job, wait)
    return {"changed": False, "job": job, "lost": True} if result is None else result


def run(module):
    params = module.params
    params["dest"] = os.path.abspath(params["dest"])
    params["endpoint"] = params["endpoint"].rstrip("/")
    params["peer"] = (params["peer"] or "").rstrip("/") or None
    repo_id, revision = params["repo_id"], params["revision"]
    snapshot.check_repo_id(repo_id)
    if params["job"]:
        return follow(Store(params["dest"], repo_id, revision), params["job"], params["wait"])
    token = read_token(params["token_file"])
    if token:
        module.no_log_values.add(token)
    source = Source(params, params["endpoint"], token)
    commit = find_commit(module, source)
    store = Store(params["dest"], repo_id, commit)
    background = params["wait"] is not None and not module.check_mode
    if background and store.busy():
        state = snapshot_job.read_state(store.job)
        if state:
            return dict(follow(store, state["job"], params["wait"]), revision=commit)
    work = functools.partial(ensure, source, store, commit, params, token)

    manifest = standing(store, params)
    must_read = manifest and suspects(manifest, store.final, params["verify"] == "full")[1]
    # Reading takes minutes, and so is not for a call that should be short.
    if not (background and must_read):
        plan = make_plan(source, store, commit, params, Silent(), module.check_mode)
        if module.check_mode or (plan.done and not plan.doubtful):
            return plan.result
        missing = source.missing()
        if missing and not plan.done:
            raise snapshot.SnapshotError(missing)
    if background:
        return dict(follow(store, snapshot_job.start(store, work), params["wait"]), revision=commit)
    with store.lock(), snapshot_job.Progress(store.job, "foreground") as progress:
        return work(progress)


def main():
    module = AnsibleModule(
        argument_spec={
            "repo_id": {"type": "str", "required": True},
            "revision": {"type": "str", "required": True},
            "dest": {"type": "path", "default": "/srv/models"},
            "endpoint": {"type": "str", "default": snapshot_hub.DEFAULT_ENDPOINT},
            # A path, not a secret.
            "token_file": {"type": "path", "no_log": False},
            "allow_patterns": {"type": "list", "elements": "str"},
            "ignore_patterns": {"type": "list", "elements": "str", "default": snapshot.PICKLE_PATTERNS},
            "verify": {"type": "str", "choices": ["fast", "full"], "default": "fast"},
            "transfer": {"type": "str", "choices": ["ranges", "client"], "default": "ranges"},
            "peer": {"type": "str"},
            "workers": {"type": "int", "default": 8},
            "timeout": {"type": "int", "default": 600},
            "wait": {"type": "float"},
            "job": {"type": "str"},
            "state": {"type": "str", "choices": ["present"], "default": "present"},
        },
        required_by={"job": ["wait"]},
        supports_check_mode=True,
    )
    try:
        result = run(module)
    except snapshot.SnapshotError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        dest = module.params["dest"]
        module.fail_json(
            msg=f"{error}. Expected to read and write below {dest}: check its disk, owner and mode."
        )
    if result.get("failed"):
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
