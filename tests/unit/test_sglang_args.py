# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The examination of a configuration: cases are data, in data/args/, for a stand-in of an engine."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import sys

import pytest
import sglang_args
import yaml
from ansible.module_utils.sglang_kit.args import ArgsError, as_yaml, ask, effective, explain, judge, successor
from ansible.module_utils.testing import patch_module_args

DATA = pathlib.Path(__file__).parent / "data" / "args"
CASES = yaml.safe_load((DATA / "cases.yml").read_text())
NAMED = {"model-path": "the_model", "tp-size": "the_tp_size"}
GOOD = "model-path: /m\ntrust-remote-code: true\n"


@pytest.fixture
def engine(tmp_path):
    """A function that makes a tree of the stand-in, and returns the environment that leads to it."""

    def make(old=False):
        shutil.copytree(DATA / "sglang", tmp_path / "sglang")
        if old:
            merger = tmp_path / "sglang/srt/utils/server_args_config_parser.py"
            text = merger.read_text().replace("HANDS_ON_JSON = True", "HANDS_ON_JSON = False")
            (tmp_path / "sglang/srt/server_args_config_parser.py").write_text(text)
            merger.unlink()
        return {"PYTHONPATH": str(tmp_path)}

    return make


@pytest.fixture
def examine(engine, capfd):
    """A function that runs the module: (result with its warnings under `warned`, whether it failed)."""

    def run(check_mode=False, environment=None, **params):
        made = dict(engine(), **(environment or {}))
        params = dict({"python": sys.executable, "environment": made}, **params)
        if "config" not in params:
            params.setdefault("content", GOOD)
        with patch_module_args(dict(params, _ansible_check_mode=check_mode)), pytest.raises(SystemExit):
            sglang_args.main()
        told = capfd.readouterr()
        result = dict(json.loads(told.out.splitlines()[-1]), warned=told.err)
        return result, result.get("failed", False)

    return run


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_case(case, engine):
    answer = ask(sys.executable, case["content"], sorted(NAMED), engine(case.get("old")), 60)
    findings = judge(answer, NAMED)
    assert [[f["id"], f["key"]] for f in findings] == [found[:2] for found in case["finds"]], findings
    warned = [f["key"] for f in findings if f["severity"] == "warning" and f["id"] != "twice"]
    assert warned == case.get("warnings", [])
    lines = {line for severity in ("error", "warning") for line in explain(findings, severity)}
    for _id, _key, piece in case["finds"]:
        assert any(piece in line for line in lines), lines
    assert "topsecret" not in json.dumps([findings, effective(answer)])


