# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The GPUs of a node and the software that stands between them and a program."""

from __future__ import annotations

import re

from ansible.module_utils.sglang_kit.gpu_smi import (
    QUERY,
    STATUSES,
    SmiError,
    count_nvlinks,
    read_query,
    read_topology,
    read_xml,
)
from ansible.module_utils.sglang_kit.node_facts import owner_of, unit_of
from ansible.module_utils.sglang_kit.node_packages import driver_packages, upstream_version

LIBRARIES = (
    "/usr/lib/*-linux-gnu/libnvidia-ml.so.*.*",
    "/usr/lib64/libnvidia-ml.so.*.*",
    "/usr/local/nvidia/lib64/libnvidia-ml.so.*.*",
)
SMI_FOLDERS = ("usr/local/nvidia/bin",)
_FABRIC_MANAGER = re.compile(r"(cuda-drivers-fabricmanager|nvidia-fabricmanager)(-\d+)?$")


def module_version(source):
    """Return the version of the loaded kernel module, None if none is loaded."""
    version = (source.read("sys/module/nvidia/version") or "").strip()
    if version:
        return version
    found = re.search(
        r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", source.read("proc/driver/nvidia/version") or ""
    )
    return found.group(1) if found else None


def library_versions(source):
    """Return the versions of the libnvidia-ml that are installed, from their file names."""
    names = (path.rsplit(".so.", 1)[1] for pattern in LIBRARIES for path in source.match(pattern))
    return sorted({name for name in names if re.fullmatch(r"\d+(\.\d+)+", name)})


def fabric_manager_version(packages):
    """Return the version of the installed fabric manager, None if no package has it."""
    versions = [packages[name]["version"] for name in packages if _FABRIC_MANAGER.match(name)]
    return upstream_version(versions[0]) if versions else None


def _ask(source, program):
    """Return the GPUs, what the driver says of itself, and the topology."""
    rc, out, _err = source.run([program, "-q", "-x"])
    smi = {"path": program, "status": rc, "meaning": STATUSES.get(rc) if rc else None, "fault": None}
    if rc:
        return [], {"smi": smi, "cuda_version": None}, {}
    try:
        log = read_xml(out)
    except SmiError as error:
        smi["fault"] = str(error)
        return [], {"smi": smi, "cuda_version": None}, {}
    status, table, _err = source.run([program, "--query-gpu=" + ",".join(QUERY), "--format=csv"])
    rows = read_query(table) if status == 0 else []
    capabilities = {row["pci.bus_id"]: row["compute_cap"] for row in rows}
    for gpu in log["gpus"]:
        gpu["compute_capability"] = capabilities.get(gpu["bus_id"])
    topology = source.run([program, "topo", "-m"]) if len(log["gpus"]) > 1 else (1, "", "")
    pairs = read_topology(topology[1]) if not topology[0] else {}
    return log["gpus"], {"smi": smi, "cuda_version": log["cuda_version"]}, pairs


def _hold(source, gpu, own_unit):
    """Add to each process its unit and user, and to the GPU what others than the own unit hold, in MiB."""
    own = 0
    for process in gpu["processes"]:
        process["unit"] = unit_of(source, process["pid"])
        process["user"] = owner_of(source, process["pid"])
        if process["unit"] == own_unit:
            own += process["memory_mib"] or 0
    own_only = gpu["processes"] and all(process["unit"] == own_unit for process in gpu["processes"])
    used = gpu["memory_used_mib"]
    gpu["held_by_others_mib"] = None if used is None else 0 if own_only else max(used - own, 0)


def read_stack(source, packages, own_unit):
    """Return ``{"gpus", "driver", "fabric", "topology"}`` of a node.

    packages: as `node_packages.read_status` returns them. own_unit: the unit whose processes may hold GPUs.
    A node without any of it has no GPUs, and None for every version.
    """
    program = source.program("nvidia-smi", SMI_FOLDERS)
    nothing = {"path": None, "status": None, "meaning": None, "fault": None}
    gpus, driver, pairs = (
        _ask(source, program) if program else ([], {"smi": nothing, "cuda_version": None}, {})
    )
    for gpu in gpus:
        _hold(source, gpu, own_unit)
    libraries = library_versions(source)
    module = module_version(source)
    stack = driver_packages(packages)
    automatic = "unattended-upgrades" in packages
    driver.update(
        module_version=module,
        # The module's own version among several libraries is the one that programs load.
        library_version=module if module in libraries else libraries[-1] if libraries else None,
        packages={name: packages[name]["version"] for name in stack},
        unheld=[name for name in stack if automatic and not packages[name]["held"]],
    )
    readable = [gpu for gpu in gpus if gpu["memory_total_mib"]]
    return {
        "gpus": gpus,
        "readable_gpus": len(readable),
        "gpu_memory_gib": sum(gpu["memory_total_mib"] for gpu in readable) // 1024,
        "driver": driver,
        "fabric": {
            "manager_version": fabric_manager_version(packages),
            "subnet_manager": upstream_version(packages["nvlsm"]["version"]) if "nvlsm" in packages else None,
            "nvlinks": count_nvlinks(pairs),
        },
        "topology": pairs,
    }
