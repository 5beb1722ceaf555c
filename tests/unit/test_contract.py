# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The audit of the EAGLE-3 contract, on small trees: the cases are data, in data/contract/."""

from __future__ import annotations

import json
import pathlib
import shutil
import sys

import pytest
import sglang_contract
import yaml
from ansible.module_utils.sglang_kit.contract import ContractError, audit, explain
from ansible.module_utils.sglang_kit.contract_drafter import aux_layer_ids, check_drafter, context_of
from ansible.module_utils.sglang_kit.contract_tree import Tree, package_root
from ansible.module_utils.testing import patch_module_args

DATA = pathlib.Path(__file__).parent / "data" / "contract"
BASE = yaml.safe_load((DATA / "base.yml").read_text())
CASES = yaml.safe_load((DATA / "cases.yml").read_text())


UNPATCHED = {"srt/models/wrapper.py": BASE["srt/models/wrapper.py"].replace("def get_embed", "def put_embed")}


def write_tree(root, files):
    for name, text in files.items():
        path = root / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def tree(tmp_path):
    return write_tree(tmp_path, BASE)


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_case(case, tree):
    write_tree(tree, case.get("files", {}))
    for name, (old, new) in case.get("replace", {}).items():
        assert BASE[name].count(old) == 1
        write_tree(tree, {name: BASE[name].replace(old, new)})
    result = audit(str(tree), "Wrapper")
    assert result["verdict"] == case["verdict"], explain(dict(result, findings=[]))
    for status in ("satisfied", "missing", "optional"):
        if status in case:
            assert sorted({e["name"] for e in result[status]}) == sorted(case[status])
    if case["verdict"] != "satisfied":
        entries = result[case["verdict"]]
        assert "place" not in case or "{file}:{line}".format(**entries[0]) == case["place"]
        assert explain(dict(result, findings=[]))
    for status, key in (("not_understood", "not_understood"), ("missing", "explained")):
        for piece in case.get(key, []):
            assert any(piece in entry["why"] for entry in result[status]), result[status]


def test_each_entry_is_evidence(tree):
    entry = next(e for e in audit(str(tree), "Wrapper")["satisfied"] if e["name"] == "get_embed_and_head")
    assert entry == {
        "name": "get_embed_and_head",
        "file": "srt/speculative/eagle_worker.py",
        "line": 3,
        "guard": None,
        "why": "Wrapper has it (method)",
        "where": "srt/models/wrapper.py:12",
    }


def test_the_explanation_names_the_place_and_the_remedy(tree):
    write_tree(tree, UNPATCHED)
    (problem,) = explain(dict(audit(str(tree), "Wrapper"), findings=[]))
    assert problem == (
        "Wrapper has no get_embed_and_head (srt/models/wrapper.py:4, SGLang of unknown version); asked for "
        "at srt/speculative/eagle_worker.py:3. Patch the class with the sglang_patch role, or take SGLang "
        "0.5.10 or later."
    )


@pytest.mark.parametrize(
    "inside", ["", "sglang", "lib/python3.12/site-packages", "lib64/python3.13/site-packages"]
)
def test_the_package_is_found_in_what_people_give(tmp_path, inside):
    site = tmp_path / inside if inside != "sglang" else tmp_path
    write_tree(site, BASE)
    given = tmp_path / "sglang" if inside == "sglang" else tmp_path
    assert package_root(str(given)) == str(site / "sglang")


def test_refuses_a_folder_without_the_package(tmp_path):
    with pytest.raises(ContractError, match=r"no SGLang package in .*: looked for srt/models there"):
        audit(str(tmp_path), "Wrapper")


def test_refuses_a_class_that_is_not_there(tree):
    with pytest.raises(ContractError, match=r"Nothing in .*: not defined under srt/models\. Check the name"):
        audit(str(tree), "Nothing")


