# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Does a drafter fit a target in a given release? Answered from both config.json and the sources."""

from __future__ import annotations

import re

from .contract_forward import capture_rule, captured_layers, language_model
from .releases_facts import FIRST_RELEASE

_CONTEXT_KEYS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)


def text_config(config):
    """Return the part of a config.json that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def context_of(config):
    """Return the context length (tokens) that SGLang derives from a config.json, None if it states none."""
    text = text_config(config)
    scaling = text.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    factor = (
        1 if "original_max_position_embeddings" in scaling or kind == "llama3" else scaling.get("factor", 1)
    )
    for key in _CONTEXT_KEYS:
        if text.get(key) is not None:
            return int(factor * text[key])
    return None


def aux_layer_ids(config):
    """Return the layer ids that a drafter's config.json asks for, None where the engine decides."""
    eagle = config.get("eagle_config")
    return eagle.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle, dict) else None


def check_drafter(result, drafter, target, context_length=None):
    """Compare a drafter with a target in an audited release.

    `result` is what contract.audit returned; `drafter` and `target` are the parsed config.json;
    `context_length` (tokens) is what the server will be started with, None for the target's own.
    Returns findings ``{"id", "severity", "what", "why", "remedy"}``; severity is error, warning or note.
    """
    findings = []
    findings += _architecture(result, drafter)
    findings += _shapes(drafter, target)
    findings += _head(result, drafter, target)
    findings += _context(drafter, target, context_length)
    findings += _layers(result, drafter, target)
    findings += _attention(drafter, target)
    return findings


def _finding(name, severity, what, why, remedy):
    return {"id": name, "severity": severity, "what": what, "why": why, "remedy": remedy}


def _name_of(config):
    names = config.get("architectures") or [None]
    return names[0]


def _architecture(result, drafter):
    name = _name_of(drafter)
    if name is None:
        return [
            _finding(
                "drafter-architecture",
                "error",
                "the drafter's config.json names no architecture",
                "SGLang picks the model class by it",
                "take the config.json that belongs to the drafter's weights",
            )
        ]
    known, unread = result["tree"].architectures()
    if name in known:
        if "eagle3" not in name.lower():
            return [
                _finding(
                    "drafter-architecture",
                    "error",
                    f"{name} is no EAGLE-3 drafter",
                    "EAGLE3 feeds the drafter with the target's hidden states, which only EAGLE-3 classes "
                    "take",
                    "give the drafter's config.json, not a target's",
                )
            ]
        return []
    if any(
        re.search(rf"^class {re.escape(name)}\b", result["tree"].texts[path], re.MULTILINE) for path in unread
    ):
        return []
    # For the remedy only: whether the release has the class is read from its registry.
    first = FIRST_RELEASE.get(name)
    since = f" (it came with SGLang {first})" if first else ""
    drafters = sorted(n for n in known if "eagle3" in n.lower())
    return [
        _finding(
            "drafter-architecture",
            "error",
            "SGLang {} has no model class {}{}".format(result["version"] or "in this tree", name, since),
            "the drafter is loaded after the target: the start would fail minutes into the load",
            (f"take SGLang {first} or later, or " if first else "take ")
            + "a drafter of an architecture that this release has: {}".format(", ".join(drafters)),
        )
    ]


def _shapes(drafter, target):
    findings = []
    text = text_config(target)
    hidden = drafter.get("target_hidden_size") or drafter.get("hidden_size")
    if hidden != text.get("hidden_size"):
        key = "target_hidden_size" if drafter.get("target_hidden_size") else "hidden_size"
        findings.append(
            _finding(
                "hidden-size",
                "error",
                "the drafter expects hidden states of {} ({}), the target has {}".format(
                    hidden, key, text.get("hidden_size")
                ),
                "its first layer takes the target's hidden states; the load or the first forward pass would "
                "fail",
                "take a drafter that was trained for this target",
            )
        )
    if drafter.get("vocab_size") != text.get("vocab_size"):
        findings.append(
            _finding(
                "vocabulary",
                "error",
                "the drafter's vocabulary is {}, the target's {}".format(
                    drafter.get("vocab_size"), text.get("vocab_size")
                ),
                "drafted token ids must mean the same token to both; the drafter also borrows the target's "
                "embedding",
                "take a drafter that was trained for this target",
            )
        )
    return findings


def _head(result, drafter, target):
    vocabulary = drafter.get("vocab_size")
    draft = drafter.get("draft_vocab_size")
    if draft is None:
        path = result["tree"].architectures()[0].get(_name_of(drafter))
        source = result["tree"].texts.get(path, "")
        reads_bare = (
            re.search(r"config\.draft_vocab_size is None", source) and "draft_vocab_size" not in drafter
        )
        if reads_bare and not drafter.get("tie_word_embeddings"):
            return [
                _finding(
                    "draft-vocabulary",
                    "error",
                    "the drafter's config.json has no draft_vocab_size",
                    f"{path} reads it without a default and fails with an AttributeError",
                    'add "draft_vocab_size": null if the drafter shares the target\'s head, else the size '
                    "of its own",
                )
            ]
        return []
    if vocabulary is not None and draft > vocabulary:
        return [
            _finding(
                "draft-vocabulary",
                "error",
                f"draft_vocab_size {draft} is larger than vocab_size {vocabulary}",
                "the draft vocabulary is a subset of the target's",
                "take the config.json that belongs to the drafter's weights",
            )
        ]
    if vocabulary is not None and draft < vocabulary:
        return [
            _finding(
                "draft-vocabulary",
                "note",
                f"the drafter proposes {draft} of the {vocabulary} tokens",
                "its weights must hold the map `d2t` from draft ids to token ids, which a config.json "
                "cannot show",
                "nothing to do if the weights are the published ones",
            )
        ]
    return []


