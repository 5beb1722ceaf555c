# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""How every release binds its processes to NUMA nodes: what the unit and the node's packages rest on.

Its own module is run, with stand-ins for PyTorch and for the machine: two sockets with four GPUs each.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types

import pytest
from ansible.module_utils.sglang_kit.releases_facts import version_key

CPUS = range(64)


@pytest.fixture
def numa(served, monkeypatch):
    """The release's numa_utils on that machine. cpus: what the unit lets it use; numactl: where it is."""
    machine = types.SimpleNamespace(cpus=set(CPUS), numactl="/usr/bin/numactl")
    process = types.SimpleNamespace(cpu_affinity=lambda: sorted(machine.cpus))
    switches = types.SimpleNamespace(get=lambda: True)
    stand_ins = {
        "torch": {},
        "psutil": {"Process": lambda _pid: process, "cpu_count": lambda: len(CPUS)},
        "sglang": {},
        "sglang.srt": {},
        # What they are set to is asserted from the sources below.
        "sglang.srt.environ": {
            "envs": types.SimpleNamespace(SGLANG_NUMA_BIND_V2=switches, SGLANG_AUTO_NUMA_BIND=switches)
        },
        "sglang.srt.server_args": {"ServerArgs": object},
        "sglang.srt.utils": {"is_cuda": lambda: True, "is_xpu": lambda: False, "get_cpu_ids_by_node": list},
    }
    for name, content in stand_ins.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    path = served.package / "srt/utils/numa_utils.py"
    spec = importlib.util.spec_from_file_location("numa_utils", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not by_itself(served):
        return module, machine
    is_dir = os.path.isdir
    monkeypatch.setattr(
        os.path, "isdir", lambda path: path == "/sys/devices/system/node/node1" or is_dir(path)
    )
    monkeypatch.setattr(module.shutil, "which", lambda name: machine.numactl if name == "numactl" else None)
    monkeypatch.setattr(module, "_query_numa_node_for_gpu", lambda gpu: [gpu // 4])
    monkeypatch.setattr(module, "_can_set_mempolicy", lambda: True)
    return module, machine


def by_itself(release):
    """Whether the release finds the node of a GPU itself; the others want it in --numa-node."""
    return version_key(release.version) >= version_key("0.5.10")


def node_of(module, gpu, numa_node=None):
    return module.get_numa_node_if_available(types.SimpleNamespace(numa_node=numa_node), gpu)


def test_each_gpu_s_process_goes_to_that_gpu_s_node(served, numa):
    module, machine = numa
    if not by_itself(served):
        assert not hasattr(module, "get_numa_node_if_available")
        return
    assert [node_of(module, gpu) for gpu in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert node_of(module, 0, numa_node=[1]) == 1
    # A unit that is pinned would keep older releases from it.
    machine.cpus = set(CPUS[:32])
    pinned = version_key(served.version) < version_key("0.5.14")
    assert node_of(module, 5) == (None if pinned else 1)
    machine.cpus, machine.numactl = set(CPUS), None
    assert node_of(module, 5) is None


def test_binding_is_by_numactl_and_on_unless_told_otherwise(served, sources):
    text = sources(served)
    assert "exec numactl {numactl_args}" in text
    assert "SGLANG_NUMA_BIND_V2 = EnvBool(True)" in text
    # The switch came before what reads it.
    if ".SGLANG_AUTO_NUMA_BIND.get()" in text:
        assert "SGLANG_AUTO_NUMA_BIND = EnvBool(True)" in text
