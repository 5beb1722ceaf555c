# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Judge what a server generates: are the answers sensible, and does speculation really take place?"""

from __future__ import annotations

import json
import re
from collections import Counter

# Plain decoding is exactly 1 token a step. A drafter whose guesses are never right measures 1.00 to 1.02.
OFF_BELOW = 1.1
# The server's own figure counts all that it ever served, so it may differ from a fresh measurement.
SERVER_TOLERANCE = 0.25
REPLACEMENT = "\ufffd"


def chat_answer(text):
    """Read a chat completion: dict of model, text, thinking, finish_reason, tokens; None if it is none."""
    try:
        body = json.loads(text)
        choice = body["choices"][0]
        message = choice["message"]
        return {
            "model": body.get("model", ""),
            "text": message.get("content") or "",
            "thinking": message.get("reasoning_content") or "",
            "finish_reason": choice.get("finish_reason"),
            "tokens": (body.get("usage") or {}).get("completion_tokens", 0),
        }
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None


def degenerate(text):
    """Return what is wrong with a text (str), or None: empty, undecodable, or the same over and over."""
    if not text.strip():
        return "it is empty"
    if text.count(REPLACEMENT) > len(text) / 20:
        return "it is full of replacement characters"
    words = text.split()
    if len(words) >= 8 and Counter(words).most_common(1)[0][1] > len(words) * 0.6:
        return f"it repeats {Counter(words).most_common(1)[0][0]!r}"
    pieces = [text[i : i + 8] for i in range(len(text) - 8)]
    if len(pieces) >= 64 and len(set(pieces)) < len(pieces) / 5:
        return "it repeats itself"
    return None


def judge_answer(prompt, answer, model, strict):
    """Return what is wrong with one chat answer (str), or None.

    prompt: dict with name and, if wanted, expect (regular expression that the answer must contain).
    answer: from chat_answer. model: the expected served name, or empty for any. strict: False takes any text
    that is not empty, for checkpoints that were never trained.
    With a thinking model a short answer can be all thought: then the thought is judged.
    """
    if answer is None:
        return "the server sent no chat completion"
    if model and answer["model"] != model:
        return "it comes from the model {!r}, expected {!r}".format(answer["model"], model)
    text = answer["text"] if answer["text"].strip() else answer["thinking"]
    wrong = degenerate(text) if strict else None if text.strip() else "it is empty"
    if wrong:
        return wrong
    said = answer["text"] or answer["thinking"]
    if prompt.get("expect") and not re.search(prompt["expect"], said, re.IGNORECASE):
        return "it does not contain {!r}".format(prompt["expect"])
    return None


def meta_info(text):
    """Read an answer of the native /generate: its meta_info (dict), or None."""
    try:
        meta = json.loads(text)["meta_info"]
        return meta if isinstance(meta, dict) else None
    except (ValueError, KeyError, TypeError):
        return None


def acceptance(metas):
    """Measure the acceptance length over requests: tokens for each verify step of the target.

    metas: list of meta_info. Returns dict of length (None if nothing was speculated), tokens, verify_steps,
    requests and speculated (how many of them had verify steps). The names are the same in 0.5.9 to 0.5.23.
    """
    tokens = steps = speculated = 0
    for meta in metas:
        verified = meta.get("spec_verify_ct") or 0
        if verified:
            speculated += 1
            tokens += meta.get("completion_tokens") or 0
            steps += verified
    return {
        "length": round(tokens / steps, 3) if steps else None,
        "tokens": tokens,
        "verify_steps": steps,
        "requests": len(metas),
        "speculated": speculated,
    }


def server_acceptance(text):
    """Return avg_spec_accept_length of a /server_info answer (float), or None."""
    try:
        states = json.loads(text)["internal_states"]
        values = [state["avg_spec_accept_length"] for state in states if "avg_spec_accept_length" in state]
        return round(float(values[0]), 3) if values else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def judge_acceptance(measured, band):
    """Return what is wrong with the measured acceptance (str), or None.

    measured: from acceptance(). band: (lowest, highest) plausible length.
    """
    length = measured["length"]
    if length is None:
        return (
            "speculation is off: none of {requests} requests had a verify step. "
            "Check speculative-algorithm in server.yaml".format(**measured)
        )
    if length < OFF_BELOW:
        return (
            f"speculation is silently off: {length} tokens a step is what the target makes alone. "
            "Check that the drafter belongs to this target and that its layer ids fit"
        )
    if measured["speculated"] < measured["requests"]:
        return "only {speculated} of {requests} requests were speculated".format(**measured)
    low, high = band
    if not low <= length <= high:
        return f"the acceptance length is {length}, expected {low} to {high}"
    return None


def compare_with_server(length, server):
    """Return a remark (str) if the server's own figure is far from the measured one, or None."""
    if length is None or server is None or abs(server - length) <= length * SERVER_TOLERANCE:
        return None
    return f"the server's own average over all it served is {server}, measured now: {length}"