def _context(drafter, target, context_length):
    findings = []
    own = context_of(target)
    wanted = context_length or own
    limit = context_of(drafter)
    if context_length is not None and own is not None and context_length > own:
        findings.append(
            _finding(
                "context-target",
                "error",
                f"the context length {context_length} exceeds the target's {own}",
                "SGLang refuses to start with it",
                f"set --context-length to {own} or less",
            )
        )
    if wanted is not None and limit is not None and limit < wanted:
        findings.append(
            _finding(
                "context-drafter",
                "error",
                f"the drafter reaches {limit} positions, the server would serve {wanted}",
                "SGLang refuses such a drafter at start; where it is forced, the drafter fails past its "
                "last position",
                f"set --context-length to {limit} or less, or take a drafter with at least {wanted} "
                "positions",
            )
        )
    return findings


def _layers(result, drafter, target):
    ids = aux_layer_ids(drafter)
    count = text_config(target).get("num_hidden_layers")
    if ids is None or not isinstance(count, int):
        return []
    if not (
        isinstance(ids, list) and ids and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    ):
        return [
            _finding(
                "aux-layers",
                "error",
                f"eagle_aux_hidden_state_layer_ids is {ids!r}",
                "it must be a list of layer numbers",
                "take the config.json that belongs to the drafter's weights",
            )
        ]
    findings = []
    setter = result["setter"]
    model, _attribute = language_model(result["wrapper"], setter)
    rule = capture_rule(model, setter) if model is not None else {"default": None, "shift": None}
    taken = captured_layers(rule, ids, count)
    bad = [i for i, layer in zip(ids, taken or ids) if not 0 < layer < count or i < 0]
    if bad or len(set(ids)) != len(ids):
        findings.append(
            _finding(
                "aux-layers",
                "error",
                f"layer ids {ids} do not all lie inside the target's {count} layers"
                if bad
                else f"layer ids {ids} repeat",
                "hidden states of a layer that is never reached are never captured, and the drafter gets "
                "too few",
                "take a drafter that was trained for this target",
            )
        )
    path = result["tree"].architectures()[0].get(_name_of(drafter))
    source = result["tree"].texts.get(path, "")
    if len(ids) != 3 and re.search(r"\bhidden_size\w*\s*\* 3\b", source):
        findings.append(
            _finding(
                "aux-layers",
                "error",
                f"the drafter takes {len(ids)} layers, and {path} takes exactly 3",
                "its first layer is built for three hidden states in this release",
                "take a later release, or a drafter of three layers",
            )
        )
    if taken is None:
        findings.append(
            _finding(
                "aux-layers-rule",
                "warning",
                "how this release turns layer ids into captured layers is not understood",
                "the audit cannot say whether the drafter gets the layers that it was trained on",
                f"compare {setter} of the language model with a release that is known to work",
            )
        )
    return findings + _default_graphs(result, rule, ids, taken, count) + _shift(rule, ids, taken)


def _default_graphs(result, rule, ids, taken, count):
    """Releases that call the setter without ids before the graphs are captured: 0.5.9 and 0.5.10."""
    early = [
        s
        for s in result["sites"]
        if s.name == result["setter"] and s.call is not None and not (s.call.args or s.call.keywords)
    ]
    default = captured_layers(rule, None, count)
    if not early or taken is None or taken == default:
        return []
    places = ", ".join(f"{s.file}:{s.line}" for s in early)
    return [
        _finding(
            "default-graphs",
            "warning",
            f"the drafter's ids {ids} capture layers {taken}, but CUDA graphs are captured with the default "
            f"{default}",
            "{} call {} without the drafter's ids before the graphs are captured: prefill and decode would "
            "feed the "
            "drafter from different layers, and it is accepted less often".format(places, result["setter"]),
            "take SGLang 0.5.11 or later, or a drafter whose ids are %s" % [i - 1 for i in default or ()],
        )
    ]


def _shift(rule, ids, taken):
    if rule["shift"] != "always" or ids[0] == 1:
        return []
    return [
        _finding(
            "layer-shift",
            "warning",
            f"this release takes layers {taken} for the drafter's ids {ids}",
            "it adds one to every id; from 0.5.13 on ids that do not start with 1 are taken as they are",
            "take SGLang 0.5.13 or later if the acceptance length is below the drafter's published one",
        )
    ]


def _attention(drafter, target):
    if text_config(target).get("kv_lora_rank") is None or drafter.get("kv_lora_rank") is not None:
        return []
    return [
        _finding(
            "draft-attention",
            "note",
            "the target uses MLA attention, the drafter does not",
            "the drafter inherits the target's attention backend; an MLA-only one (trtllm_mla, the default "
            "on sm100) "
            "refuses it after the target has loaded",
            "set --speculative-draft-attention-backend (trtllm_mha or flashinfer)",
        )
    ]
