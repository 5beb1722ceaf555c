# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Judge what a server generates: are the answers sensible, and does speculation really take place?

Standard library only, Python 3.8 and later: the node's own timer imports this file from its folder.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter

# Plain decoding is exactly 1 token a step. A drafter whose guesses are never right measures 1.00 to 1.02.
OFF_BELOW = 1.1
# The server's own figure counts all that it ever served, so it may differ from a fresh measurement.
SERVER_TOLERANCE = 0.25
REPLACEMENT = "\ufffd"
# The commonest words of a language: their share of all words in a text of some length, code included.
COMMON_WORDS = {
    "en": (
        "the",
        "of",
        "and",
        "to",
        "in",
        "is",
        "a",
        "that",
        "it",
        "for",
        "on",
        "with",
        "as",
        "are",
        "be",
        "this",
    ),
}
COMMON_SHARE = 0.08
# Shorter texts tell nothing of their language.
LANGUAGE_WORDS = 20
# What of a server's settings belongs into the evidence. Never all: it returns its keys as well.
SETTINGS = (
    "version",
    "tp_size",
    "quantization",
    "kv_cache_dtype",
    "attention_backend",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_num_draft_tokens",
    "speculative_draft_attention_backend",
    "mem_fraction_static",
    "max_running_requests",
    "max_total_num_tokens",
)
# Names of accepted and proposed draft tokens: 0.5.12 and later, 0.5.11, before.
DRAFT_COUNTS = (
    ("spec_num_correct_drafts", "spec_num_proposed_drafts"),
    ("spec_accepted_drafts", "spec_proposed_drafts"),
    ("spec_accept_token_num", "spec_draft_token_num"),
)


def chat_answer(text):
    """Read a chat completion: dict of model, text, thinking, finish_reason, tokens; None if it is none."""
    try:
        body = json.loads(text)
        choice = body["choices"][0]
        message = choice["message"]
        said, thought = message.get("content") or "", message.get("reasoning_content") or ""
        if not thought and "<think>" in said[:20]:
            # No reasoning parser is on: the thought stands in the text, perhaps without its end.
            thought, _end, said = said.partition("</think>")
        return {
            "model": body.get("model", ""),
            "text": said,
            "thinking": thought,
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
    characters = set(text) - set(" \n")
    if len(text) >= 16 and len(characters) == 1:
        return f"it is made of {characters.pop()!r} alone"
    words = text.split()
    if len(words) >= 8 and Counter(words).most_common(1)[0][1] > len(words) * 0.6:
        return f"it repeats {Counter(words).most_common(1)[0][0]!r}"
    pieces = [text[i : i + 8] for i in range(len(text) - 8)]
    if len(pieces) >= 64 and len(set(pieces)) < len(pieces) / 5:
        return "it repeats itself"
    # A sensible beginning can end in a loop. Rules and table lines are made of punctuation, and short.
    loop = re.search(r"(\S.{0,39}?)\1{7,}.{0,39}$", text, re.DOTALL)
    if loop and re.search(r"\w", loop.group(1)) and loop.end(1) - loop.start() < len(loop.group()) - 40:
        return f"it ends in a loop of {loop.group(1)!r}"
    return None


def foreign(text, language):
    """Return True if a text is clearly not in that language (a key of COMMON_WORDS)."""
    letters = [char for char in text if char.isalpha()]
    if len(letters) >= LANGUAGE_WORDS and sum(char > "\u024f" for char in letters) > len(letters) / 5:
        return True
    words = re.findall(r"[^\W\d_]+", text.lower())
    common = sum(word in COMMON_WORDS[language] for word in words)
    return len(words) >= LANGUAGE_WORDS and common < len(words) * COMMON_SHARE


def judge_answer(prompt, answer, model, strict):
    """Return what is wrong with one chat answer (str), or None.

    prompt: dict with name and, if wanted, expect (regular expression in the answer) and language.
    answer: from chat_answer. model: the expected served name, or empty for any. strict: False takes any text
    that is not empty, for checkpoints that were never trained.
    With a thinking model a short answer can be all thought: then the thought is judged, and what it was cut
    off from saying is not expected of it.
    """
    if answer is None:
        return "the server sent no chat completion"
    if model and answer["model"] != model:
        return "it comes from the model {!r}, expected {!r}".format(answer["model"], model)
    text = answer["text"] if answer["text"].strip() else answer["thinking"]
    wrong = degenerate(text) if strict else None if text.strip() else "it is empty"
    if wrong:
        return wrong
    if strict and prompt.get("language") and foreign(text, prompt["language"]):
        return "it is not in the language {!r}".format(prompt["language"])
    cut_off = not answer["text"].strip() and answer["finish_reason"] == "length"
    if prompt.get("expect") and not cut_off and not re.search(prompt["expect"], text, re.IGNORECASE):
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
    requests, speculated (how many of them had verify steps), accepted and proposed (draft tokens; None where
    the release does not tell). The names of the first are the same in 0.5.9 to 0.5.23.
    """
    tokens = steps = speculated = 0
    accepted = proposed = None
    for meta in metas:
        verified = meta.get("spec_verify_ct") or 0
        if verified:
            speculated += 1
            tokens += meta.get("completion_tokens") or 0
            steps += verified
        for accepted_name, proposed_name in DRAFT_COUNTS:
            if meta.get(proposed_name):
                accepted = (accepted or 0) + (meta.get(accepted_name) or 0)
                proposed = (proposed or 0) + meta[proposed_name]
                break
    return {
        "length": round(tokens / steps, 3) if steps else None,
        "tokens": tokens,
        "verify_steps": steps,
        "requests": len(metas),
        "speculated": speculated,
        "accepted": accepted,
        "proposed": proposed,
    }


def server_settings(text):
    """Return the SETTINGS that a /server_info answer tells (dict); empty if it is none."""
    try:
        return {
            key: value for key, value in json.loads(text).items() if key in SETTINGS and value is not None
        }
    except (ValueError, AttributeError):
        return {}


def metrics_acceptance(text):
    """Return the mean of the gauge sglang:spec_accept_length in a /metrics answer (float), or None."""
    values = re.findall(r"^sglang:spec_accept_length(?:\{.*\})? (\S+)", text, re.MULTILINE)
    numbers = [float(value) for value in values if re.match(r"[\d.]+$", value)]
    return round(sum(numbers) / len(numbers), 3) if numbers else None


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


def _failure(reply):
    """Say in a line why there is no usable answer (str)."""
    return reply.error or "HTTP {}: {}".format(reply.status, " ".join(reply.text.split())[:200])


def ask_chat(server, prompt, model, sensible):
    """Send one chat request: the answer with its problem, a dict."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt["text"]}],
        "max_tokens": prompt["max_tokens"],
        "temperature": 0,
    }
    began = time.monotonic()
    reply = server.post("/v1/chat/completions", body)
    answer = chat_answer(reply.text) if reply.status == 200 else None
    if answer is None:
        problem = "no chat completion, but " + _failure(reply)
    else:
        problem = judge_answer(prompt, answer, model, sensible)
    return dict(
        answer or {},
        name=prompt["name"],
        prompt=prompt["text"],
        seconds=round(time.monotonic() - began, 2),
        problem=problem,
    )


