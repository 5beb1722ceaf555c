# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""A folder of wheels that locks with hashes can be installed from without a network.

Making one needs `packaging`; judging one needs the standard library only, Python 3.8 and later.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys

from .attestation import sha256

MANIFEST = "bundle.json"
WHEELS = "wheels"
FORMAT = 1

_LINE = re.compile(
    r"(?P<pin>\S+==\S+?)\s*(?:;\s*(?P<marker>.+?))?(?P<hashes>(?:\s+--hash=sha256:[0-9a-f]{64})+)\s*"
)


class BundleError(Exception):
    """A lock or a bundle is not what it must be; the message says what to do."""


def requirements(text):
    """Read a lock: a list of (pin, marker or "", [sha256, ...]); BundleError where a line pins nothing."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if not match:
            raise BundleError(
                f"found {line.strip()[:80]!r} in the lock, expected name==version with sha256 hashes. "
                "Make the lock with tools/lock"
            )
        hashes = [word.rpartition(":")[2] for word in match["hashes"].split()]
        found.append((match["pin"], match["marker"] or "", hashes))
    return found


def select(text, target):
    """Return the (pin, [sha256, ...]) of a lock that apply to a target (see `this_machine`)."""
    from packaging.markers import Marker

    environment = {
        "implementation_name": "cpython",
        "implementation_version": target["python"] + ".0",
        "os_name": "posix",
        "platform_machine": target["machine"],
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": target["python"] + ".0",
        "python_version": target["python"],
        "sys_platform": "linux",
    }
    return [
        (pin, hashes)
        for pin, marker, hashes in requirements(text)
        if not marker or Marker(marker).evaluate(environment)
    ]


def tags(target):
    """Return the platform tags of wheels that a target runs, the best first."""
    machine, newest = target["machine"], int(target["glibc"].split(".")[1])
    modern = [f"manylinux_2_{minor}_{machine}" for minor in range(newest, 4, -1)]
    return [
        *modern,
        f"manylinux2014_{machine}",
        f"manylinux2010_{machine}",
        f"manylinux1_{machine}",
        f"linux_{machine}",
    ]


def this_machine():
    """Return what wheels are chosen by: {"python": "3.11", "machine": "x86_64", "glibc": "2.36"}."""
    return {
        "python": "{}.{}".format(*sys.version_info),
        "machine": platform.machine(),
        "glibc": (os.confstr("CS_GNU_LIBC_VERSION") or "glibc 2.0").split()[1],
    }


def describe(folder, version, target, locks):
    """Describe the wheels of a folder.

    version: of the engine; target: as of `this_machine`; locks: {name: (sha256 of the lock, what `select`
    returned)}. Returns the manifest (dict) and the pins (list of str) that have no wheel with one of their
    hashes.
    """
    wheels = os.path.join(folder, WHEELS)
    there = {}
    for name in sorted(os.listdir(wheels)):
        there[sha256(os.path.join(wheels, name))] = name
    missing, described = [], {}
    for lock, (digest, selected) in locks.items():
        files = {}
        for pin, hashes in selected:
            mine = [one for one in hashes if one in there]
            files.update({there[one]: one for one in mine})
            if not mine:
                missing.append(pin)
        described[lock] = {"sha256": digest, "files": files}
    return {"format": FORMAT, "version": version, "target": target, "locks": described}, missing


def read(folder):
    """Return the manifest of a bundle; BundleError if there is none that can be read."""
    path = os.path.join(folder, MANIFEST)
    try:
        with open(path, encoding="utf-8") as stream:
            manifest = json.load(stream)
    except FileNotFoundError:
        raise BundleError(
            f"there is no {path}: no bundle, or one that was not finished or not copied whole"
        ) from None
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise BundleError(f"{path} has format {found}, expected {FORMAT}")
    return manifest


def problems(folder, version, locks, target):
    """Return a sentence (str) for each reason why locks cannot be installed from a bundle; [] if they can.

    version: of the engine, "" for any; locks: {name: expected sha256 of the lock}; target: the machine to
    install on. Reads every wheel of these locks.
    """
    try:
        manifest = read(folder)
    except BundleError as error:
        return [str(error)]
    said = []
    if version and manifest["version"] != version:
        said.append(f"it holds SGLang {manifest['version']}, expected {version}")
    made = manifest["target"]
    for what in ("python", "machine"):
        if made[what] != target[what]:
            said.append(f"it is for {what} {made[what]}, this node has {target[what]}")
    if _numbers(made["glibc"]) > _numbers(target["glibc"]):
        said.append(f"it is for glibc {made['glibc']} or newer, this node has {target['glibc']}")
    if said:
        return said
    for lock, digest in sorted(locks.items()):
        found = manifest["locks"].get(lock)
        if found is None or found["sha256"] != digest:
            said.append(
                f"it was made from another lock of the {lock} (sha256 {found and found['sha256']}), "
                f"expected {digest}"
            )
            continue
        said += _damage(os.path.join(folder, WHEELS), found["files"])
    return said


def _numbers(version):
    return [int(part) for part in version.split(".")]


def _damage(wheels, files):
    for name, digest in sorted(files.items()):
        path = os.path.join(wheels, name)
        if not os.path.isfile(path):
            yield f"{WHEELS}/{name} is missing"
            continue
        found = sha256(path)
        if found != digest:
            yield (
                f"{WHEELS}/{name} is damaged: found sha256 {found} ({os.path.getsize(path)} bytes), "
                f"expected {digest}"
            )
