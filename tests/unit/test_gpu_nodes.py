"""Sound and broken nodes, replayed whole: each gives exactly its findings, with the remedy."""

import gpu_facts
import gpu_nodes
import pytest
import yaml
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit import node_facts, node_rules
from ansible.module_utils.testing import patch_module_args

CAPABILITY = {"sm100": "10.0", "sm103": "10.3", "sm120": "12.0"}


def values(profile):
    return {
        "systems": ["debian 12", "debian 13"],
        "glibc": "2.28",
        "memory_mib": 256 * 1024,
        "free_gib": {"/opt": 0},
        "shm_mib": 0,
        "shm_free_mib": 0,
        "gpu_count": 8,
        "compute_capability": CAPABILITY.get(profile),
        "gpu_memory_gib": 640,
        "nvlinks": 18 if profile in ("sm100", "sm103") else None,
    }


def ask(root, **params):
    """Run the module as it is; returns its result."""
    result = {}

    def keep(_module, **returned):
        result.update(returned)
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch, patch_module_args({"root": str(root), **params}):
        patch.setattr(AnsibleModule, "exit_json", keep)
        patch.setattr(AnsibleModule, "fail_json", keep)
        with pytest.raises(SystemExit):
            gpu_facts.main()
    return result


def judge(root, profile, release="0.5.23", **params):
    params.setdefault("values", values(profile))
    return ask(root, profile=profile, release=release, rules=gpu_nodes.RULES, disks=["/opt"], **params)


@pytest.mark.parametrize("name", gpu_nodes.NODES)
def test_node_gives_exactly_its_findings(tmp_path, name):
    node = gpu_nodes.build_node(tmp_path, name)
    checks = judge(tmp_path, node["profile"], node["release"])["checks"]
    for status in ("failed", "warning"):
        found = {check["id"]: check for check in checks if check["status"] == status}
        assert set(found) == set(node.get(status, {})), {
            key: entry["message"] for key, entry in found.items()
        }
        for rule, message in node.get(status, {}).items():
            assert message in found[rule]["message"]
            assert found[rule]["remedy"] in found[rule]["message"]


def test_facts_of_a_whole_node(tmp_path):
    gpu_nodes.build_node(tmp_path, "b200x8")
    facts = judge(tmp_path, "sm100")["facts"]
    assert (facts["readable_gpus"], facts["gpu_kinds"], facts["gpu_memory_gib"]) == (8, 1, 1432)
    assert facts["topology"] == {"NV18": 28} and facts["fabric"]["nvlinks"] == 18
    assert facts["fabric"]["manager_version"] == facts["driver"]["module_version"] == "580.159.04"
    assert facts["driver"]["unheld"] == []
    assert facts["memory"]["transparent_huge_pages"] == "madvise"
    assert facts["tools"]["nvcc"].endswith("usr/local/cuda/bin/nvcc")
    assert facts["gpus"][3]["fabric"]["outcome"] == "Completed, Success"
    assert facts["gpus"][3]["bus_id"] == "00000000:4B:00.0"


def test_a_node_without_nvidia_is_a_fact_and_no_failure(tmp_path):
    gpu_nodes.build_host(tmp_path)
    result = judge(tmp_path, "cpu")
    assert result["facts"]["gpus"] == [] and result["failures"] == []
    assert result["facts"]["driver"]["module_version"] is None
    assert {check["status"] for check in result["checks"]} <= {"ok", "unknown"}


def test_a_folder_without_anything_is_a_fact_too(tmp_path):
    facts = ask(tmp_path)["facts"]
    assert facts["memory"]["total_mib"] is None and facts["shm"]["size_mib"] is None
    assert facts["os"]["id"] is None and facts["accounts"] == {"user": None, "group": None}


def test_what_the_provisioning_makes_good_is_pending(tmp_path):
    gpu_nodes.build_node(tmp_path, "no_driver")
    result = judge(tmp_path, "sm100", provisions=["driver"])
    assert result["failures"] == []
    assert {check["id"] for check in result["checks"] if check["status"] == "pending"} == {"driver.module"}


def test_an_accepted_failure_is_told_and_does_not_fail(tmp_path):
    gpu_nodes.build_node(tmp_path, "nvlink_error_in_the_kernel_log")
    result = judge(tmp_path, "sm100", accepted=["gpu.xid"])
    assert result["failures"] == []
    assert [check["id"] for check in result["checks"] if check["status"] == "accepted"] == ["gpu.xid"]


def test_accepting_a_rule_that_is_not_there_is_refused(tmp_path):
    gpu_nodes.build_host(tmp_path)
    assert "There are no rules called gpu.xids" in judge(tmp_path, "cpu", accepted=["gpu.xids"])["msg"]


def test_a_release_that_is_none_is_refused(tmp_path):
    gpu_nodes.build_host(tmp_path)
    assert "is not a version of SGLang" in judge(tmp_path, "cpu", release="latest")["msg"]


