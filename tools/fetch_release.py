#!/usr/bin/env python3
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Fetch the sources of published SGLang releases into a cache, without installing them.

``fetch_release.py 0.5.23`` downloads that release's wheel with the pip of this interpreter, keeps its serving
sources and metadata under ``.cache/releases/<version>/``, and prints where they are as JSON. A release that
is in the cache already is not asked for again. ``fetch_release.py --list`` prints the published versions,
oldest first.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "module_utils"))
from sglang_kit.releases_facts import VersionError, version_key

CACHE = ROOT / ".cache" / "releases"
PACKAGE = "sglang"
# What the engine's nodes can install, whatever machine and Python this runs on.
TARGET = ["--only-binary", ":all:", "--python-version", "3.12"]
for _glibc in (17, 28, 34, 35, 39):
    TARGET += ["--platform", f"manylinux_2_{_glibc}_x86_64"]


class FetchError(Exception):
    """A release could not be had; the message says why and what to do."""


def _pip(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", *TARGET]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _last_errors(stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR")] or stderr.splitlines()
    return " ".join(line[:200] for line in errors[-2:])


def published() -> list[str]:
    """Return the versions that the package registry offers, oldest first; FetchError if it is silent."""
    answer = _pip("index", "versions", PACKAGE)
    found = re.search(r"^Available versions: (.+)$", answer.stdout, re.MULTILINE)
    if answer.returncode or not found:
        raise FetchError(
            f"the package registry could not be asked for the versions of {PACKAGE}: "
            f"{_last_errors(answer.stderr)}. Check that `pip index versions {PACKAGE}` "
            "works here (proxy, certificates, pip configuration)."
        )
    return sorted(found.group(1).split(", "), key=version_key)


def _unpack(wheel: pathlib.Path, into: pathlib.Path) -> None:
    """Keep the server's Python sources and the metadata: the rest of a wheel is of no use to a reader."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if re.fullmatch(r"sglang/(srt/.*|[^/]*)\.py|[^/]*\.dist-info/(METADATA|WHEEL)", name):
                archive.extract(name, into)


def fetch(version: str, cache: pathlib.Path = CACHE) -> dict:
    """Make sure that a release lies in the cache.

    Returns ``{"version", "tree", "metadata", "fetched"}``: the package folder (``.../sglang``), the METADATA
    file, and whether it had to be downloaded. Raises FetchError with what to do where it cannot be had.
    """
    try:
        version_key(version)
    except VersionError as error:
        raise FetchError(str(error)) from error
    place = cache / version
    fetched = not place.is_dir()
    if fetched:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=str(cache), prefix=f".{version}-") as work:
            wheels, tree = pathlib.Path(work, "wheel"), pathlib.Path(work, "tree")
            answer = _pip("download", "--quiet", "--no-deps", "--dest", str(wheels), f"{PACKAGE}=={version}")
            if answer.returncode:
                known = published()  # raises with its own message where the registry is the trouble
                if version not in known:
                    raise FetchError(
                        "SGLang {} is not published. The newest releases are {}.".format(
                            version, ", ".join(known[-5:])
                        )
                    )
                raise FetchError(f"SGLang {version} could not be downloaded: {_last_errors(answer.stderr)}")
            _unpack(next(wheels.glob("*.whl")), tree)
            try:
                tree.rename(place)
            except OSError:
                # Another run was faster; what it made is the same.
                if not place.is_dir():
                    raise
    metadata = next(place.glob("*.dist-info/METADATA"))
    return {
        "version": version,
        "tree": str(place / PACKAGE),
        "metadata": str(metadata),
        "fetched": fetched,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", nargs="*", help="exact release numbers, for example 0.5.23")
    parser.add_argument("--list", action="store_true", help="print the published versions and fetch nothing")
    parser.add_argument("--cache", type=pathlib.Path, default=CACHE, help="folder of the cache (%(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.list == bool(arguments.version):
        parser.error("give either versions or --list")
    try:
        if arguments.list:
            json.dump(published(), sys.stdout)
        else:
            json.dump([fetch(version, arguments.cache) for version in arguments.version], sys.stdout)
    except FetchError as error:
        print(error, file=sys.stderr)
        return 1
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
