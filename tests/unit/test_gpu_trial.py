"""The trial for machines with GPUs, on the CPU: the bundle's rules, the tree, one start, the judgement."""

import argparse
import importlib.util
import json
import mmap
import pathlib
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import SourceFileLoader

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRIAL = ROOT / "tools" / "gpu_trial"
RECIPE = yaml.safe_load((TRIAL / "recipe.yml").read_text(encoding="utf-8"))
STAND_IN_ENGINE = pathlib.Path(__file__).parent / "data" / "stand_in_engine.py"
MODULES = ("trial", "cases", "checkpoints", "load", "report", "server", "tree", "vacancy", "launcher")


def load_bundle():
    loader = SourceFileLoader("gpu_trial_bundle", str(TRIAL / "bundle"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_trial_bundle", loader))
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bundle():
    return load_bundle()


@pytest.fixture(scope="module")
def trial(bundle, tmp_path_factory):
    """The trial's modules, imported from an unpacked bundle without an engine."""
    folder = tmp_path_factory.mktemp("unpacked")
    for path in TRIAL.glob("*.py"):
        shutil.copy2(path, folder)
    bundle.fill_kit(folder / "kit")
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("trial")
    sys.path[:] = before
    for name in MODULES:
        sys.modules.pop(name, None)


def test_readme_tells_all_that_is_trimmed():
    text = (TRIAL / "README.md").read_text(encoding="utf-8")
    for name in [*RECIPE["leave_out"], *RECIPE["strip"], *RECIPE["stand_ins"]]:
        assert f"`{name}`" in text
    for change in RECIPE["edits"]:
        assert change["file"].rsplit("/", 1)[1] in text


def test_recipe_names_only_wheels_that_it_has():
    assert set(RECIPE["leave_out"]) | set(RECIPE["strip"]) <= set(RECIPE["wheels"])


def test_a_pattern_that_leaves_nothing_out_is_refused(bundle, tmp_path):
    wheel = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/big.so", "x" * 100)
        archive.writestr("a/small.py", "")
    assert bundle.unpack(wheel, tmp_path / "site", ["a/*.so"]) == (0, 100)
    assert not (tmp_path / "site" / "a" / "big.so").exists()
    assert (tmp_path / "site" / "a" / "small.py").exists()
    with pytest.raises(bundle.BundleError, match=r"has nothing of b/\*"):
        bundle.unpack(wheel, tmp_path / "site", ["b/*"])


@pytest.mark.parametrize("text", ["", "import x\nimport x\n"])
def test_an_edit_has_one_place(bundle, tmp_path, text):
    (tmp_path / "m.py").write_text(text)
    with pytest.raises(bundle.BundleError, match="expected once"):
        bundle.edit(tmp_path, {"file": "m.py", "before": "import x\n", "after": ""})
    assert (tmp_path / "m.py").read_text() == text


def test_stand_in_has_the_names_that_are_imported_and_no_others():
    program = "from flashinfer.sampling import top_p_renorm_prob\ntop_p_renorm_prob(1)"
    other = "from flashinfer.fused_moe import fused_topk_deepseek"
    for words, wanted in ((program, "NotImplementedError"), (other, "ModuleNotFoundError")):
        answer = subprocess.run(
            [sys.executable, "-B", "-c", words],
            env={"PYTHONPATH": str(TRIAL / "stand_in")},
            capture_output=True,
            text=True,
        )
        assert wanted in answer.stderr


def test_take_out(trial, tmp_path):
    path = tmp_path / "m.py"
    path.write_text(
        "class A:\n    x = 1\n\n    @property\n    def f(self): ...\n\n    def g(self): ...\n\ndef f(): ...\n"
    )
    from tree import take_out

    assert take_out(path, "A", ["f", "h"]) == ["f"]
    assert path.read_text() == "class A:\n    x = 1\n\n\n    def g(self): ...\n\ndef f(): ...\n"


def test_configuration_is_what_the_engine_reads(trial):
    from server import configuration

    text = configuration(
        {"port": 1, "trust-remote-code": True, "cuda-graph-config": {"decode": {"max_bs": 8}}}
    )
    assert yaml.safe_load(text) == {
        "port": 1,
        "trust-remote-code": True,
        "cuda-graph-config": '{"decode": {"max_bs": 8}}',
    }


def test_names_of_cases(trial):
    assert trial.names("echo,plain") == ["echo", "plain"]
    with pytest.raises(argparse.ArgumentTypeError, match="no such case: ech"):
        trial.names("ech")


def test_facts_are_held_against_torch(trial):
    mine = {"index": 0, "name": "NVIDIA H200", "compute_capability": "9.0", "memory_total_mib": 143771}
    facts = {"gpus": [mine], "driver": {"module_version": "580.159.04"}}
    other = {"name": "NVIDIA H200", "capability": "9.0", "memory_mib": 143167}
    assert trial.compare_facts(facts, {"gpus": [other]}) == []
    assert "sees 1 GPUs, torch 2" in trial.compare_facts(facts, {"gpus": [other, other]})[0]
    assert "GPU 0: 143771 MiB" in trial.compare_facts(facts, {"gpus": [dict(other, memory_mib=81000)]})[0]


@pytest.fixture
def started(trial, tmp_path, request):
    """Start a release whose engine plays steps; returns (trial, case, start)."""
    case_name, steps = request.param
    case = next(case for wave in trial.WAVES for case in wave if case.name == case_name)
    engine = tmp_path / "engine" / "bin"
    engine.mkdir(parents=True)
    (engine / "python").write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN_ENGINE} "$@"\n')
    (engine / "python").chmod(0o755)
    one = trial.Trial(tmp_path / "out", tmp_path / "work", 1, float("inf"))
    one.trees = {"patched": tmp_path / "engine", "without": tmp_path / "engine"}
    one.checkpoints = {case.checkpoint: tmp_path / "checkpoint"}
    release = tmp_path / "work" / "releases" / case.name
    with trial.hold(0) as sock:
        port = sock.getsockname()[1]
    write_release = trial.write_release

    def with_steps(*arguments):
        write_release(*arguments)
        (release / "steps.json").write_text(json.dumps(steps))

    trial.write_release = with_steps
    try:
        yield one, case, one.start(case._replace(launcher=False), port)
    finally:
        trial.write_release = write_release


CRASH = (
    "[2026-01-01 00:00:00 TP0] Load weight begin. avail mem=1 GB\n"
    "[2026-01-01 00:00:01 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    "AttributeError: 'KimiK25ForConditionalGeneration' object has no attribute 'get_embed_and_head'\n"
)


@pytest.mark.parametrize("started", [("methods_missing", [["write", CRASH], ["kill", 9]])], indirect=True)
def test_a_start_that_must_die(started):
    one, case, start = started
    assert start.wait(start.ended, 20)
    start.clean_up()
    result = one.judge(case, start, {})
    assert result["problems"] == []
    assert result["status"] == 137
    assert result["phase"] == "loading_weights"
    assert result["diagnoses"][0]["id"] == "eagle3_methods_missing"
    assert result["lost_s"] <= result["ended_s"]


@pytest.mark.parametrize("started", [("echo", [["write", CRASH], ["exit", 1]])], indirect=True)
def test_a_start_that_must_serve_and_dies(started):
    one, case, start = started
    assert start.wait(start.ended, 20)
    start.clean_up()
    assert one.judge(case, start, {})["problems"] == ["it does not serve"]


@pytest.mark.parametrize("started", [("truncated_shard", [["write", CRASH], ["exit", 1]])], indirect=True)
def test_another_cause_than_the_case_has(started):
    one, case, start = started
    assert start.wait(start.ended, 20)
    start.clean_up()
    assert one.judge(case, start, {})["problems"] == ["diagnosed as eagle3_methods_missing"]


def test_report(trial):
    from report import markdown

    text = markdown(
        {
            "tp": 2,
            "date": "2026-01-01",
            "seconds": 9,
            "cases": [
                {
                    "name": "echo",
                    "what": "w",
                    "by": "engine",
                    "came_up_s": 5.0,
                    "proof": {"acceptance": {"length": 4.0, "tokens_per_s": 9.0}},
                    "status": 0,
                    "ended_s": 8.0,
                    "end_took_s": 2.0,
                    "problems": ["it smells"],
                }
            ],
            "skipped": ["plain"],
            "problems": ["no driver"],
            "load": {
                "gib": 2.0,
                "files": 3,
                "rows": [
                    {"what": "plain read", "cold": True, "seconds": 2.0},
                    {"what": "engine, 1 thread", "cold": True, "seconds": 4.5},
                    {"what": "plain read", "cold": True, "seconds": 4.0},
                ],
            },
        }
    )
    outcome = "up after 5.0 s, acceptance 4.0, 9.0 tokens/s, status 0 2.0 s later"
    assert f"| echo | w | engine | {outcome} |  | it smells |" in text
    assert "Not run for lack of time: plain." in text
    assert "- no driver" in text
    assert "| engine, 1 thread | cold | 4.5 | 1.50 |" in text
    assert "| plain read | cold | 2.0, 4.0 | 1.00 |" in text


def test_heads_of_the_vision_tower_divide_by_eight(trial, tmp_path):
    from checkpoints import generate

    generate(tmp_path, "echo")
    vision = json.loads((tmp_path / "target" / "config.json").read_text())["vision_config"]
    assert vision["num_attention_heads"] % 8 == 0
    # Two-dimensional rope needs a head that divides by 4.
    assert vision["hidden_size"] // vision["num_attention_heads"] % 4 == 0


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_is_read_to_its_end(trial, tmp_path, monkeypatch, direct):
    import load

    path = tmp_path / "file"
    path.write_bytes(b"x" * (3 * 4096 + 100))
    monkeypatch.setattr(load, "BLOCK", 4096)
    sizes, readv = [], load.os.readv

    def counted(fd, buffers):
        sizes.append(readv(fd, buffers))
        return sizes[-1]

    monkeypatch.setattr(load.os, "readv", counted)
    load.read_all([path], 1, direct)
    assert sizes == [4096, 4096, 4096, 100]


def test_files_leave_the_page_cache(trial, tmp_path, monkeypatch):
    import load

    path = tmp_path / "file"
    path.write_bytes(b"x" * (1 << 20))
    assert load.in_cache(path)
    assert load.drop_from_cache([path])
    assert not load.in_cache(path)
    # A mapping that is in use keeps its pages, and that is told.
    monkeypatch.setattr(load, "LONGEST_DROP_S", 0)
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as held:
        assert sum(held[::4096])
        assert not load.drop_from_cache([path])


def test_a_load_is_that_of_every_rank(trial, tmp_path):
    from load import loads

    log = tmp_path / "log"
    line = "[2026-01-01 00:00:00 TP{0}] Load weight end. elapsed={0}.50 s, type=KimiK25\n"
    log.write_text(line.format(1) + "Multi-thread loading shards: 100%" + line.format(0))
    assert loads(log) == [1.5, 0.5]


SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) [ -e {folder}/held ] && echo "0, GPU-1dd0, 4618" || echo "0, GPU-1dd0, 0" ;;
--query-compute-apps=*) [ -e {folder}/held ] && echo "GPU-1dd0, $(cat {folder}/held), 4608" ;;
esac
exit 0
"""


def test_vacancy(trial, tmp_path, monkeypatch):
    """With a stand-in of nvidia-smi and of the engine; the launcher, and the process that holds, are real."""
    import vacancy

    engine = tmp_path / "engine" / "bin"
    engine.mkdir(parents=True)
    (engine / "python").write_text("#!/bin/sh\necho 'server_args=ServerArgs()'\nsleep 60\n")
    (engine / "python").chmod(0o755)
    (tmp_path / "engine" / "lib" / "python3.12" / "site-packages").mkdir(parents=True)
    attested = trial.run_module(
        "engine_attestation", {"tree": str(tmp_path / "engine"), "files": ["bin/python"]}
    )
    assert attested["changed"]
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(SMI.format(folder=tmp_path))
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setattr(vacancy, "SHORT_BOUND_S", 0.1)
    held = tmp_path / "held"
    program = f"import os, sys; open({str(held)!r}, 'w').write(str(os.getpid())); print('held', flush=True)"
    monkeypatch.setattr(vacancy, "HOLDER", program + f"; sys.stdin.read(); os.unlink({str(held)!r})")
    one = trial.Trial(tmp_path / "out", tmp_path / "work", 1, float("inf"))
    one.trees = {"patched": tmp_path / "engine"}
    one.checkpoints = {"echo": tmp_path / "checkpoint"}
    steps, problems = vacancy.prove_vacancy(one)
    assert problems == []
    assert steps["held"] == [f"GPU 0 4618 MiB (pid {steps['holder']} 4608 MiB)"]
