# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What the examination of a configuration leans on, held against the sources of every release."""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest
import yaml
from ansible.module_utils.sglang_kit.args import judge, successor
from ansible.module_utils.sglang_kit.args_child import MERGERS, examine
from ansible.module_utils.sglang_kit.args_rules import ALGORITHMS, DROPPED, FILE_FORMS, RULES, SUCCESSORS
from ansible.module_utils.sglang_kit.releases_facts import known_for, version_key
from ansible.module_utils.sglang_kit.releases_flags import read_flags
from matrix_support import release_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
VARS = ROOT / "roles/sglang_server/vars/main"
ROLE = yaml.safe_load((VARS / "main.yml").read_text())
LOADING = yaml.safe_load((VARS / "loading.yml").read_text())["__sglang_server_loading"]

# What the engine says, or does, where a rule holds.
EVIDENCE = {
    "drafter-backend": "trtllm_mla backend can only be used with MLA models",
    "drafter-backend-mla": "trtllm_mha backend can only be used with non-MLA models",
    "drafter-backend-unfit": "EAGLE is not supported in decode attention backend",
    "target-backend": "trtllm_mha backend can only be used with non-MLA models",
    "inherited-quantization": 'speculative_draft_model_quantization == "unquant"',
    "running-requests": "Max running requests is reset to 48",
    "draft-tokens": "speculative_num_draft_tokens is adjusted to speculative_num_steps + 1",
    "tree-backend": "trtllm_mha backend only supports topk = 1",
    "tree-spec-v2": "pec v2 currently only supports topk = 1",
    "unknown-algorithm": "Unknown speculative algorithm name",
    "tokenspeed-dtype": "tokenspeed_mla backend requires kv-cache-dtype=fp8_e4m3",
    "tokenspeed-renamed": '"tokenspeed_mla": "cutedsl_mla"',
    "trtllm-dtype": "TensorRT-LLM MLA backend only supports kv-cache-dtype",
    "fa3": "FlashAttention v3 Backend requires SM>=80 and SM<=90",
    "load-format": "Using ModelOptModelLoader due to ModelOpt quantization config",
    "ranks": "tp_size must be divisible by number of nodes",
    "tokenizer-workers": "API key is not supported in multi-tokenizer mode",
    "grpc": "--grpc-port is incompatible with --api-key",
}
# Rules whose bounds are those of their evidence.
BOUNDED = ("tokenspeed-dtype", "tokenspeed-renamed", "grpc")


def rules_of(version):
    return {rule["id"]: rule for rule in known_for(RULES, version)}


def test_evidence_is_about_rules():
    assert set(EVIDENCE) <= {rule["id"] for rule in RULES}


def test_rules_are_about_what_the_release_does(served, sources):
    text, rules = sources(served), rules_of(served.version)
    lacking = [name for name in EVIDENCE if name in rules and EVIDENCE[name] not in text]
    assert not lacking
    outside = [name for name in BOUNDED if name not in rules and EVIDENCE[name] in text]
    assert not outside


def test_rules_are_about_options_that_exist(served):
    flags = read_flags(str(served.package))
    gone = {rule["key"] for rule in rules_of(served.version).values()} - {""} - set(flags)
    assert not gone


def test_dropped_options_have_a_successor_that_exists(served):
    flags = read_flags(str(served.package))
    refused = [name.replace("-", "_") for name in flags if not flags[name]["in_file"]]
    answer = {"options": sorted(flags), "refused": refused}
    first, last = read_flags(str(release_of("0.5.9").package)), version_key(served.version)
    if last >= version_key("0.5.20"):
        # All of them are gone by then, but for those that the releases still call deprecated.
        lost = [key for key in SUCCESSORS if key not in flags and not successor(key, answer)]
        assert not lost
    if last >= version_key("0.5.14"):
        assert all(successor(key, answer) for key in FILE_FORMS)
    if last >= version_key("0.5.20"):
        assert set(DROPPED) <= set(first) - set(flags)


def test_algorithms_are_those_of_the_release(served):
    flags = read_flags(str(served.package))
    assert set(flags["speculative-algorithm"]["choices"] or ["EAGLE3"]) <= set(ALGORITHMS)
    text = (served.package / "srt/speculative/spec_info.py").read_text()
    body = text.split("class SpeculativeAlgorithm(", 1)[1].split("def ", 1)[0]
    names = {line.split(" = ")[0].strip() for line in body.splitlines() if line.endswith(" = auto()")}
    assert "EAGLE3" in names and names - {"NONE"} <= set(ALGORITHMS)


@pytest.mark.parametrize("profile", ["sm100", "sm103", "sm120", "cpu"])
def test_the_profiles_suit_the_release(served, profile):
    flags = read_flags(str(served.package))
    own = ROLE["__sglang_server_profiles"][profile]["arguments"]
    if isinstance(own, str):
        own = ROLE[own.strip("{} ")]
    for name, value in dict(ROLE["__sglang_server_common"], **own, **ROLE["__sglang_server_named"]).items():
        assert name in flags and flags[name]["in_file"] and not flags[name]["deprecated"], name
        if flags[name]["choices"] and isinstance(value, str):
            assert value in flags[name]["choices"], name


