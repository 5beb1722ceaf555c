# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What a staged engine tree is made of, and whether it still is. Standard library only, Python 3.8 and later.

Shared by the module that attests a tree and by the launcher, which looks before each start: reading takes
milliseconds, and a tree that somebody changed would cost the whole load of the weights.
"""

from __future__ import annotations

import hashlib
import json
import os

NAME = "attestation.json"


def sha256(path):
    """Return the hex digest of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def site_packages(tree):
    """Return the folder of a virtual environment's distributions; FileNotFoundError if there is none."""
    library = os.path.join(tree, "lib")
    for name in sorted(os.listdir(library)):
        folder = os.path.join(library, name, "site-packages")
        if name.startswith("python3") and os.path.isdir(folder):
            return folder
    raise FileNotFoundError(f"no lib/python3.*/site-packages in {tree}")


def look(tree, files):
    """Describe a tree as it is.

    files: paths relative to it whose content matters. Returns {"files": {path: sha256 or None if missing},
    "distributions": {"name-version": sha256 of its list of files}}.
    """
    folder = site_packages(tree)
    distributions = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".dist-info"):
            record = os.path.join(folder, name, "RECORD")
            distributions[name[: -len(".dist-info")]] = sha256(record) if os.path.isfile(record) else ""
    return {
        "files": {
            path: sha256(os.path.join(tree, path)) if os.path.isfile(os.path.join(tree, path)) else None
            for path in files
        },
        "distributions": distributions,
    }


def differences(attested, found):
    """Return a sentence (str) for each thing that is not as it was attested; [] if all is."""
    said = []
    for path, digest in sorted(attested["files"].items()):
        now = found["files"].get(path)
        if now is None:
            said.append(f"{path} is gone")
        elif now != digest:
            said.append(f"{path} has sha256 {now}, attested was {digest}")
    before, after = attested["distributions"], found["distributions"]
    gone, new = sorted(set(before) - set(after)), sorted(set(after) - set(before))
    if gone:
        said.append("distributions are gone: " + ", ".join(gone))
    if new:
        said.append("distributions were added: " + ", ".join(new))
    changed = sorted(name for name in set(before) & set(after) if before[name] != after[name])
    if changed:
        said.append("distributions were installed anew: " + ", ".join(changed))
    return said


def read(tree):
    """Return the attestation of a tree (dict), or None if it has none."""
    try:
        with open(os.path.join(tree, NAME), encoding="utf-8") as stream:
            return json.load(stream)
    except FileNotFoundError:
        return None


def verify(tree):
    """Return what is wrong with a tree (list of str); [] if it is what was attested."""
    try:
        attested = read(tree)
        if attested is None:
            return [f"{tree} has no {NAME}: it is unfinished"]
        return differences(attested, look(tree, attested["files"]))
    except (OSError, ValueError, KeyError) as error:
        return [f"{tree} cannot be read: {error}"]
