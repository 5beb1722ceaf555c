# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Read what nvidia-smi says in its machine formats: XML, CSV, and the matrix of the topology."""

from __future__ import annotations

import csv
import re
import xml.etree.ElementTree as ElementTree

# What nvidia-smi writes in place of a value that a board does not have, or that cannot be read any more.
_NOTHING = {
    "",
    "n/a",
    "none",
    "not supported",
    "not available",
    "unknown error",
    "gpu is lost",
    "err!",
    "requested functionality has been deprecated",
}

# Exit statuses of nvidia-smi, as its manual names them.
STATUSES = {
    2: "an argument is not supported by this nvidia-smi",
    4: "no permission to ask the driver",
    6: "no GPU was found",
    8: "a power cable is missing",
    9: "the driver is not loaded",
    10: "an interrupt of a GPU is broken",
    12: "the library libnvidia-ml.so cannot be found or loaded",
    14: "an infoROM is corrupt",
    15: "a GPU has fallen off the bus or cannot be reached",
    18: "the loaded module is of another version than the library",
    255: "an internal error of the driver",
}

# Columns that the XML does not have.
QUERY = ("pci.bus_id", "compute_cap")


class SmiError(Exception):
    """What was read is not what nvidia-smi writes; the message says what is wrong with it."""


def _value(element, path):
    """Return the text below `element` at `path`, None where the board has no such value."""
    text = (element.findtext(path) or "").strip()
    return None if text.strip("[]").lower() in _NOTHING else text


def _number(element, path):
    """Return the leading integer of a text such as `143771 MiB` or `16x`, None without one."""
    found = re.match(r"-?\d+", _value(element, path) or "")
    return int(found.group()) if found else None


def _flag(element, path):
    """Return True for Yes and Enabled, False for No and Disabled, None for anything else."""
    return {"yes": True, "enabled": True, "no": False, "disabled": False}.get(
        (_value(element, path) or "").lower()
    )


def _sum(element, *paths):
    numbers = [number for number in (_number(element, path) for path in paths) if number is not None]
    return sum(numbers) if numbers else None


def _processes(gpu):
    return [
        {
            "pid": _number(entry, "pid"),
            "name": _value(entry, "process_name"),
            "memory_mib": _number(entry, "used_memory"),
        }
        for entry in gpu.findall("processes/process_info")
    ]


def _fabric(gpu):
    """Return the state of the NVLink fabric; `outcome` is state and status, None on a board without one."""
    state, status = _value(gpu, "fabric/state"), _value(gpu, "fabric/status")
    return {
        "state": state,
        "status": status,
        "health": _value(gpu, "fabric/health/summary"),
        "outcome": ", ".join(part for part in (state, status) if part) or None,
    }


def _gpu(index, gpu):
    uncorrectable = ("sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable")
    recovery = (gpu.findtext("gpu_recovery_action") or "").strip()
    return {
        "index": index,
        "bus_id": gpu.get("id"),
        "uuid": _value(gpu, "uuid"),
        "name": _value(gpu, "product_name"),
        "architecture": _value(gpu, "product_architecture"),
        "compute_capability": None,
        "memory_total_mib": _number(gpu, "fb_memory_usage/total"),
        "memory_used_mib": _number(gpu, "fb_memory_usage/used"),
        "persistence": _flag(gpu, "persistence_mode"),
        "mig": _flag(gpu, "mig_mode/current_mig"),
        "mig_pending": _flag(gpu, "mig_mode/pending_mig"),
        "compute_mode": _value(gpu, "compute_mode"),
        # Here "None" is a value: nothing has to be done.
        "recovery_action": recovery if recovery not in ("", "N/A") else None,
        "ecc": {
            "enabled": _flag(gpu, "ecc_mode/current_ecc"),
            "volatile_uncorrectable": _sum(gpu, *("ecc_errors/volatile/" + name for name in uncorrectable)),
            "aggregate_uncorrectable": _sum(gpu, *("ecc_errors/aggregate/" + name for name in uncorrectable)),
            "sram_threshold_exceeded": _flag(gpu, "ecc_errors/aggregate/sram_threshold_exceeded"),
            "channel_repair_pending": _flag(gpu, "ecc_errors/channel_repair_pending"),
            "tpc_repair_pending": _flag(gpu, "ecc_errors/tpc_repair_pending"),
            "unrepairable_memory": _flag(gpu, "ecc_errors/unrepairable_memory"),
        },
        "rows": {
            "pending": _flag(gpu, "remapped_rows/remapped_row_pending"),
            "failure": _flag(gpu, "remapped_rows/remapped_row_failure"),
            "uncorrectable": _number(gpu, "remapped_rows/remapped_row_unc"),
        },
        # Boards that remap rows have none of these.
        "retired_pages": {
            "pending": _flag(gpu, "retired_pages/pending_retirement"),
            "single_bit": _number(gpu, "retired_pages/multiple_single_bit_retirement/retired_count"),
            "double_bit": _number(gpu, "retired_pages/double_bit_retirement/retired_count"),
        },
        "pcie": {
            "generation": _number(gpu, "pci/pci_gpu_link_info/pcie_gen/current_link_gen"),
            "generation_max": _number(gpu, "pci/pci_gpu_link_info/pcie_gen/max_link_gen"),
            "width": _number(gpu, "pci/pci_gpu_link_info/link_widths/current_link_width"),
            "width_max": _number(gpu, "pci/pci_gpu_link_info/link_widths/max_link_width"),
        },
        "fabric": _fabric(gpu),
        "processes": _processes(gpu),
    }


def read_xml(text):
    """Read the output of `nvidia-smi -q -x`.

    Returns ``{"driver_version": str, "cuda_version": str, "gpus": [dict]}``, memory in MiB; a value that the
    board does not have is None. Raises SmiError for anything that is not such an output.
    """
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise SmiError(f"nvidia-smi -q -x wrote something that is not XML: {error}") from None
    if root.tag != "nvidia_smi_log":
        raise SmiError(f"nvidia-smi -q -x wrote <{root.tag}>, expected <nvidia_smi_log>")
    return {
        "driver_version": _value(root, "driver_version"),
        "cuda_version": _value(root, "cuda_version"),
        "gpus": [_gpu(index, gpu) for index, gpu in enumerate(root.findall("gpu"))],
    }


def read_query(text):
    """Read the output of `nvidia-smi --query-gpu=... --format=csv`, whose first line names the columns.

    Returns one dict a GPU; units go from the names, and values that the board does not have are None.
    """
    rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]
    if not rows:
        return []
    names = [re.sub(r" \[\w+\]$", "", name.strip()) for name in rows[0]]
    return [
        {
            name: None if value.strip().strip("[]").lower() in _NOTHING else value.strip()
            for name, value in zip(names, row)
        }
        for row in rows[1:]
    ]


def read_topology(text):
    """Read the matrix of `nvidia-smi topo -m`, which has no machine format.

    Returns how two GPUs reach each other as ``{"NV18": 28, ...}``: link kinds and the number of pairs.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split("\t") for line in text.splitlines() if re.match(r"GPU\d+\t", line)]
    kinds = {}
    for number, row in enumerate(rows):
        for cell in row[1 : number + 1]:
            kind = cell.strip()
            kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def count_nvlinks(kinds):
    """Return the NVLinks between those two GPUs that have the fewest: 18 for ``{"NV18": 28}``.

    kinds: as read_topology returns them. 0 if two GPUs have none between them; None for fewer than two GPUs.
    """
    found = [re.fullmatch(r"NV(\d+)", kind) for kind in kinds]
    return min((int(link.group(1)) if link else 0 for link in found), default=None)
