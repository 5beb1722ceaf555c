# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What a node is, from /proc, /sys, /etc and a few programs, all below one root that tests can set."""

from __future__ import annotations

import ctypes
import glob
import hashlib
import json
import os
import platform
import pwd
import re
import stat
import struct
import sys

PROGRAM_FOLDERS = ("usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin")
_MOUNT_ESCAPE = re.compile(r"\\([0-7]{3})")
_STA_UNSYNC = 0x40
_ACS_CAPABILITY = 0x000D


class Source:
    """Everything that facts are read from.

    root: folder that stands for `/`. run: function of a list of arguments that returns (rc, stdout, stderr),
    such as AnsibleModule.run_command.
    """

    def __init__(self, root, run):
        self.root = root
        self.run = run

    def path(self, *parts):
        """Return the path below the root of an absolute path given in parts."""
        return os.path.join(self.root, os.path.join(*parts).lstrip("/"))

    def read(self, *parts):
        """Return the text of a file, None if it is not there or cannot be read."""
        try:
            with open(self.path(*parts), encoding="utf-8", errors="replace") as source:
                return source.read()
        except OSError:
            return None

    def number(self, *parts):
        """Return the integer that a file begins with, None without one."""
        found = re.match(r"\s*(-?\d+)", self.read(*parts) or "")
        return int(found.group(1)) if found else None

    def match(self, pattern):
        """Return the paths, as seen from the root, that fit an absolute pattern."""
        found = glob.glob(self.path(pattern))
        return sorted("/" + os.path.relpath(path, self.root) for path in found)

    def program(self, name, folders=()):
        """Return the path of a program below the root, None if it is not there."""
        if name.startswith("/"):
            candidates = [self.path(name)]
        else:
            candidates = [self.path(folder, name) for folder in tuple(folders) + PROGRAM_FOLDERS]
        return next((path for path in candidates if os.access(path, os.X_OK) and os.path.isfile(path)), None)

    def block_device(self, uuid):
        """Return `present` or `missing`: whether udev knows a file system with this UUID."""
        return "present" if os.path.exists(self.path("dev/disk/by-uuid", uuid)) else "missing"

    def writable(self, *parts):
        """Tell whether a file is there and lies on a file system that can be written."""
        return os.access(self.path(*parts), os.W_OK)


def mib(size):
    """Return bytes in whole MiB."""
    return size // 1024**2


def gib(size):
    """Return bytes in GiB with one digit."""
    return round(size / 1024**3, 1)


def selected(text):
    """Return the bracketed choice of a kernel file such as `always [madvise] never`."""
    found = re.search(r"\[(\w+)\]", text or "")
    return found.group(1) if found else None


def unit_of(source, pid):
    """Return the systemd unit that a process belongs to, None if it has ended or belongs to none."""
    for line in (source.read("proc", str(pid), "cgroup") or "").splitlines():
        _number, controllers, path = line.split(":", 2)
        if controllers in ("", "name=systemd"):
            units = [part for part in path.split("/") if part.endswith((".service", ".scope"))]
            if units:
                return units[-1]
    return None


def owner_of(source, pid):
    """Return the user that a process runs as (its number if it has no name), None if it has ended."""
    try:
        uid = os.stat(source.path("proc", str(pid))).st_uid
    except OSError:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def read_os(source):
    """Return id, version and the numbers of the system: C library, interpreter, service manager."""
    text = source.read("etc/os-release") or source.read("usr/lib/os-release") or ""
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', text, re.MULTILINE))
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
    return {
        "id": release.get("ID"),
        "version": release.get("VERSION_ID"),
        "release": "{} {}".format(release.get("ID"), release.get("VERSION_ID", "").split(".")[0]),
        "name": release.get("PRETTY_NAME"),
        "architecture": platform.machine(),
        "glibc": libc.split()[-1] if libc else None,
        "python": "{}.{}.{}".format(*sys.version_info[:3]),
        "python_executable": sys.executable,
        "user_id": os.geteuid(),
        "service_manager": (source.read("proc/1/comm") or "").strip() or None,
        "cgroup_version": 2 if os.path.exists(source.path("sys/fs/cgroup/cgroup.controllers")) else 1,
        "container": (source.read("run/systemd/container") or "").strip() or None,
        "reboot_required": os.path.exists(source.path("run/reboot-required")),
    }


