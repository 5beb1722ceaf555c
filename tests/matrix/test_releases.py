# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The patch and the audit on the real sources of every published release, against releases.yml."""

from __future__ import annotations

import shutil

import pytest
from ansible.module_utils.sglang_kit.contract import ContractError, audit, audit_class, explain
from ansible.module_utils.sglang_kit.contract_calls import find_sites
from ansible.module_utils.sglang_kit.contract_drafter import check_drafter
from ansible.module_utils.sglang_kit.contract_forward import capture_rule, language_model
from ansible.module_utils.sglang_kit.contract_tree import Tree
from ansible.module_utils.sglang_kit.delegate_source import Refusal
from ansible.module_utils.sglang_kit.releases_flags import read_flags
from matrix_support import EXPECTED, registry, release_of

MODEL = "KimiK25ForConditionalGeneration"
FILE = "srt/models/kimi_k25.py"
METHODS = ["set_eagle3_layers_to_capture", "get_embed_and_head", "set_embed_and_head"]
DRAFTERS = {"llama": "LlamaForCausalLMEagle3", "mla": "Eagle3DeepseekV2ForCausalLM"}
TEXT = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "kv_lora_rank": 512,
}


def kimi_plan(release):
    source = ("srt/models/deepseek_v2.py", "DeepseekV3ForCausalLM")
    return release.plan(FILE, MODEL, "language_model", METHODS, *source)


def drafter_findings(result, family, ids):
    drafter = dict(
        TEXT,
        architectures=[DRAFTERS[family]],
        num_hidden_layers=1,
        draft_vocab_size=TEXT["vocab_size"],
        eagle_config={"eagle_aux_hidden_state_layer_ids": ids},
    )
    return check_drafter(result, drafter, {"text_config": TEXT})


def told(result):
    return "\n".join(explain(dict(result, findings=[])))


def names(entries):
    return sorted({entry["name"] for entry in entries})


def test_the_registry_answers():
    published, error = registry()
    assert error is None, error
    gone = sorted(set(EXPECTED["releases"]) - set(published))
    assert not gone, f"described in releases.yml, but no longer published: {gone}"


def test_the_patch_does_what_is_expected(release):
    if release.expected.outcome == "refuse":
        with pytest.raises(Refusal, match=r"no file .*kimi_k25\.py"):
            kimi_plan(release)
        return
    made = kimi_plan(release)
    word = {"add": "added", "upstream": "upstream"}[release.expected.outcome]
    assert {name: found["outcome"] for name, found in made.methods.items()} == dict.fromkeys(METHODS, word)
    assert (made.after == made.before) == (word == "upstream")


def test_the_contract_is_satisfied_after_the_patch(release):
    if release.expected.outcome == "refuse":
        with pytest.raises(ContractError, match=f"{MODEL} in .*: not defined under srt/models"):
            release.audit(MODEL)
        return
    result = release.audit(MODEL, {FILE: kimi_plan(release).after.decode()})
    assert result["verdict"] == "satisfied", told(result)
    assert result["version"] == release.version


def test_the_contract_is_what_the_release_asks_for(served):
    result = served.audit(MODEL)
    asked = sorted({site.name for site in served.sites if site.required})
    assert asked == served.expected.asks
    lacking = [name for name in asked if name in METHODS] if served.expected.outcome == "add" else []
    assert names(result["missing"]) == lacking
    assert result["not_understood"] == []


def test_the_places_are_real(release):
    for site in release.sites:
        lines = release.tree.texts[site.file].splitlines()[site.line - 1 :]
        assert any(site.name in line for line in lines[:3]), f"{site.file}:{site.line} {site.name}"


@pytest.mark.parametrize("family", sorted(DRAFTERS))
def test_the_drafters_that_can_be_loaded(served, family):
    found = drafter_findings(served.audit(MODEL), family, [2, 30, 58])
    errors = [finding["id"] for finding in found if finding["severity"] == "error"]
    assert errors == ([] if family in served.expected.drafters else ["drafter-architecture"])


@pytest.mark.parametrize("ids", [[1, 29, 57], None, [2, 30, 58]])
def test_the_layers_that_are_captured(served, ids):
    result = served.audit(MODEL)
    model, attribute = language_model(result["wrapper"], result["setter"])
    assert (model.name, attribute) == ("DeepseekV3ForCausalLM", "language_model")
    assert capture_rule(model, result["setter"])["shift"] == served.expected.layers
    found = [finding["id"] for finding in drafter_findings(result, "llama", ids)]
    assert ("default-graphs" in found) == (served.expected.early and ids == [2, 30, 58])
    assert ("layer-shift" in found) == (served.expected.layers == "always" and ids == [2, 30, 58])


def test_the_flags_of_the_kit_are_read(release):
    flags = read_flags(str(release.package))
    for name in ("model-path", "tp-size", "speculative-draft-model-path", "kv-cache-dtype", "dist-timeout"):
        assert flags[name]["in_file"], name
    assert "fp8_e4m3" in flags["kv-cache-dtype"]["choices"]
    assert len(flags) > 300


def test_other_wrappers(release, wrapper):
    result = release.audit(wrapper["class"])
    assert names(result["missing"]) == wrapper["lacks"]
    assert result["verdict"] == ("missing" if wrapper["lacks"] else "satisfied"), told(result)
    if wrapper["lacks"]:
        file, source = result["model"].rpartition(":")[0], wrapper["source"]
        wanted = (wrapper["class"], wrapper["delegate"], wrapper["lacks"])
        made = release.plan(file, *wanted, source["file"], source["class"])
        patched = release.audit(wrapper["class"], {file: made.after.decode()})
        assert patched["verdict"] == "satisfied", told(patched)


def test_a_patched_tree_on_disk(tmp_path):
    release = release_of("0.5.9")
    shutil.copytree(release.package, tmp_path / "sglang")
    (tmp_path / "sglang" / FILE).write_bytes(kimi_plan(release).after)
    result = audit(str(tmp_path), MODEL)
    assert result["verdict"] == "satisfied"
    assert {entry["where"].rpartition(":")[0] for entry in result["satisfied"]} == {FILE}


# Tomorrow's release asks for one thing more, for the same under a new name, or in a way that cannot be read.
COMING = [
    ("target_model.get_embed_and_head(), target_model.extra()", "extra"),
    ("target_model.take_embed_and_head()", "take_embed_and_head"),
    ("getattr(target_model, GETTER)()", None),
    ("GETTERS[type(target_model)](target_model)", None),
]


@pytest.mark.parametrize("asked, name", COMING)
def test_what_a_coming_release_may_ask(asked, name):
    tree = Tree(str(release_of("0.5.23").package))
    place, today = "srt/speculative/pp_draft_embedding.py", "return target_model.get_embed_and_head()"
    assert tree.texts[place].count(today) == 1
    tree.texts[place] = tree.texts[place].replace(today, "return " + asked)
    result = audit_class(tree, find_sites(tree), MODEL)
    assert result["verdict"] == ("not_understood" if name is None else "missing")
    entry = result[result["verdict"]][0]
    assert (entry["file"], entry["name"]) == (place, name)