def test_refuses_a_class_that_is_there_twice(tree):
    write_tree(tree, {"srt/models/again.py": "class Wrapper:\n    pass\n"})
    with pytest.raises(ContractError, match=r"defined in srt/models/again\.py and in srt/models/wrapper\.py"):
        audit(str(tree), "Wrapper")
    assert audit(str(tree), "Wrapper", "srt/models/wrapper.py")["verdict"] == "satisfied"


def test_refuses_a_file_that_is_not_there(tree):
    with pytest.raises(ContractError, match=r"has no srt/models/nothing\.py"):
        audit(str(tree), "Wrapper", "srt/models/nothing.py")


def test_names_the_file_and_the_interpreter_that_do_not_agree(tree):
    write_tree(tree, {"srt/speculative/eagle_worker.py": "self.model.get_embed_and_head(\n"})
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with pytest.raises(ContractError, match=f"eagle_worker.py does not parse under Python {version}: line 1"):
        audit(str(tree), "Wrapper")


@pytest.mark.parametrize(
    "statement, expected",
    [
        ("EntryClass = One", {"One"}),
        ("EntryClass = [\n    One,  # first\n    Two,\n]", {"One", "Two"}),
        ("EntryClass: list = (One, Two)", {"One", "Two"}),
        ("EntryClass = One\nEntryClass = [Two]", {"Two"}),
        ("EntryClass = [One] + OTHERS", None),
        ("EntryClass = make()", None),
    ],
)
def test_the_model_registry(tmp_path, statement, expected):
    write_tree(tmp_path, {"srt/models/one.py": "class One:\n    pass\n\n" + statement + "\n"})
    names, unread = Tree(str(tmp_path)).architectures()
    assert (None if unread else set(names)) == expected


# --- the drafter against the target

TARGET = {
    "architectures": ["Wrapper"],
    "text_config": {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "kv_lora_rank": 512,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
    },
}
DRAFTER = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 7168,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "max_position_embeddings": 262144,
    "kv_lora_rank": 512,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
}
ALWAYS_PLUS_ONE = [
    "            if layer_ids[0] == 1:\n"
    "                self.model.layers_to_capture = [val + 1 for val in layer_ids]\n"
    "            else:\n"
    "                self.model.layers_to_capture = list(layer_ids)\n",
    "            self.model.layers_to_capture = [val + 1 for val in layer_ids]\n",
]


def findings(tree, changes, target=TARGET, context_length=None):
    drafter = {k: v for k, v in dict(DRAFTER, **changes).items() if v != "absent"}
    return check_drafter(audit(str(tree), "Wrapper"), drafter, target, context_length)


def ids(layers):
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": layers}}


def test_a_drafter_that_fits_has_no_finding(tree):
    assert findings(tree, {}) == []