def read_kernel(source):
    """Return the running kernel and those that are installed, by their versions."""
    images = [path.rsplit("/vmlinuz-", 1)[1] for path in source.match("/boot/vmlinuz-*")]
    return {
        "release": (source.read("proc/sys/kernel/osrelease") or "").strip() or None,
        "installed": images,
        "command_line": (source.read("proc/cmdline") or "").split(),
        "ib_umad": os.path.isdir(source.path("sys/module/ib_umad")),
    }


def read_memory(source):
    """Return the main memory in MiB, huge pages and the mode of transparent ones."""
    values = dict(re.findall(r"^(\w+): +(\d+)", source.read("proc/meminfo") or "", re.MULTILINE))
    thp = "sys/kernel/mm/transparent_hugepage/enabled"
    return {
        "total_mib": int(values["MemTotal"]) // 1024 if "MemTotal" in values else None,
        "available_mib": int(values["MemAvailable"]) // 1024 if "MemAvailable" in values else None,
        "huge_pages": int(values.get("HugePages_Total", 0)),
        "transparent_huge_pages": selected(source.read(thp)),
        "transparent_huge_pages_writable": source.writable(thp),
    }


def read_limits(source):
    """Return what the kernel allows at most: open files of a process and of all, processes, threads."""
    return {
        "nr_open": source.number("proc/sys/fs/nr_open"),
        "file_max": source.number("proc/sys/fs/file-max"),
        "pid_max": source.number("proc/sys/kernel/pid_max"),
        "threads_max": source.number("proc/sys/kernel/threads-max"),
    }


def read_cpu(source):
    """Return the number of CPUs, NUMA nodes and the frequency governors in use."""
    pattern = "/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor"
    paths = source.match(pattern)
    governors = {(source.read(path) or "").strip() for path in paths}
    return {
        "count": len(re.findall(r"^processor\s*:", source.read("proc/cpuinfo") or "", re.MULTILINE)),
        "numa_balancing": source.number("proc/sys/kernel/numa_balancing"),
        "numa_nodes": len(source.match("/sys/devices/system/node/node[0-9]*")),
        "governors": sorted(governors - {""}),
        "governor_writable": bool(paths) and source.writable(paths[0]),
    }


def _acs_enabled(config):
    """Tell from its configuration space (bytes) whether a PCI device redirects the traffic of its peers.

    None if it has no such capability, or if not all of the configuration space can be read.
    """
    offset = 0x100
    for _step in range(96):
        if offset < 0x100 or offset + 8 > len(config):
            return None
        (header,) = struct.unpack_from("<I", config, offset)
        if header & 0xFFFF == _ACS_CAPABILITY:
            (control,) = struct.unpack_from("<H", config, offset + 6)
            # Request redirect, completion redirect, upstream forwarding: peers then meet in the IOMMU.
            return bool(control & 0b11100)
        offset = header >> 20
    return None


def read_pci(source):
    """Return what stands between the GPUs: how many the bus has, IOMMU, ACS on bridges."""
    gpus, acs = [], []
    for path in source.match("/sys/bus/pci/devices/*"):
        kind = (source.read(path, "class") or "").strip()
        if (source.read(path, "vendor") or "").strip() == "0x10de" and kind.startswith("0x03"):
            gpus.append({"bus_id": os.path.basename(path), "numa_node": source.number(path, "numa_node")})
        if kind.startswith("0x0604"):
            try:
                with open(source.path(path, "config"), "rb") as config:
                    enabled = _acs_enabled(config.read())
            except OSError:
                enabled = None
            if enabled:
                acs.append(os.path.basename(path))
    arguments = (source.read("proc/cmdline") or "").split()
    iommu = bool(source.match("/sys/class/iommu/*"))
    return {
        "gpus": gpus,
        "iommu": ("pass-through" if "iommu=pt" in arguments else "translating") if iommu else "off",
        "acs_bridges": acs,
    }