def test_importing_the_engine_leaves_nothing_behind(engine, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TMPDIR", str(home))
    monkeypatch.setattr("tempfile.tempdir", None)
    environment = dict(engine(), HOME=str(home), CUDA_VISIBLE_DEVICES="0")
    before = sorted(tmp_path.rglob("*"))
    assert ask(sys.executable, GOOD, [], environment, 60)["version"] == "0.5.23"
    assert sorted(tmp_path.rglob("*")) == before


def test_values_are_those_that_the_parser_makes(engine):
    answer = ask(sys.executable, GOOD + "max-running-requests: '8'\napi-key: topsecret\n", [], engine(), 60)
    assert effective(answer) == {
        "api-key": "(hidden)",
        "max-running-requests": 8,
        "model-path": "/m",
        "trust-remote-code": True,
    }


def test_an_engine_that_cannot_be_imported(engine):
    with pytest.raises(
        ArgsError, match=r"cannot even build its parser \(exit status 1\): .*ImportError: libcudart"
    ):
        ask(sys.executable, GOOD, [], dict(engine(), STAND_IN_DIES="1"), 60)


def test_an_engine_that_does_not_answer(engine):
    with pytest.raises(ArgsError, match="gave no answer within 1 s"):
        ask(sys.executable, GOOD, [], dict(engine(), STAND_IN_SLEEPS="1"), 1)


def test_an_engine_that_is_not_there():
    with pytest.raises(ArgsError, match="/nowhere/python cannot be run; stage the engine"):
        ask("/nowhere/python", GOOD, [], {}, 60)


FLAGS = {
    "--a": "a",
    "--cuda-graph-backend-{decode,prefill}=disabled": "cuda-graph-backend-decode: disabled and "
    "cuda-graph-backend-prefill: disabled",
    "--a=1 and --b=2": "a: 1 and b: 2",
    "nothing": "",
}


@pytest.mark.parametrize("flags", FLAGS)
def test_flags_as_lines_of_the_file(flags):
    assert as_yaml(flags) == FLAGS[flags]


def test_successors_in_both_directions():
    options = {"options": ["cuda-graph-max-bs-decode"], "refused": []}
    assert successor("cuda-graph-max-bs", options) == "cuda-graph-max-bs-decode"
    assert successor("cuda-graph-max-bs", dict(options, refused=["cuda_graph_max_bs_decode"])) is None
    assert successor("cuda-graph-max-bs-decode", {"options": ["cuda-graph-max-bs"], "refused": []}) == (
        "cuda-graph-max-bs"
    )
    assert successor("cuda-graph-max-bs", {"options": ["other"], "refused": []}) is None


def test_a_successor_that_a_file_may_set():
    answer = {
        "options": [
            "cuda-graph-backend-decode",
            "cuda-graph-backend-prefill",
            "disable-decode-cuda-graph",
            "disable-prefill-cuda-graph",
        ],
        "refused": [],
    }
    own = "--cuda-graph-backend-{decode,prefill}=disabled"
    assert successor("disable-cuda-graph", answer, own).startswith("cuda-graph-backend-decode: disabled and")
    answer["refused"] = ["cuda_graph_backend_prefill"]
    assert successor("disable-cuda-graph", answer, own) == (
        "disable-decode-cuda-graph: true and disable-prefill-cuda-graph: true"
    )


def test_the_module_accepts(examine):
    result, failed = examine()
    assert (failed, result["verdict"], result["version"], result["changed"]) == (
        False,
        "accepted",
        "0.5.23",
        False,
    )
    assert result["findings"] == []


def test_the_module_refuses_with_everything_at_once(examine):
    result, failed = examine(content="model-path: /m\nbogus: 1\nhost: 0.0.0.0\nkv: auto\n")
    assert failed and result["verdict"] == "refused"
    head, *lines = result["msg"].split("\n")
    assert head == "SGLang 0.5.23 would not serve with this configuration:"
    assert [line.split(":")[0] for line in lines] == ["- bogus", "- host"]
    assert "kv: found the beginning of kv-cache-dtype" in result["warned"]


def test_no_rule_about_what_was_misspelt(examine):
    result, _failed = examine(
        content="model-path: /m\nspeculative-algorithm: EAGLE3\nmax_running_requests: 64\n"
        "speculative-draft-model-path: /d\n"
    )
    assert [finding["id"] for finding in result["findings"]] == ["spelling"]


def test_the_models_are_asked(examine, tmp_path):
    target, drafter = tmp_path / "t", tmp_path / "d"
    for folder, config in (
        (target, {"text_config": {"kv_lora_rank": 512}}),
        (drafter, {"model_type": "llama"}),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    (target / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    result, failed = examine(
        content="model-path: /m\nspeculative-algorithm: EAGLE3\nspeculative-draft-model-path: /d\n"
        "max-running-requests: 64\n",
        profile="sm103",
        target_config=str(target / "config.json"),
        drafter_config=str(drafter / "config.json"),
    )
    assert failed and [finding["id"] for finding in result["findings"]] == ["drafter-backend"]
    assert "a drafter without MLA that would run on trtllm_mla" in result["msg"]
    assert sglang_args.read_model(str(target / "config.json"))["quantization_config"]["quant_algo"] == "NVFP4"


@pytest.mark.parametrize(
    "text, message", [("{", "config.json is no JSON"), ("[]", "config.json holds no JSON object")]
)
def test_a_model_that_cannot_be_read(examine, tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    result, failed = examine(target_config=str(tmp_path / "config.json"))
    assert failed and message in result["msg"]


def test_a_file_in_place_of_a_text(examine, tmp_path):
    (tmp_path / "server.yaml").write_text(GOOD)
    result, failed = examine(config=str(tmp_path / "server.yaml"))
    assert not failed and result["effective"]["model-path"] == "/m"


def test_a_file_that_is_not_there(examine, tmp_path):
    result, failed = examine(config=str(tmp_path / "none.yaml"))
    assert failed and "none.yaml cannot be read" in result["msg"]


def test_check_mode_before_anything_is_staged(examine):
    result, failed = examine(check_mode=True, python="/nowhere/python")
    assert (failed, result["verdict"]) == (False, "not_staged")


def test_check_mode_before_the_models_are_staged(examine):
    result, failed = examine(check_mode=True, target_config="/nowhere/config.json")
    assert (failed, result["verdict"], result["unread"]) == (False, "accepted", ["/nowhere/config.json"])


def test_models_are_needed_when_it_counts(examine):
    result, failed = examine(target_config="/nowhere/config.json")
    assert failed and "/nowhere/config.json cannot be read" in result["msg"]


def test_no_process_is_left_behind(engine, tmp_path):
    environment = dict(engine(), STAND_IN_SLEEPS="1")
    with pytest.raises(ArgsError):
        ask(sys.executable, GOOD, [], environment, 1)
    marker = os.fsencode(str(tmp_path))
    environs = []
    for entry in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            environs.append(entry.read_bytes())
        except OSError:
            continue
    assert not any(b"STAND_IN_SLEEPS" in text and marker in text for text in environs)
