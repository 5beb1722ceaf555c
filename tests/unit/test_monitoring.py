"""What the node tells Prometheus; and rules, dashboard and metrics, which must name the same things."""

import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys

import gpu_nodes
import pytest
import yaml
from ansible.module_utils.sglang_kit import attestation

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROLE = ROOT / "roles/sglang_monitoring"
PROGRAM = ROLE / "files/node_state.py"
DASHBOARD = json.loads((ROLE / "files/dashboard.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


def variables(name):
    text = (ROLE / "vars/main" / f"{name}.yml").read_text(encoding="utf-8")
    return yaml.safe_load(text)[f"__sglang_monitoring_{name}"]


RULES = [*variables("recording"), *variables("alerts")]
EXPRESSIONS = [rule["expr"] for rule in RULES] + QUERIES


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The program as the role installs it: in one folder with what it shares."""
    shutil.copy(PROGRAM, tmp_path)
    for name in ("attestation.py", "gpu_smi.py", "node_facts.py"):
        shutil.copy(ROOT / "module_utils/sglang_kit" / name, tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("node_state", tmp_path / PROGRAM.name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STARTED = "InactiveExitTimestampMonotonic=1000000000\nActiveEnterTimestampMonotonic=1600000000\nNRestarts=1\n"


@pytest.mark.parametrize(
    "state, starting, since",
    [
        ("ActiveState=active\nSubState=running\n", 0, 9500),
        ("ActiveState=activating\nSubState=start\n", 1100, None),
        ("ActiveState=activating\nSubState=auto-restart\n", 0, None),
        ("ActiveState=failed\nSubState=failed\n", 0, None),
    ],
)
def test_the_unit(program, state, starting, since):
    rows = {name: value for name, _labels, value in program.read_unit(state + STARTED, 2100.4, 10000.4)}
    assert rows["starting_seconds"] == starting
    assert rows["unit_restarts"] == 1
    assert rows.get("serving_since_timestamp_seconds") == since


def test_a_unit_that_never_ran(program):
    rows = program.read_unit("ActiveState=inactive\nSubState=dead\n", 2000.0, 10000.0)
    assert rows == [("starting_seconds", {}, 0), ("unit_restarts", {}, 0)]


@pytest.fixture
def release(tmp_path):
    """A release that passed, behind `current`, with an attested engine of one file."""
    tree, folder = tmp_path / "engines/e", tmp_path / "releases/0.5.23-abc"
    (tree / "lib/python3.11/site-packages").mkdir(parents=True)
    (tree / "patched.py").write_text("ours\n")
    statement = {"inputs": {}, **attestation.look(str(tree), ["patched.py"])}
    (tree / attestation.NAME).write_text(json.dumps(statement))
    folder.mkdir(parents=True)
    (folder / "engine").symlink_to(tree)
    (folder / "gate.json").write_text('{"passed": true}')
    (tmp_path / "current").symlink_to(folder)
    return tmp_path


def test_a_release_that_is_as_it_was_left(program, release):
    rows, problems = program.read_release(release / "current")
    assert rows == [
        ("release_info", {"release": "0.5.23-abc"}, 1),
        ("release_passed", {}, 1),
        ("attestation_ok", {}, 1),
    ]
    assert problems == []


def test_a_release_that_was_changed_by_hand(program, release):
    (release / "engines/e/patched.py").write_text("theirs\n")
    (release / "releases/0.5.23-abc/gate.json").unlink()
    rows, problems = program.read_release(release / "current")
    assert rows[1:] == [("release_passed", {}, 0), ("attestation_ok", {}, 0)]
    assert len(problems) == 1 and problems[0].startswith("patched.py has sha256")


def test_a_node_without_a_release(program, tmp_path):
    assert program.read_release(tmp_path / "current") == ([], [])


def test_gpus(program):
    rows = program.read_gpus((gpu_nodes.DATA / "h200x2/nvidia-smi-q.xml").read_text(encoding="utf-8"))
    assert rows[:2] == [("gpus_readable", {}, 1), ("gpus", {}, 2)]
    assert rows[2] == ("gpu_fabric_ok", {"gpu": "00000000:00:06.0", "outcome": "Completed, Success"}, 1)
    assert program.read_gpus(None) == program.read_gpus("lost") == [("gpus_readable", {}, 0)]


def test_a_fabric_that_is_not_ready(program):
    text = (gpu_nodes.DATA / "h200x2/nvidia-smi-q.xml").read_text(encoding="utf-8")
    rows = program.read_gpus(text.replace("<state>Completed</state>", "<state>In Progress</state>", 1))
    fabric = [(labels["outcome"], value) for name, labels, value in rows if name == "gpu_fabric_ok"]
    assert fabric == [("In Progress, Success", 0), ("Completed, Success", 1)]


def test_the_text_format(program):
    rows = [("a", {}, 0), ("b", {"x": 'quoted "word"'}, 1), ("b", {"x": "other"}, 0)]
    assert program.render(rows) == (
        "# TYPE sglang_node_a gauge\nsglang_node_a 0\n"
        '# TYPE sglang_node_b gauge\nsglang_node_b{x="quoted \\"word\\""} 1\nsglang_node_b{x="other"} 0\n'
    )


def test_it_runs_where_nothing_is_installed(program, tmp_path):
    output = tmp_path / "sglang_node.prom"
    command = [sys.executable, "-I", str(tmp_path / PROGRAM.name), str(tmp_path / "current"), str(output)]
    subprocess.run(command, check=True)
    assert "\nsglang_node_starting_seconds 0\n" in output.read_text(encoding="utf-8")
    assert not output.with_suffix(".part").exists()


def test_alerts_say_what_to_do():
    for alert in variables("alerts"):
        assert alert["severity"] in ("critical", "warning"), alert
        assert "$labels.instance" in alert["summary"] and len(alert["remedy"]) > 20, alert


def test_every_alert_has_a_case():
    cases = yaml.safe_load((ROOT / "tests/scenarios/data/alerts.yml").read_text(encoding="utf-8"))["cases"]
    assert {case["alert"] for case in cases} == {alert["alert"] for alert in variables("alerts")}


def test_the_engine_s_metrics_are_those_of_the_table():
    known = set()
    for metric in variables("metrics"):
        known |= {metric["name"] + "_bucket"} if metric.get("histogram") else {metric["name"]}
    used = {name for expression in EXPRESSIONS for name in re.findall(r"\bsglang:\w+", expression)}
    assert used == known


def test_recorded_figures_are_used_and_known():
    recorded = {rule["record"] for rule in variables("recording")}
    assert {
        name for expression in EXPRESSIONS for name in re.findall(r"\binstance:\w+:\w+", expression)
    } == recorded


def test_the_node_s_own_metrics_are_those_of_its_programs():
    measure = (ROOT / "roles/sglang_gate/files/measure.py").read_text(encoding="utf-8")
    sources = {"node": PROGRAM.read_text(encoding="utf-8"), "gate": measure}
    for expression in EXPRESSIONS:
        for program_name, metric in re.findall(r"\bsglang_(node|gate)_(\w+)", expression):
            assert f'"{metric}"' in sources[program_name], metric


def test_panels_do_not_lie_on_each_other():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken and grid["x"] + grid["w"] <= 24, panel["title"]
        taken |= cells
