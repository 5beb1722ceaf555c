"""Build a node below a folder: programs that replay captured output, and the files that go with them."""

import copy
import json
import pathlib
import stat
import subprocess
import xml.etree.ElementTree as ElementTree

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
RULES_FILE = ROOT / "roles/gpu_node/vars/main/rules.yml"
RULES = yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))["__gpu_node_rules"]
DATA = pathlib.Path(__file__).resolve().parent / "data" / "gpu"
NODES = yaml.safe_load((DATA / "nodes.yml").read_text(encoding="utf-8"))
MERGED = ("every", "only")


def describe(name):
    """Return a derived node with all that it takes from the node it is like."""
    node = NODES[name]
    if "like" not in node:
        return {"only": {}, **node}
    base = {key: value for key, value in describe(node["like"]).items() if key not in ("failed", "warning")}
    merged = {key: {**base.get(key, {}), **node.get(key, {})} for key in MERGED}
    return {**base, **node, **merged}


def set_field(gpu, path, value):
    element = gpu.find(path)
    assert element is not None, f"the capture has no field {path}"
    element.text = value


def derive_xml(node):
    """Return the XML and the compute capabilities (CSV) of a derived node."""
    root = ElementTree.parse(DATA / "h200x2" / "nvidia-smi-q.xml").getroot()
    board = root.find("gpu")
    for gpu in root.findall("gpu"):
        root.remove(gpu)
    root.find("driver_version").text = node["module"]
    rows = ["pci.bus_id, compute_cap"]
    for number in range(node["gpus"]):
        if number in node.get("without", []):
            continue
        gpu = copy.deepcopy(board)
        bus = f"00000000:{0x1B + 16 * number:02X}:00.0"
        gpu.set("id", bus)
        set_field(gpu, "uuid", f"GPU-00000000-0000-0000-0000-{number:012d}")
        for path, value in {**node["every"], **node["only"].get(number, {})}.items():
            set_field(gpu, path, value)
        for pid, name, memory, _unit in node.get("processes", {}).get(number, []):
            entry = ElementTree.SubElement(gpu.find("processes"), "process_info")
            fields = {"pid": str(pid), "type": "C", "process_name": name, "used_memory": f"{memory} MiB"}
            for tag, text in fields.items():
                ElementTree.SubElement(entry, tag).text = text
        root.append(gpu)
        rows.append(f"{bus}, {node['capability']}")
    root.find("attached_gpus").text = str(len(rows) - 1)
    return ElementTree.tostring(root, encoding="unicode"), "\n".join(rows) + "\n"


def derive_topology(node):
    count = node["gpus"] - len(node.get("without", []))
    other = node.get("links", {})

    def link(row, column):
        return " X " if row == column else other.get(row) or other.get(column) or node["link"]

    head = "\t" + "\t".join(f"GPU{number}" for number in range(count)) + "\tCPU Affinity"
    rows = [
        "\t".join([f"GPU{row}", *(link(row, column) for column in range(count)), "0-31"])
        for row in range(count)
    ]
    return "\n".join([head, *rows, "", "Legend:", ""])


def write(root, path, text=""):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def program(root, path, script):
    file = write(root, path, "#!/bin/sh\n" + script)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def stand_in_smi(root, xml, csv, topology, status=0):
    for name, text in (("q.xml", xml), ("query.csv", csv), ("topo.txt", topology)):
        write(root, f"replay/{name}", text)
    program(
        root,
        "usr/bin/nvidia-smi",
        f'[ {status} = 0 ] || exit {status}\ncd {root}/replay\ncase "$1" in\n'
        "-q) exec cat q.xml ;;\n--query-gpu*) exec cat query.csv ;;\n"
        "topo) exec cat topo.txt ;;\nesac\nexit 2\n",
    )


def package(name, version, wanted="install"):
    return f"Package: {name}\nStatus: {wanted} ok installed\nVersion: {version}\n\n"


def build_host(root):
    """Lay out a sound Debian host without any NVIDIA software."""
    write(
        root, "etc/os-release", 'ID=debian\nVERSION_ID="12"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n'
    )
    write(root, "proc/1/comm", "systemd\n")
    write(root, "proc/meminfo", "MemTotal:       2113929216 kB\nMemAvailable:   2000000000 kB\n")
    write(root, "proc/cpuinfo", "processor\t: 0\n\nprocessor\t: 1\n")
    write(root, "proc/cmdline", "root=/dev/sda1 ro\n")
    write(root, "proc/sys/fs/nr_open", "1048576\n")
    write(root, "proc/sys/kernel/numa_balancing", "0\n")
    write(root, "proc/sys/kernel/osrelease", "6.1.0-41-amd64\n")
    write(root, "sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
    write(root, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n")
    write(root, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    write(root, "run/systemd/timesync/synchronized")
    write(root, "var/lib/dpkg/status", package("unattended-upgrades", "2.9.1"))
    (root / "dev/shm").mkdir(parents=True)
    for path in ("usr/bin/g++", "usr/local/cuda/bin/nvcc"):
        program(root, path, "exit 0\n")
    return root


def build_node(root, name):
    """Lay out the derived node `name`; returns its description."""
    node = describe(name)
    build_host(root)
    if node.get("smi", 0) is not None:
        stand_in_smi(root, *derive_xml(node), derive_topology(node), node.get("smi", 0))
    if node["module"]:
        write(root, "sys/module/nvidia/version", node["module"] + "\n")
    if node.get("ib_umad", True) and node["module"]:
        (root / "sys/module/ib_umad").mkdir(parents=True)
    packages = package("unattended-upgrades", "2.9.1")
    wanted = "hold" if node.get("held", True) else "install"
    if node["library"]:
        write(root, f"usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{node['library']}")
        packages += package("libnvidia-compute", node["library"] + "-0ubuntu1", wanted)
    if node["manager"]:
        packages += package("nvidia-fabricmanager", node["manager"] + "-1", wanted)
    write(root, "var/lib/dpkg/status", packages)
    records = "".join(json.dumps({"MESSAGE": message}) + "\n" for message in node.get("kernel_log", []))
    write(root, "replay/journal", records)
    program(root, "usr/bin/journalctl", f"exec cat {root}/replay/journal\n")
    for processes in node.get("processes", {}).values():
        for pid, _name, _memory, unit in processes:
            write(root, f"proc/{pid}/cgroup", f"0::/system.slice/{unit}\n")
    return node


def run_command(arguments):
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr
