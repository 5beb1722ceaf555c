"""What a node is, from files laid out below a folder."""

import struct

import gpu_nodes
import pytest
from ansible.module_utils.sglang_kit import node_facts
from ansible.module_utils.sglang_kit.node_packages import driver_packages, read_status, upstream_version


@pytest.fixture
def source(tmp_path):
    return node_facts.Source(str(tmp_path), gpu_nodes.run_command)


def test_installed_packages_and_those_on_hold():
    text = (
        gpu_nodes.package("nvidia-open", "580.159.04-1", "hold")
        + gpu_nodes.package("bash", "5.2")
        + "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n\n"
    )
    packages = read_status(text)
    assert packages == {
        "nvidia-open": {"version": "580.159.04-1", "held": True},
        "bash": {"version": "5.2", "held": False},
    }
    assert driver_packages(packages) == ["nvidia-open"]


def test_packages_of_the_driver_under_the_names_of_each_system():
    # Of the index of ubuntu2204 (580.65.06), and of Debian's own packages.
    ours = [
        "libcuda1",
        "libnvidia-cfg1-580",
        "libnvidia-ml1",
        "nvidia-dkms-580",
        "nvidia-fabricmanager-570",
        "nvlsm",
    ]
    ours += ["nvidia-modprobe", "nvidia-persistenced", "xserver-xorg-video-nvidia-580"]
    others = ["libnvidia-container1", "nvidia-container-toolkit", "cuda-toolkit-13-0", "linux-image-amd64"]
    assert driver_packages(dict.fromkeys(ours + others)) == sorted(ours)


@pytest.mark.parametrize(
    ("version", "upstream"),
    [("580.159.04-1", "580.159.04"), ("1:580.95.05-0ubuntu1", "580.95.05"), ("2025.06.11", "2025.06.11")],
)
def test_version_without_epoch_and_revision(version, upstream):
    assert upstream_version(version) == upstream


@pytest.mark.parametrize(
    ("group", "unit"),
    [
        ("0::/system.slice/sglang.service\n", "sglang.service"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", "session-3.scope"),
        ("4:memory:/x\n1:name=systemd:/system.slice/nginx.service\n", "nginx.service"),
        ("0::/\n", None),
    ],
)
def test_unit_of_a_process(source, tmp_path, group, unit):
    gpu_nodes.write(tmp_path, "proc/7/cgroup", group)
    assert node_facts.unit_of(source, 7) == unit
    assert node_facts.unit_of(source, 8) is None


def config_space(control):
    """A PCI configuration space with an extended capability, then ACS with this control register."""
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x0001 | 1 << 16 | 0x148 << 20)
    struct.pack_into("<IHH", space, 0x148, 0x000D | 1 << 16, 0x1F, control)
    return bytes(space)


@pytest.mark.parametrize(("control", "found"), [(0x1D, ["0000:00:01.0"]), (0x01, []), (None, [])])
def test_bridges_that_send_peers_through_the_cpu(source, tmp_path, control, found):
    device = "sys/bus/pci/devices/0000:00:01.0"
    gpu_nodes.write(tmp_path, f"{device}/class", "0x060400\n")
    gpu_nodes.write(tmp_path, f"{device}/vendor", "0x1022\n")
    # Without privileges only the first 64 bytes can be read.
    space = bytes(64) if control is None else config_space(control)
    (tmp_path / device / "config").write_bytes(space)
    gpu_nodes.write(tmp_path, "sys/bus/pci/devices/0000:1b:00.0/class", "0x030200\n")
    gpu_nodes.write(tmp_path, "sys/bus/pci/devices/0000:1b:00.0/vendor", "0x10de\n")
    gpu_nodes.write(tmp_path, "sys/bus/pci/devices/0000:1b:00.0/numa_node", "1\n")
    pci = node_facts.read_pci(source)
    assert pci["acs_bridges"] == found
    assert pci["gpus"] == [{"bus_id": "0000:1b:00.0", "numa_node": 1}]


@pytest.mark.parametrize(
    ("devices", "arguments", "mode"),
    [([], "ro", "off"), (["dmar0"], "ro", "translating"), (["dmar0"], "ro iommu=pt", "pass-through")],
)
def test_iommu(source, tmp_path, devices, arguments, mode):
    gpu_nodes.write(tmp_path, "proc/cmdline", arguments)
    for name in devices:
        (tmp_path / "sys/class/iommu" / name).mkdir(parents=True)
    assert node_facts.read_pci(source)["iommu"] == mode


