# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Read dpkg's database."""

from __future__ import annotations

import re


def read_status(text):
    """Read /var/lib/dpkg/status.

    Returns the installed packages as ``{name: {"version": str, "held": bool}}``.
    """
    packages = {}
    for paragraph in text.split("\n\n"):
        name = re.search(r"^Package: (.+)$", paragraph, re.MULTILINE)
        status = re.search(r"^Status: (\S+) \S+ (\S+)$", paragraph, re.MULTILINE)
        version = re.search(r"^Version: (.+)$", paragraph, re.MULTILINE)
        if name and version and status and status.group(2) == "installed":
            packages[name.group(1)] = {"version": version.group(1), "held": status.group(1) == "hold"}
    return packages


def upstream_version(version):
    """Return a Debian version without epoch and revision: 1:580.95.05-0ubuntu1 is 580.95.05."""
    return version.split(":", 1)[-1].rsplit("-", 1)[0]


def driver_packages(packages):
    """Return the names of the installed packages that make up the NVIDIA driver stack."""
    pattern = re.compile(
        r"(cuda-drivers|nvlink5|nvlsm|libcuda1|libcudadebugger1|libnvcuvid|libnvoptix|libnvsdm|firmware-nvidia"
        r"|nvidia-(open|driver|dkms|kernel|utils|compute|fabricmanager|persistenced|smi|firmware|imex|modprobe)"
        r"|libnvidia-(?!container)|xserver-xorg-video-nvidia)"
    )
    return sorted(name for name in packages if pattern.match(name))