def read_shm(source):
    """Return size and free space of /dev/shm in MiB, and what dead processes left in it."""
    path = source.path("dev/shm")
    try:
        space = os.statvfs(path)
    except OSError:
        return {"size_mib": None, "free_mib": None, "leftovers": [], "leftovers_mib": 0}
    files = {}
    for name in sorted(os.listdir(path)):
        try:
            entry = os.lstat(os.path.join(path, name))
        except FileNotFoundError:
            continue
        if stat.S_ISREG(entry.st_mode) and re.match(r"(nccl-|psm_|sem\.|torch_|sglang|cuda\.shm)", name):
            files[name] = entry.st_size
    used = _open_below(source, "/dev/shm/") if files else set()
    leftovers = sorted(set(files) - used)
    return {
        "size_mib": mib(space.f_blocks * space.f_frsize),
        "free_mib": mib(space.f_bavail * space.f_frsize),
        "leftovers": leftovers,
        "leftovers_mib": mib(sum(files[name] for name in leftovers)),
    }


def _open_below(source, prefix):
    """Return the names below a folder that processes have open or mapped."""
    names = set()
    for folder in source.match("/proc/[0-9]*"):
        for line in (source.read(folder, "maps") or "").splitlines():
            path = line.partition("/")
            if path[1] and ("/" + path[2]).startswith(prefix):
                names.add(path[2][len(prefix) - 1 :].split(" ")[0])
        for link in glob.glob(source.path(folder, "fd", "*")):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith(prefix):
                names.add(target[len(prefix) :].split(" ")[0])
    return names


def _mounts(source):
    lines = (source.read("proc/self/mounts") or source.read("proc/mounts") or "").splitlines()
    mounts = []
    for line in lines:
        device, point, kind = (
            _MOUNT_ESCAPE.sub(lambda found: chr(int(found.group(1), 8)), field)
            for field in line.split(" ")[:3]
        )
        mounts.append({"device": device, "mount": point, "kind": kind})
    return mounts


def _rotational(source, device):
    """Tell whether a block device turns; None for what is no block device."""
    folder = os.path.realpath(source.path("sys/class/block", os.path.basename(os.path.realpath(device))))
    # The queue of a partition belongs to its disk, one folder above.
    for candidate in (folder, os.path.dirname(folder)):
        try:
            with open(os.path.join(candidate, "queue", "rotational"), encoding="ascii") as flag:
                return flag.read().strip() == "1"
        except OSError:
            continue
    return None


def read_disks(source, folders):
    """Return the file system under each folder, even one not there yet: ``{folder: {...}}``, in GiB."""
    mounts = _mounts(source)
    disks = {}
    for folder in folders:
        existing = folder
        while not os.path.isdir(source.path(existing)) and existing != "/":
            existing = os.path.dirname(existing)
        space = os.statvfs(source.path(existing))
        below = [
            mount
            for mount in mounts
            if existing == mount["mount"] or existing.startswith(mount["mount"].rstrip("/") + "/")
        ]
        mount = max(reversed(below), key=lambda entry: len(entry["mount"]), default={})
        disks[folder] = {
            "free_gib": gib(space.f_bavail * space.f_frsize),
            "total_gib": gib(space.f_blocks * space.f_frsize),
            "mount": mount.get("mount"),
            "device": mount.get("device"),
            "kind": mount.get("kind"),
            "rotational": _rotational(source, mount["device"]) if mount.get("device") else None,
        }
    return disks


