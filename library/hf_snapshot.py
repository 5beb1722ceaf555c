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
  - What to fetch is asked of the hub's API. The bytes are brought by C(huggingface_hub), whose own success is
    not relied on, as it compares no contents.
options:
  repo_id:
    description:
      - The repository, as organisation/name.
    type: str
    required: true
  revision:
    description:
      - The full commit hash. A branch or tag is accepted too; it is resolved to a hash once per run, so the
        network is needed and the result may be another one each time.
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
  timeout:
    description:
      - Seconds after which a question to the hub, or a transfer that brings no more bytes, is given up.
      - A transfer that goes on may take any time.
    type: int
    default: 600
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
  - huggingface_hub 0.36.2 or later, to fetch files, in the interpreter that runs the module
notes:
  - One process per model and node may fetch; a second one fails at once and names the first.
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
fetched_bytes:
  description: Size of all files that were fetched, in bytes; a file that came wrong counts twice.
  type: int
  returned: success
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit import snapshot, snapshot_hub
from ansible.module_utils.sglang_kit.snapshot_store import Store, free_bytes
from ansible.module_utils.sglang_kit.snapshot_transfer import WORK, ClientTransfer, client_missing


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
    """Return (manifest, {path: what is wrong}) of the finished snapshot; (None, {}) without one."""
    manifest = store.manifest()
    if manifest is None or not snapshot.covers(manifest, params["allow_patterns"], params["ignore_patterns"]):
        return None, {}
    return manifest, snapshot.changed_files(manifest, store.final, full=params["verify"] == "full")


def report(store, revision, params, sizes, to_fetch, fetched_bytes=0):
    """Return the module's result, given the sizes of the snapshot's files and the RemoteFiles to fetch."""
    return {
        "path": store.final,
        "revision": revision,
        "files": len(sizes),
        "bytes": sum(sizes),
        "to_fetch": {"files": len(to_fetch), "bytes": snapshot.total(to_fetch)},
        "free_bytes": free_bytes(params["dest"]),
        "fetched_bytes": fetched_bytes,
    }


def unchanged(store, revision, params):
    """Return the result if the finished snapshot is as it should be, else None; and what is wrong with it."""
    manifest, wrong = standing(store, params)
    if manifest is None or wrong:
        return None, wrong
    sizes = [entry["size"] for entry in manifest["files"].values()]
    return dict(report(store, revision, params, sizes, []), changed=False), wrong


def fetch(transfer, store, files, right):
    """Bring the files that are not right; return (all as {path: LocalFile}, bytes fetched).

    Files that come wrong are fetched once more; raises SnapshotError if that does not help.
    """
    fetched, wrong = 0, {}
    for force in (False, True):
        missing = [file for file in files if file.path not in right]
        if not missing:
            break
        transfer.fetch([file.path for file in missing], force)
        fetched += snapshot.total(missing)
        now_right, wrong = store.verify(missing)
        right = dict(right, **now_right)
    if wrong:
        first = next(iter(wrong.values()))
        raise snapshot.SnapshotError(
            f"{len(wrong)} of {len(files)} files came wrong twice, first {first}. They were removed, and "
            "the snapshot was not put in place. Something between this node and the hub changes or cuts "
            "what passes through: try another endpoint, or without the proxy."
        )
    return right, fetched


def run(module):
    params = module.params
    params["dest"] = os.path.abspath(params["dest"])
    endpoint = params["endpoint"].rstrip("/")
    repo_id, revision = params["repo_id"], params["revision"]
    snapshot.check_repo_id(repo_id)
    token = read_token(params["token_file"])
    if token:
        module.no_log_values.add(token)
    hub = snapshot_hub.Hub(repo_id, endpoint, token, params["timeout"])
    commit = revision if snapshot.is_commit(revision) else hub.resolve(revision)
    if commit != revision:
        module.warn(f"{revision} of {repo_id} may move; to stay with what it is now, pin {commit}")
    store = Store(params["dest"], repo_id, commit)
    done, wrong = unchanged(store, commit, params)
    if done:
        return done

    listed = hub.files(commit)
    files = snapshot.select(listed, params["allow_patterns"], params["ignore_patterns"])
    snapshot.check_paths(files)
    if not files:
        raise snapshot.SnapshotError(
            f"{repo_id} at {commit} has {len(listed)} files and the patterns leave none of them."
        )
    there = [file for file in store.likely_there(files) if file.path not in wrong]
    to_fetch = [file for file in files if file not in there]
    sizes = [file.size for file in files]
    result = dict(report(store, commit, params, sizes, to_fetch), changed=True)
    before = snapshot.describe(there) if store.manifest() else ""
    result["diff"] = {
        "before": before,
        "after": snapshot.describe(files),
        "before_header": store.final,
        "after_header": store.final,
    }
    snapshot.check_space(to_fetch, result["free_bytes"], params["dest"])
    if module.check_mode:
        return result

    missing_client = client_missing()
    if missing_client:
        raise snapshot.SnapshotError(missing_client)
    with store.lock():
        # Another process may have done the work in the meantime.
        done, _ = unchanged(store, commit, params)
        if done:
            return done
        transfer = ClientTransfer(repo_id, commit, endpoint, token, store.staging, params["timeout"])
        right = store.stage(files, WORK)
        to_fetch = [file for file in files if file.path not in right]
        snapshot.check_space(to_fetch, free_bytes(params["dest"]), params["dest"])
        right, fetched = fetch(transfer, store, files, right)
        transfer.clean()
        manifest = snapshot.make_manifest(
            repo_id, commit, params["allow_patterns"], params["ignore_patterns"], store.staging, right
        )
        store.publish(manifest)
    result["to_fetch"] = {"files": len(to_fetch), "bytes": snapshot.total(to_fetch)}
    result["fetched_bytes"] = fetched
    return result


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
            "timeout": {"type": "int", "default": 600},
            "state": {"type": "str", "choices": ["present"], "default": "present"},
        },
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
    module.exit_json(**result)


if __name__ == "__main__":
    main()
