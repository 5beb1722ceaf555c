"""What nvidia-smi wrote on real boards, read back."""

import re

import gpu_nodes
import pytest
from ansible.module_utils.sglang_kit.gpu_smi import (
    SmiError,
    count_nvlinks,
    read_query,
    read_topology,
    read_xml,
)
from ansible.module_utils.sglang_kit.gpu_stack import module_version
from ansible.module_utils.sglang_kit.node_facts import Source


def captured(name):
    return (gpu_nodes.DATA / name).read_text(encoding="utf-8")


def test_two_h200():
    log = read_xml(captured("h200x2/nvidia-smi-q.xml"))
    assert (log["driver_version"], log["cuda_version"]) == ("580.159.04", "13.0")
    first, second = log["gpus"]
    assert (first["index"], second["index"]) == (0, 1)
    assert (first["bus_id"], second["bus_id"]) == ("00000000:00:06.0", "00000000:00:07.0")
    assert first["name"] == "NVIDIA H200" and first["architecture"] == "Hopper"
    assert (first["memory_total_mib"], first["memory_used_mib"]) == (143771, 0)
    assert first["persistence"] is True and first["mig"] is False and first["compute_mode"] == "Default"
    assert first["recovery_action"] == "None"
    assert first["fabric"] == {
        "state": "Completed",
        "status": "Success",
        "health": None,
        "outcome": "Completed, Success",
    }
    assert first["ecc"] == {
        "enabled": True,
        "volatile_uncorrectable": 0,
        "aggregate_uncorrectable": 0,
        "sram_threshold_exceeded": False,
        "channel_repair_pending": False,
        "tpc_repair_pending": False,
        "unrepairable_memory": False,
    }
    assert first["rows"] == {"pending": False, "failure": False, "uncorrectable": 0}
    # These boards remap rows: they have no pages to retire.
    assert first["retired_pages"] == {"pending": None, "single_bit": None, "double_bit": None}
    assert first["pcie"] == {"generation": 5, "generation_max": 5, "width": 16, "width_max": 16}
    assert first["processes"] == []


def test_a_process_that_holds_memory():
    (gpu,) = read_xml(captured("h200x1-busy/nvidia-smi-q.xml"))["gpus"]
    assert gpu["processes"] == [{"pid": 431, "name": "python3", "memory_mib": 1634}]
    assert gpu["memory_used_mib"] == 1643


def test_csv_names_its_columns_and_units_go():
    first, second = read_query(captured("h200x2/query.csv"))
    assert first["compute_cap"] == "9.0"
    assert second["pci.bus_id"] == "00000000:00:07.0"
    assert first["memory.total"] == "143771 MiB"
    assert first["fabric.state"] == "Completed"


def test_csv_values_that_a_board_lacks_are_none():
    assert read_query("index, fabric.state, ecc.mode.current\n0, [N/A], [Not Supported]\n") == [
        {"index": "0", "fabric.state": None, "ecc.mode.current": None}
    ]
    assert read_query("") == []


def test_topology_counts_the_pairs():
    assert read_topology(captured("h200x2/topo.txt")) == {"NV18": 1}
    assert read_topology("") == {}


@pytest.mark.parametrize(
    ("kinds", "links"),
    [({"NV18": 28}, 18), ({"NV18": 21, "NV16": 7}, 16), ({"NV18": 21, "NODE": 7}, 0), ({}, None)],
)
def test_nvlinks_are_those_of_the_worst_pair(kinds, links):
    assert count_nvlinks(kinds) == links


def test_pages_that_an_older_board_retired(tmp_path):
    xml = captured("h200x1-busy/nvidia-smi-q.xml")
    for tag, value in (("retired_count", "3"), ("pending_retirement", "Yes")):
        xml = re.sub(f"<{tag}>N/A</{tag}>", f"<{tag}>{value}</{tag}>", xml)
    (gpu,) = read_xml(xml)["gpus"]
    assert gpu["retired_pages"] == {"pending": True, "single_bit": 3, "double_bit": 3}


def test_version_of_the_loaded_module_without_sysfs(tmp_path):
    source = Source(str(tmp_path), gpu_nodes.run_command)
    assert module_version(source) is None
    gpu_nodes.write(tmp_path, "proc/driver/nvidia/version", captured("h200x2/proc_driver_nvidia_version"))
    assert module_version(source) == "580.159.04"
    gpu_nodes.write(tmp_path, "sys/module/nvidia/version", "580.159.05\n")
    assert module_version(source) == "580.159.05"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Failed to initialize NVML: Unknown Error\n", "something that is not XML"),
        ("<html/>", "wrote <html>, expected <nvidia_smi_log>"),
    ],
)
def test_what_is_no_such_output_is_refused(text, message):
    with pytest.raises(SmiError, match=message):
        read_xml(text)