def test_unheld_driver_packages_are_a_warning_only_where_upgrades_are_automatic(tmp_path):
    gpu_nodes.build_node(tmp_path, "b200x8")
    status = gpu_nodes.package("libnvidia-compute", "580.159.04-1") + gpu_nodes.package(
        "nvidia-fabricmanager", "580.159.04-1"
    )
    gpu_nodes.write(tmp_path, "var/lib/dpkg/status", status)
    assert judge(tmp_path, "sm100")["facts"]["driver"]["unheld"] == []
    gpu_nodes.write(tmp_path, "var/lib/dpkg/status", status + gpu_nodes.package("unattended-upgrades", "2"))
    result = judge(tmp_path, "sm100")
    warnings = {check["id"]: check["found"] for check in result["checks"] if check["status"] == "warning"}
    assert warnings == {"driver.updates": "libnvidia-compute, nvidia-fabricmanager"}


@pytest.mark.parametrize(
    ("path", "text", "rule", "message"),
    [
        (
            "etc/os-release",
            'ID=ubuntu\nVERSION_ID="20.04"\n',
            "node.system",
            "found ubuntu 20, expected one of debian 12",
        ),
        ("proc/1/comm", "tini\n", "node.service_manager", "found tini, expected systemd"),
        ("proc/meminfo", "MemTotal: 1048576 kB\n", "node.memory", "found 1024, expected at least 262144"),
        ("proc/sys/fs/nr_open", "65536\n", "node.open_files", "found 65536, expected at least 1048576"),
    ],
)
def test_a_system_that_cannot_serve(tmp_path, path, text, rule, message):
    gpu_nodes.build_node(tmp_path, "b200x8")
    gpu_nodes.write(tmp_path, path, text)
    result = judge(tmp_path, "sm100")
    assert [check["id"] for check in result["checks"] if check["status"] == "failed"] == [rule]
    assert message in result["failures"][0]


# What the systems themselves say and bring: VERSION_ID, C library, Python.
SYSTEMS = {
    "debian 12": ("12", "2.36", "3.11.2"),
    "debian 13": ("13", "2.41", "3.13.5"),
    "ubuntu 22": ("22.04", "2.35", "3.10.12"),
    "ubuntu 24": ("24.04", "2.39", "3.12.3"),
}
ROLE = yaml.safe_load((gpu_nodes.ROOT / "roles/gpu_node/vars/main/main.yml").read_text(encoding="utf-8"))
NEEDS = yaml.safe_load((gpu_nodes.ROOT / "roles/sglang_engine/vars/main.yml").read_text(encoding="utf-8"))[
    "__sglang_engine_needs"
]


@pytest.mark.parametrize(
    ("system", "need", "failed"),
    [
        *[(system, NEEDS[0], set()) for system in SYSTEMS],
        *[(system, NEEDS[-1], set()) for system in SYSTEMS if system != "ubuntu 22"],
        # Ubuntu 22.04 needs another Python for 0.5.22 and later.
        ("ubuntu 22", NEEDS[-1], {"node.python"}),
    ],
)
def test_supported_systems_against_what_the_releases_need(tmp_path, system, need, failed):
    version, libc, python = SYSTEMS[system]
    name = system.split()[0]
    gpu_nodes.write(
        tmp_path, "etc/os-release", f'PRETTY_NAME="X"\nVERSION_ID="{version}"\nID={name}\nID_LIKE=debian\n'
    )
    facts = {"os": node_facts.read_os(node_facts.Source(str(tmp_path), gpu_nodes.run_command))}
    facts["os"].update(glibc=libc)
    facts["interpreters"] = {"/usr/bin/python3": python}
    rules = [
        rule
        for rule in gpu_nodes.RULES
        if rule["id"] in ("node.system", "node.glibc", "node.python", "node.python_too_new")
    ]
    wanted = {"systems": ROLE["__gpu_node_values"]["systems"], **need}
    checks = node_rules.judge(rules, facts, wanted, "sm100")
    assert len(checks) == 4 and "unknown" not in {check["status"] for check in checks}
    assert {check["id"] for check in checks if check["status"] == "failed"} == failed
    for check in checks:
        assert check["status"] == "ok" or "Set sglang_engine_base_python" in check["message"]


def test_too_little_space_names_the_folder(tmp_path):
    gpu_nodes.build_host(tmp_path)
    wanted = {**values("cpu"), "free_gib": {"/opt": 10**9}}
    (failure,) = judge(tmp_path, "cpu", values=wanted)["failures"]
    assert failure.startswith("Free space in GiB: found ")
    assert " on /opt, expected at least /opt 1000000000. Free some" in failure


def test_a_port_is_free_for_its_own_unit_and_taken_for_others(tmp_path):
    gpu_nodes.build_host(tmp_path)
    gpu_nodes.write(
        tmp_path,
        "proc/net/tcp",
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000   998        0 4242 1\n",
    )
    (tmp_path / "proc/77/fd").mkdir(parents=True)
    (tmp_path / "proc/77/fd/3").symlink_to("socket:[4242]")
    gpu_nodes.write(tmp_path, "proc/77/cgroup", "0::/system.slice/sglang.service\n")
    result = judge(tmp_path, "cpu", ports=[30000, 30001])
    assert result["facts"]["ports"] == {
        "30000": {"pid": 77, "unit": "sglang.service"},
        "30001": {"pid": None, "unit": "nobody"},
    }
    assert result["failures"] == []
    gpu_nodes.write(tmp_path, "proc/77/cgroup", "0::/system.slice/nginx.service\n")
    (failure,) = judge(tmp_path, "cpu", ports=[30000, 30001])["failures"]
    assert "found nginx.service on 30000, expected one of nobody, sglang.service" in failure