@pytest.mark.parametrize(
    "changes, name, severity, what",
    [
        (
            {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
            "drafter-architecture",
            "error",
            "SGLang in this tree has no model class Eagle3DeepseekV2ForCausalLM (it came with SGLang 0.5.12)",
        ),
        ({"architectures": "absent"}, "drafter-architecture", "error", "config.json names no architecture"),
        ({"architectures": ["Wrapper"]}, "drafter-architecture", "error", "Wrapper is no EAGLE-3 drafter"),
        (
            {"hidden_size": 4096},
            "hidden-size",
            "error",
            "hidden states of 4096 (hidden_size), the target has 7168",
        ),
        ({"target_hidden_size": 5120}, "hidden-size", "error", "hidden states of 5120 (target_hidden_size)"),
        ({"vocab_size": 32000, "draft_vocab_size": 32000}, "vocabulary", "error", "vocabulary is 32000"),
        (
            {"draft_vocab_size": 163841},
            "draft-vocabulary",
            "error",
            "163841 is larger than vocab_size 163840",
        ),
        ({"draft_vocab_size": 32000}, "draft-vocabulary", "note", "proposes 32000 of the 163840 tokens"),
        ({"draft_vocab_size": "absent"}, "draft-vocabulary", "error", "has no draft_vocab_size"),
        ({"max_position_embeddings": 4096}, "context-drafter", "error", "reaches 4096 positions"),
        (ids([2, 30, 61]), "aux-layers", "error", "layer ids [2, 30, 61] do not all lie inside"),
        (ids([1, 30, 60]), "aux-layers", "error", "layer ids [1, 30, 60] do not all lie inside"),
        (ids([0, 30, 58]), "aux-layers", "error", "layer ids [0, 30, 58] do not all lie inside"),
        (ids([2, 30, 30]), "aux-layers", "error", "layer ids [2, 30, 30] repeat"),
        (
            ids([2, 15, 30, 58]),
            "aux-layers",
            "error",
            "takes 4 layers, and srt/models/drafter.py takes exactly 3",
        ),
        (ids("2,30,58"), "aux-layers", "error", "is '2,30,58'"),
        ({"kv_lora_rank": "absent"}, "draft-attention", "note", "the target uses MLA attention"),
    ],
)
def test_a_drafter_that_does_not_fit(tree, changes, name, severity, what):
    (finding,) = findings(tree, changes)
    assert (finding["id"], finding["severity"]) == (name, severity)
    assert what in finding["what"]
    assert finding["why"] and finding["remedy"]


@pytest.mark.parametrize(
    "changes",
    [
        {"target_hidden_size": 7168, "hidden_size": 4096},
        {"draft_vocab_size": None},
        {"draft_vocab_size": "absent", "tie_word_embeddings": True},
        {"max_position_embeddings": 65536, "rope_scaling": {"rope_type": "linear", "factor": 4}},
        {"eagle_config": "absent"},
        ids([1, 29, 57]),
        ids([2, 30, 60]),
    ],
)
def test_what_is_no_reason_to_refuse(tree, changes):
    assert findings(tree, changes) == []


@pytest.mark.parametrize(
    "limit, context_length, expected",
    [
        (131072, None, ["context-drafter"]),
        (131072, 131072, []),
        (131072, 131073, ["context-drafter"]),
        (262144, 262145, ["context-target", "context-drafter"]),
    ],
)
def test_positions_against_the_context_length(tree, limit, context_length, expected):
    found = findings(tree, {"max_position_embeddings": limit}, context_length=context_length)
    assert [f["id"] for f in found] == expected


def test_an_architecture_in_a_statement_that_is_not_read_is_no_error(tree):
    write_tree(tree, {"srt/models/new.py": "class NewEagle3:\n    pass\n\nEntryClass = [NewEagle3] + []\n"})
    assert findings(tree, {"architectures": ["NewEagle3"]}) == []


GRAPHS = {
    "srt/model_executor/graph_runner.py": "class GraphRunner:\n"
    "    def __init__(self, model_runner):\n"
    "        if model_runner.eagle_use_aux_hidden_state:\n"
    "            self.model_runner.model.set_eagle3_layers_to_capture()\n"
}


@pytest.mark.parametrize(
    "layers, plus_one, expected",
    [
        ([1, 29, 57], True, []),
        (None, True, []),
        ([2, 30, 58], True, ["default-graphs", "layer-shift"]),
        ([2, 30, 58], False, []),
        ([3, 30, 58], False, ["default-graphs"]),
    ],
)
def test_graphs_that_are_captured_with_the_default_layers(tree, layers, plus_one, expected):
    write_tree(tree, GRAPHS)
    if plus_one:
        assert ALWAYS_PLUS_ONE[0] in BASE["srt/models/lm.py"]
        write_tree(tree, {"srt/models/lm.py": BASE["srt/models/lm.py"].replace(*ALWAYS_PLUS_ONE)})
    found = findings(tree, ids(layers))
    assert [f["id"] for f in found] == expected
    assert all(f["severity"] == "warning" for f in found)
    if "default-graphs" in expected:
        assert "srt/model_executor/graph_runner.py:4 call set_eagle3" in found[0]["why"]
        assert "[1, 29, 57]" in found[0]["remedy"]


def test_a_rule_for_layers_that_is_not_understood_is_said(tree):
    write_tree(
        tree, {"srt/models/lm.py": BASE["srt/models/lm.py"].replace("layer_ids[0] == 1", "self.special")}
    )
    assert [f["id"] for f in findings(tree, {})] == ["aux-layers-rule"]


def test_context_and_layers_of_a_config():
    assert (
        context_of({"max_position_embeddings": 8, "rope_scaling": {"rope_type": "llama3", "factor": 8}}) == 8
    )
    assert context_of({}) is None
    assert aux_layer_ids({"eagle_config": {}}) is None


# --- the module


@pytest.mark.parametrize("text", ["DOCUMENTATION", "EXAMPLES", "RETURN"])
def test_module_documents_itself(text):
    assert yaml.safe_load(getattr(sglang_contract, text))


def run_module(monkeypatch, capsys, **params):
    with patch_module_args(params), pytest.raises(SystemExit) as ended:
        sglang_contract.main()
    return ended.value.code, json.loads(capsys.readouterr().out)


@pytest.fixture
def configs(tmp_path):
    (tmp_path / "target.json").write_text(json.dumps(TARGET))
    (tmp_path / "drafter.json").write_text(json.dumps(DRAFTER))
    return {"target_config": str(tmp_path / "target.json"), "drafter_config": str(tmp_path / "drafter.json")}


@pytest.mark.parametrize("check", [False, True])
def test_module_passes_a_good_tree(monkeypatch, capsys, tree, configs, check):
    code, result = run_module(
        monkeypatch, capsys, path=str(tree), class_name="Wrapper", _ansible_check_mode=check, **configs
    )
    assert code == 0
    assert (result["verdict"], result["findings"], result["changed"]) == ("satisfied", [], False)


def test_module_fails_with_every_problem_and_the_evidence(monkeypatch, capsys, tree, configs):
    write_tree(tree, UNPATCHED)
    pathlib.Path(configs["drafter_config"]).write_text(json.dumps(dict(DRAFTER, hidden_size=1)))
    code, result = run_module(monkeypatch, capsys, path=str(tree), class_name="Wrapper", **configs)
    assert code == 1
    assert "has no get_embed_and_head" in result["msg"] and "hidden states of 1" in result["msg"]
    assert result["verdict"] == "missing" and len(result["missing"]) == 1


def test_module_reports_only_where_it_is_not_to_enforce(monkeypatch, capsys, tree):
    write_tree(tree, UNPATCHED)
    code, result = run_module(monkeypatch, capsys, path=str(tree), class_name="Wrapper", enforce=False)
    assert (code, result["verdict"]) == (0, "missing")


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "cannot be read as a model configuration"),
        ("{", "cannot be read"),
        ("[]", "holds no JSON object"),
    ],
)
def test_module_refuses_a_bad_configuration(monkeypatch, capsys, tree, configs, text, message):
    path = pathlib.Path(configs["target_config"])
    path.unlink() if text is None else path.write_text(text)
    code, result = run_module(monkeypatch, capsys, path=str(tree), class_name="Wrapper", **configs)
    assert code == 1 and message in result["msg"] and str(path) in result["msg"]


def test_module_refuses_a_tree_that_is_not_staged(monkeypatch, capsys, tree):
    shutil.rmtree(tree)
    code, result = run_module(monkeypatch, capsys, path=str(tree), class_name="Wrapper")
    assert code == 1 and "is not a folder; stage the engine" in result["msg"]


def test_module_wants_both_configurations(monkeypatch, capsys, tree, configs):
    code, result = run_module(
        monkeypatch, capsys, path=str(tree), class_name="Wrapper", target_config=configs["target_config"]
    )
    assert code == 1 and "required together" in result["msg"]