@pytest.mark.parametrize("disk", LOADING)
def test_the_loader_settings_suit_the_release(served, disk):
    known = version_key(served.version)
    entry = [entry for entry in LOADING[disk] if version_key(entry["since"]) <= known][-1]
    flags = read_flags(str(served.package))
    assert all(flags[name]["in_file"] and not flags[name]["deprecated"] for name in entry["arguments"])
    assert ("weight-loader-prefetch-checkpoints" in flags) == (known >= version_key("0.5.11"))
    loader = (served.package / "srt/model_loader/loader.py").read_text()
    # The default that an entry leaves alone or turns over, and the size of the pool behind it.
    default = f'extra_config.get("enable_multithread_load", {known >= version_key("0.5.10")})'
    assert default in loader and "DEFAULT_NUM_THREADS = 8" in loader
    turned_off = "oversubscription with the prefetch threads" in loader
    assert turned_off == (known >= version_key("0.5.16"))


def test_which_flags_a_file_may_set_is_what_the_releases_own_parser_says(served):
    program = pathlib.Path(__file__).parent / "real_parser.py"
    command = [sys.executable, str(program), str(served.package.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    flags = read_flags(str(served.package))
    assert set(flags) - {"config"} == set(told)
    wrong = {name: why for name, why in told.items() if flags[name]["in_file"] is not (why is None)}
    assert not wrong


# An option named in a remedy, with the releases that it is for: "up to 0.5.19 cuda-graph-bs".
BOUND = re.compile(r"(?:(?P<edge>up to|from) (?P<release>[\d.]+\d) )?(?P<option>[a-z]+(?:-[a-z0-9]+)+)\b")
DIAGNOSES = yaml.safe_load((ROOT / "roles/sglang_gate/vars/main/diagnoses.yml").read_text())


def test_a_remedy_names_no_option_that_the_releases_file_refuses(served):
    flags, known = read_flags(str(served.package)), version_key(served.version)
    ever = set(flags) | set(read_flags(str(release_of("0.5.23").package))) | set(SUCCESSORS) | set(DROPPED)
    wrong = []
    for entry in DIAGNOSES["__sglang_gate_diagnoses"]:
        for edge, number, option in BOUND.findall(entry["remedy"]):
            bound = version_key(number) if number else None
            meant = known <= bound if edge == "up to" else known >= bound if edge else True
            if option in ever and meant and not (option in flags and flags[option]["in_file"]):
                wrong.append((entry["id"], option))
    assert not wrong


def test_fetching_of_media_is_restricted_where_the_release_can(served):
    (flag,) = ROLE["__sglang_server_media"]["arguments"]
    can = version_key(served.version) >= version_key(ROLE["__sglang_server_media"]["since"])
    flags = read_flags(str(served.package))
    assert (flag in flags) == can
    assert not can or flags[flag]["in_file"]


class RenamedAction(argparse.Action):
    """As the releases' DeprecatedAliasStoreAction."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, values)


def reader_of(release):
    """Return the release's own reader of the YAML file; it needs nothing but PyYAML."""
    paths = [release.package / (name.split(".", 1)[1].replace(".", "/") + ".py") for name in MERGERS]
    (path,) = [path for path in paths if path.is_file()]
    spec = importlib.util.spec_from_file_location("reader_" + release.version.replace(".", "_"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ConfigArgumentMerger


def ids(release, content):
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--extra", default="{}")
    parser.add_argument("--trust", action="store_true")
    parser.add_argument("--bools", action=argparse.BooleanOptionalAction)
    parser.add_argument("--bs-decode", type=int)
    parser.add_argument("--bs", action=RenamedAction, dest="bs_decode", type=int)
    answer = examine(parser, reader_of(release), "model-path: /m\n" + content, [])
    return [finding["id"] for finding in judge(dict(answer, version=release.version), {})], answer["values"]


def test_the_reader_of_the_file(served, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = version_key(served.version)
    assert ids(served, "host: ::1\ntrust: true\nextra: '{\"a\": 1}'\n")[0] == []
    # Its quirks, which the examination names.
    found, values = ids(served, "host:\n")
    assert (found, values["host"]) == (["null"], "None")
    found, values = ids(served, "trust: false\n")
    assert (found, values["trust"]) == ([], False)
    assert ids(served, "bools: true\n")[0] == ["not-in-file"]
    assert ids(served, "underscored_key: 1\nconfig: x.yaml\n")[0] == ["unknown", "config"]
    # A map is handed on as JSON since 0.5.14; until 0.5.22 a new name is refused beside its old one.
    assert ids(served, "extra: {a: true}\n")[0] == ([] if known >= version_key("0.5.14") else ["json"])
    assert ids(served, "bs: 8\n")[0] == []
    assert ids(served, "bs-decode: 8\n")[0] == ([] if known >= version_key("0.5.23") else ["not-in-file"])