def test_segments_that_dead_processes_left(source, tmp_path):
    for name in ("nccl-dead", "psm_used", "mapped-by-someone-else"):
        gpu_nodes.write(tmp_path, f"dev/shm/{name}", "x" * 2048)
    gpu_nodes.write(tmp_path, "proc/5/maps", "7f00-7f01 rw-s 00000000 00:19 3 /dev/shm/psm_used\n")
    assert node_facts.read_shm(source)["leftovers"] == ["nccl-dead"]


def test_disk_of_a_folder_that_is_not_there_yet(source, tmp_path):
    (tmp_path / "srv").mkdir()
    gpu_nodes.write(
        tmp_path,
        "proc/self/mounts",
        "/dev/sda1 / ext4 rw 0 0\n/dev/nvme0n1p1 /srv xfs rw 0 0\ntmpfs /srv\\040x tmpfs rw 0 0\n",
    )
    disk = node_facts.read_disks(source, ["/srv/models/deep"])["/srv/models/deep"]
    assert (disk["mount"], disk["device"], disk["kind"]) == ("/srv", "/dev/nvme0n1p1", "xfs")
    assert disk["free_gib"] > 0


@pytest.mark.parametrize(("flag", "turns"), [("1\n", True), ("0\n", False)])
def test_a_partition_turns_if_its_disk_does(source, tmp_path, flag, turns):
    gpu_nodes.write(tmp_path, "sys/devices/pci/block/sda/queue/rotational", flag)
    (tmp_path / "sys/devices/pci/block/sda/sda1").mkdir()
    (tmp_path / "sys/class/block").mkdir(parents=True)
    (tmp_path / "sys/class/block/sda1").symlink_to("../../devices/pci/block/sda/sda1")
    gpu_nodes.write(tmp_path, "proc/self/mounts", "/dev/sda1 / ext4 rw 0 0\n")
    assert node_facts.read_disks(source, ["/"])["/"]["rotational"] is turns


def test_kernel_settings_that_are_there(source, tmp_path):
    gpu_nodes.write(tmp_path, "proc/sys/vm/swappiness", "60\n")
    found = node_facts.read_sysctl(source, ["vm.swappiness", "vm.nothing"])
    assert found == {"vm.swappiness": {"value": "60", "writable": True}}


def test_files_and_folders(source, tmp_path):
    gpu_nodes.write(tmp_path, "etc/a", "hello\n").chmod(0o640)
    found = node_facts.read_files(source, ["/etc/a", "/etc", "/etc/b"])
    assert found["/etc/b"] is None
    assert (found["/etc"]["kind"], found["/etc"]["sha256"]) == ("directory", None)
    assert (found["/etc/a"]["kind"], found["/etc/a"]["mode"]) == ("file", "0640")
    # sha256sum of "hello" and a newline.
    assert found["/etc/a"]["sha256"].startswith("5891b5b522d5df086d0ff0b110fbd9d2")


def test_accounts(source, tmp_path):
    gpu_nodes.write(
        tmp_path, "etc/passwd", "root:x:0:0::/root:/bin/sh\nsglang:x:990:980::/none:/usr/sbin/nologin\n"
    )
    gpu_nodes.write(tmp_path, "etc/group", "sglang:x:980:\n")
    assert node_facts.read_accounts(source, "sglang", "sglang") == {
        "user": {"uid": 990, "gid": 980, "home": "/none", "shell": "/usr/sbin/nologin"},
        "group": {"gid": 980},
    }


def test_xids_are_told_once_and_other_words_are_not_taken_for_them(source, tmp_path):
    records = [
        "NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:1b:00): 79, pid=2, GPU has fallen off the bus.",
        "nvidia: see NVRM: Xid (PCI:0000:1b:00): 48",
    ]
    lines = "".join(f'{{"MESSAGE": "{text}"}}\n' for text in records)
    gpu_nodes.write(tmp_path, "replay/journal", lines)
    gpu_nodes.program(tmp_path, "usr/bin/journalctl", f"exec cat {tmp_path}/replay/journal\n")
    assert node_facts.read_xids(source) == [{"xid": 79, "pci": "0000:1b:00"}]


def test_clock_of_a_laid_out_node(source, tmp_path):
    assert node_facts.read_time(source) == {"synchronised": None}
    gpu_nodes.write(tmp_path, "run/systemd/timesync/synchronized")
    assert node_facts.read_time(source) == {"synchronised": True}


def test_clock_of_this_machine_is_known():
    assert node_facts.read_time(node_facts.Source("/", gpu_nodes.run_command))["synchronised"] in (
        True,
        False,
    )
