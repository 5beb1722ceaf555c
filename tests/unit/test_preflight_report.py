"""playbooks/preflight.yml as it is run: one line a check, all failures at once, JSON, a true exit status.

The nodes are laid out below folders and reached by the local connection; one cannot be reached at all.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import gpu_nodes
import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Of the parts of a deploy those two that look at nothing but the laid-out node.
PARTS = [{"role": "gpu_node", "needs": []}, {"role": "sglang_gate", "needs": ["gpu_node"]}]
# What this machine has in place of the node's: the space below its folders, and the user of the tests.
ACCEPTED = ["node.shm_size", "node.shm_free", "node.disk", "node.privileges"]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """An inventory: sound (B200), broken (three failures) and away (nobody answers there)."""
    folder = tmp_path_factory.mktemp("nodes")
    hosts = {}
    for name, like in (("sound", "b200x8"), ("broken", "three_failures_at_once")):
        root = folder / name
        gpu_nodes.build_node(root, like)
        (root / "usr/bin/python3").symlink_to(sys.executable)
        hosts[name] = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "laid_out_below": str(root),
        }
    hosts["away"] = {"ansible_host": "127.0.0.1", "ansible_port": 1}
    settings = {
        "ansible_become": False,
        "gpu_node_profile": "sm100",
        "gpu_node_accepted_findings": ACCEPTED,
        "sglang_engine_version": "0.5.23",
    }
    inventory = folder / "hosts.yml"
    inventory.write_text(yaml.safe_dump({"sglang": {"hosts": hosts, "vars": settings}}), encoding="utf-8")
    return inventory


def preflight(inventory, limit, **extra):
    command = [pathlib.Path(sys.executable).parent / "ansible-playbook", "playbooks/preflight.yml"]
    root = "{{ laid_out_below | default('/') }}"
    variables = {"preflight_parts": PARTS, "__gpu_node_facts_root": root, **extra}
    command += ["-i", inventory, "--limit", limit, "-e", json.dumps(variables)]
    environment = {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def lines(text, status):
    """The ids of the report's lines with this status."""
    return re.findall(rf"^ *{status} +(\S+)(?:  |$)", text, re.MULTILINE)


def test_a_broken_and_an_unreachable_node_beside_a_sound_one(nodes, tmp_path):
    report = tmp_path / "report.json"
    done = preflight(nodes, "all", preflight_output=str(report))
    assert done.returncode not in (0, 1), done.stdout
    told = json.loads(report.read_text(encoding="utf-8"))
    assert set(told) == {"sound", "broken", "away"}
    assert (told["sound"]["ready"], told["sound"]["failures"]) == (True, [])
    assert told["away"] == {"ready": False, "checks": [], "failures": ["The node was not reached."]}
    # All at once, each with its remedy.
    assert told["broken"]["ready"] is False
    failed = {check["id"]: check for check in told["broken"]["checks"] if check["status"] == "failed"}
    assert set(failed) == {"gpu.count", "gpu.mig", "gpu.ecc_errors"}
    assert all(check["remedy"] in check["message"] for check in failed.values())
    assert len(told["broken"]["failures"]) == 3
    # What needs the node is not judged on it, and is on the other.
    parts = {name: told[name]["checks"][-1] for name in ("sound", "broken")}
    assert (parts["sound"]["status"], parts["broken"]["status"]) == ("ok", "unknown")
    # The same for people: one line a check, and the reason of the refusal at the end.
    assert lines(done.stdout, "failed") == ["gpu.count", "gpu.mig", "gpu.ecc_errors"]
    assert len(lines(done.stdout, "ok")) > 60
    assert "broken is not ready; nothing was changed on it." in done.stdout + done.stderr
    assert "found yes on GPU 1, expected no. Switch it off with `nvidia-smi -mig 0`" in done.stdout
    assert re.search(r"^away +: .*unreachable=1 ", done.stdout, re.MULTILINE)
    assert re.search(r"^sound +: .*changed=0 +unreachable=0 +failed=0 ", done.stdout, re.MULTILINE)


def test_a_sound_node_alone_as_json_among_the_output(nodes):
    done = preflight(nodes, "sound", preflight_output="json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(
        re.search(r"msg: \|-\n((?: +.*\n)+)", done.stdout[done.stdout.index("Tell it as JSON") :]).group(1)
    )
    assert told["sound"]["ready"] is True
    assert len(told["sound"]["checks"]) == len(lines(done.stdout, "(?:ok|unknown|accepted)"))