def measure(server, prompts, native_format, band):
    """Send the prompts to the native endpoint: (the measurement, list of problems)."""
    metas, problems = [], []
    began = time.monotonic()
    for prompt in prompts:
        body = {
            "text": native_format.replace("{prompt}", prompt["text"]),
            "sampling_params": {"temperature": 0, "max_new_tokens": prompt["max_tokens"]},
        }
        reply = server.post("/generate", body)
        meta = meta_info(reply.text) if reply.status == 200 else None
        if meta is None:
            problems.append("{}: /generate gave no meta_info, but {}".format(prompt["name"], _failure(reply)))
        else:
            metas.append(meta)
    seconds = time.monotonic() - began
    measured = acceptance(metas)
    measured["tokens_per_s"] = round(sum(meta.get("completion_tokens") or 0 for meta in metas) / seconds, 1)
    info, metrics = server.get("/server_info"), server.get("/metrics")
    measured["server"] = server_acceptance(info.text) if info.status == 200 else None
    measured["metrics"] = metrics_acceptance(metrics.text) if metrics.status == 200 else None
    measured["remark"] = compare_with_server(measured["length"], measured["server"])
    if metas:
        problem = judge_acceptance(measured, band)
        if problem:
            problems.append(problem)
    return measured, problems


def prove(server, served, wanted):
    """Ask for health, for the model, for each prompt, and measure: a dict as sglang_acceptance returns it.

    server: something that gets and posts. served: reads the names out of an answer of /v1/models.
    wanted: dict of model, prompts, sensible, native_format and band, as the module's options.
    """
    result = {
        "passed": False,
        "problems": [],
        "health_status": None,
        "model": wanted["model"],
        "server": {},
        "answers": [],
        "acceptance": None,
    }
    health = server.get("/health")
    result["health_status"] = health.status
    if health.status != 200:
        said = health.error or f"HTTP {health.status}"
        result["problems"] = [f"the health endpoint does not say 200, but {said}"]
        return result
    models = served(server.get("/v1/models").text)
    if wanted["model"] and wanted["model"] not in models:
        result["problems"] = ["the server serves {}, expected {}".format(models, wanted["model"])]
        return result
    model = wanted["model"] or (models[0] if models else "")
    answers = [ask_chat(server, prompt, model, wanted["sensible"]) for prompt in wanted["prompts"]]
    problems = ["{name}: {problem}".format(**answer) for answer in answers if answer["problem"]]
    measured = None
    if wanted["band"]:
        measured, found = measure(server, wanted["prompts"], wanted["native_format"], wanted["band"])
        problems += found
        result["server"] = server_settings(server.get("/server_info").text)
    return dict(
        result, model=model, answers=answers, acceptance=measured, problems=problems, passed=not problems
    )