def read_ports(source, ports):
    """Return who listens on each TCP port: ``{port: {"pid", "unit"}}``; the unit `nobody` is a free port."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in (source.read("proc/net", table) or "").splitlines()[1:]:
            fields = line.split()
            port = int(fields[1].rsplit(":", 1)[1], 16)
            if fields[3] == "0A" and port in ports:
                sockets[f"socket:[{fields[9]}]"] = port
    found = {str(port): {"pid": None, "unit": "nobody"} for port in ports}
    for port in sockets.values():
        found[str(port)] = {"pid": None, "unit": "no unit"}
    for folder in source.match("/proc/[0-9]*") if sockets else []:
        for link in glob.glob(source.path(folder, "fd", "*")):
            try:
                port = sockets.get(os.readlink(link))
            except OSError:
                continue
            if port is not None:
                pid = int(os.path.basename(folder))
                found[str(port)] = {"pid": pid, "unit": unit_of(source, pid) or "no unit"}
    return found


def read_time(source):
    """Tell whether the kernel's clock is kept in step; None below a root that is not the system's own."""
    if os.path.exists(source.path("run/systemd/timesync/synchronized")):
        return {"synchronised": True}
    if source.root != "/":
        return {"synchronised": None}
    buffer = ctypes.create_string_buffer(512)
    ctypes.CDLL(None).adjtimex(buffer)
    # struct timex: unsigned int modes, three longs, int status.
    status = struct.unpack_from("@I4xqqqqi", buffer.raw)[5]
    return {"synchronised": not status & _STA_UNSYNC}


def read_sysctl(source, names):
    """Return ``{name: {"value": str, "writable": bool}}`` of the kernel settings that are there."""
    found = {}
    for name in names:
        path = os.path.join("proc/sys", name.replace(".", "/"))
        value = source.read(path)
        if value is not None:
            found[name] = {"value": " ".join(value.split()), "writable": source.writable(path)}
    return found


def read_interpreters(source, paths):
    """Return the version of each Python interpreter, None for one that does not run."""
    found = {}
    for path in paths:
        found[path] = None
        program = source.program(path)
        if program:
            rc, out, _err = source.run([program, "-c", "import platform; print(platform.python_version())"])
            found[path] = out.strip() if rc == 0 else None
    return found


def read_tools(source, names, folders):
    """Return the path of each program, None where it is not there."""
    return {name: source.program(name, folders) for name in names}


def read_xids(source):
    """Return the Xid messages of the kernel since it booted: ``[{"xid": int, "pci": str}]``, once each."""
    program = source.program("journalctl")
    if program is None:
        return []
    rc, out, _err = source.run(
        [program, "--dmesg", "--boot", "--output=json", "--output-fields=MESSAGE", "--grep=NVRM: Xid"]
    )
    found = []
    for line in out.splitlines() if rc == 0 else []:
        message = json.loads(line).get("MESSAGE")
        parts = re.match(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", message or "")
        entry = {"xid": int(parts.group(2)), "pci": parts.group(1)} if parts else None
        if entry and entry not in found:
            found.append(entry)
    return found


def read_files(source, paths):
    """Return kind, owner, mode and SHA-256 of each path; None for what is not there."""
    found = {}
    for path in paths:
        try:
            entry = os.lstat(source.path(path))
        except OSError:
            found[path] = None
            continue
        content = None
        if stat.S_ISREG(entry.st_mode):
            with open(source.path(path), "rb") as opened:
                content = hashlib.sha256(opened.read()).hexdigest()
        found[path] = {
            "kind": "directory" if stat.S_ISDIR(entry.st_mode) else "file" if content else "other",
            "uid": entry.st_uid,
            "gid": entry.st_gid,
            "mode": f"{stat.S_IMODE(entry.st_mode):04o}",
            "sha256": content,
        }
    return found


def read_accounts(source, user, group):
    """Return ids and shell of a user and a group in the local databases, None where they are not there."""
    accounts = {"user": None, "group": None}
    for line in (source.read("etc/passwd") or "").splitlines():
        fields = line.split(":")
        if fields[0] == user and len(fields) == 7:
            uid, gid = int(fields[2]), int(fields[3])
            accounts["user"] = {"uid": uid, "gid": gid, "home": fields[5], "shell": fields[6]}
    for line in (source.read("etc/group") or "").splitlines():
        fields = line.split(":")
        if fields[0] == group and len(fields) == 4:
            accounts["group"] = {"gid": int(fields[2])}
    return accounts
