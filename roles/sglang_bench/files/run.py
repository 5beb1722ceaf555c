#!/usr/bin/python3 -I
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Run SGLang's own bench_serving once, with the engine of the release that serves.

Settings as JSON on stdin: release (the link), url, metrics (the engine's own), key_file, ca_file,
environment, user, group, concurrency, requests, output_tokens.
Prints {"release", "speculation", "run"} as JSON. Exit status 1, with the benchmark's last lines, when no
request was answered. Standard library only, Python 3.8 and later.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request

PROMPTS = pathlib.Path(__file__).resolve().parent / "prompts.json"
CONFIG = re.compile(r"^([a-z0-9-]+): (.*)$", re.MULTILINE)
SETTING = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.MULTILINE)
# What is kept of the benchmark's own result: it also holds the whole server_info, with the engine's keys.
FIGURES = ("duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput")
SUMMARIES = ("mean", "median", "p90", "p95", "p99")
LATENCIES = ("ttft", "tpot", "itl", "e2e_latency")
# Tokens for each verify step come from these counters; before 0.5.13 the second is missing.
TOKENS, STEPS = "generation_tokens_total", "spec_verify_calls_total"


def read_config(text):
    """Read the scalars of a server.yaml of this project (str) into {option: value}."""
    return {key: json.loads(value) for key, value in CONFIG.findall(text)}


def read_environment(text):
    """Read the release's environment file, whose values are quoted."""
    return {key: json.loads(value) for key, value in SETTING.findall(text)}


def counters(text):
    """Sum the two counters of the engine's metrics (str): {name: float}, without those that are missing."""
    # Which of the two signs comes depends on what the client library makes of the request.
    found = {}
    for name in (TOKENS, STEPS):
        values = re.findall(rf"^sglang[:_]{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        if values:
            found[name] = sum(float(value) for value in values)
    return found


def accept_length(before, after, told):
    """Tokens for each verify step between two readings of the counters.

    told: the engine's own average since its start, the best there is where it does not count steps.
    None without speculation.
    """
    if STEPS not in after:
        return round(told, 3) if told else None
    steps = after[STEPS] - before.get(STEPS, 0)
    return round((after[TOKENS] - before.get(TOKENS, 0)) / steps, 3) if steps else None


def command(python, config, settings, dataset, output):
    """The benchmark's command line (list of str)."""
    options = {
        "backend": "sglang-oai-chat",
        "base-url": settings["url"],
        "model": config["model-path"],
        "tokenizer": config["model-path"],
        "served-model-name": config["served-model-name"],
        # The shape of its file, which every release reads; the prompts are ours.
        "dataset-name": "sharegpt",
        "dataset-path": str(dataset),
        "num-prompts": settings["requests"],
        "max-concurrency": settings["concurrency"],
        "sharegpt-output-len": settings["output_tokens"],
        "output-file": str(output),
        "seed": 1,
    }
    words = [word for name, value in options.items() for word in ("--" + name, str(value))]
    return [python, "-B", "-m", "sglang.bench_serving", *words, "--disable-tqdm"]


def figures(result, settings, accepted):
    """What is kept of a result of bench_serving: times in ms, throughput in tokens and requests a second."""
    kept = {name: result[name] for name in FIGURES}
    for latency in LATENCIES:
        values = {summary: result.get(f"{summary}_{latency}_ms") for summary in SUMMARIES}
        # Not every release has every percentile.
        kept[latency + "_ms"] = {name: value for name, value in values.items() if value is not None}
    kept.update(
        concurrency=settings["concurrency"],
        requests=settings["requests"],
        output_tokens_per_s=result["output_throughput"],
        accept_length=accepted,
    )
    return kept


def read_metrics(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return counters(answer.read().decode())


def measure(settings):
    release = pathlib.Path(settings["release"]).resolve()
    config = read_config((release / "server.yaml").read_text(encoding="utf-8"))
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/var/cache/sglang",
        "HF_HUB_OFFLINE": "1",
        **read_environment((release / "environment").read_text(encoding="utf-8")),
        **settings["environment"],
    }
    if settings["key_file"]:
        environment["OPENAI_API_KEY"] = pathlib.Path(settings["key_file"]).read_text(encoding="utf-8").strip()
    if settings["ca_file"]:
        environment.update(SSL_CERT_FILE=settings["ca_file"], REQUESTS_CA_BUNDLE=settings["ca_file"])
    prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        user = settings["user"]
        shutil.chown(folder, user)
        dataset, output = pathlib.Path(folder, "prompts.json"), pathlib.Path(folder, "result.jsonl")
        # Sent again where more are asked for than there are.
        turns = [prompts[index % len(prompts)] for index in range(settings["requests"])]
        conversations = [{"conversations": [{"value": text}, {"value": "-"}]} for text in turns]
        dataset.write_text(json.dumps(conversations), encoding="utf-8")
        dataset.chmod(0o644)
        words = command(str(release / "engine/bin/python"), config, settings, dataset, output)
        before = read_metrics(settings["metrics"])
        # Not as root: the tokenizer is code of the model.
        done = subprocess.run(
            ["setpriv", "--reuid", user, "--regid", settings["group"], "--init-groups", "--", *words],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
        after = read_metrics(settings["metrics"])
    result = json.loads(lines[-1]) if lines else {}
    if done.returncode != 0 or not result.get("completed"):
        said = "\n".join(done.stdout.splitlines()[-15:])
        sys.exit(f"bench_serving ended with status {done.returncode}, and no request was answered:\n{said}")
    accepted = accept_length(before, after, result.get("accept_length"))
    return {
        "release": str(release),
        "speculation": "speculative-algorithm" in config,
        "run": figures(result, settings, accepted),
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.load(sys.stdin))))
