# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Traps in a configuration that the engine's parser accepts: data, the facts they are about, and how to ask.

A rule holds if all its conditions ``(fact, operator, operand)`` do and the release lies within its bounds. A
fact that is not known is None: no rule but one that asks for None holds then.
"""

from __future__ import annotations

import ipaddress

from .contract_drafter import text_config
from .releases_facts import RENAMED, VersionError, known_for

DATACENTRE = ("sm100", "sm103")
BLACKWELL = (*DATACENTRE, "sm120")
# What takes MLA models only.
MLA_ONLY = ("trtllm_mla", "tokenspeed_mla", "cutedsl_mla", "cutlass_mla", "flashmla")
# What verifies one chain of draft tokens, not a tree of them.
CHAIN_ONLY = (*MLA_ONLY, "trtllm_mha")
ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO", "FROZEN_KV_MTP")

# Options that releases dropped, in the words of the last one that had them.
SUCCESSORS = dict(
    {
        "dsa-prefill-cp-mode": "--cp-strategy",
        "enable-breakable-cuda-graph": "--cuda-graph-backend-prefill=breakable",
        "enable-dsa-prefill-context-parallel": "--enable-prefill-cp",
        "enable-expert-distribution-metrics": "--expert-balancedness-report-mode",
        "enable-nsa-prefill-context-parallel": "--enable-prefill-cp",
        "enable-prefill-context-parallel": "--enable-prefill-cp",
        "enforce-piecewise-cuda-graph": "--cuda-graph-backend-prefill=tc_piecewise",
        "hybrid-kvcache-ratio": "--swa-full-tokens-ratio",
        "keep-mm-feature-on-device": "--mm-feature-transport=cuda_ipc",
        "mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
        "nsa-decode-backend": "--dsa-decode-backend",
        "nsa-prefill-backend": "--dsa-prefill-backend",
        "nsa-prefill-cp-mode": "--cp-strategy",
        "piecewise-cuda-graph-tokens": "--cuda-graph-bs-prefill",
        "prefill-cp-mode": "--cp-strategy",
        "speculative-dflash-draft-window-size": "--speculative-draft-window-size",
        "stream-output": "--incremental-streaming-output",
    },
    **RENAMED,
)
# The same in options that a file may set in every release that has them.
FILE_FORMS = {
    "disable-cuda-graph": "--disable-decode-cuda-graph=true and --disable-prefill-cuda-graph=true",
    "disable-piecewise-cuda-graph": "--disable-prefill-cuda-graph=true",
}
# Options that releases dropped, and that nothing took the place of.
DROPPED = {
    "collect-tokens-histogram": "enable-metrics collects it",
    "enable-piecewise-cuda-graph": "it is the default since 0.5.10",
    "prefill-round-robin-balance": "it did nothing any more",
    "torchao-config": "SGLang dropped torchao in 0.5.18",
}

OPERATORS = {
    "is": lambda fact, operand: fact is operand if operand in (None, True, False) else fact == operand,
    "is not": lambda fact, operand: fact is not operand,
    "in": lambda fact, operand: fact is not None and fact in operand,
    "not in": lambda fact, operand: fact is not None and fact not in operand,
    "above": lambda fact, operand: fact is not None and fact > operand,
    "differs from": lambda fact, operand: None not in (fact, operand) and fact != operand,
}

RULES = [
    {
        "id": "drafter-backend",
        "key": "speculative-draft-attention-backend",
        "severity": "error",
        "when": [("drafter", "is", "mha"), ("drafter-backend", "in", MLA_ONLY)],
        "found": "a drafter without MLA that would run on {drafter-backend}",
        "expected": "a backend for models without MLA",
        "remedy": "set it to trtllm_mha on B200 and B300, to flashinfer elsewhere; the engine would die once "
        "the weights are loaded",
        "source": "sglang#23490",
    },
    {
        "id": "drafter-backend-mla",
        "key": "speculative-draft-attention-backend",
        "severity": "error",
        "when": [("drafter", "is", "mla"), ("drafter-backend", "is", "trtllm_mha")],
        "found": "an MLA drafter that would run on trtllm_mha, which takes models without MLA only",
        "expected": "the target's own backend",
        "remedy": "set it to false, so that the drafter shares the target's backend",
        "source": "SGLang attention_registry.py",
    },
    {
        "id": "drafter-backend-unknown",
        "key": "speculative-draft-attention-backend",
        "severity": "error",
        "when": [("drafter-backend-known", "is", False)],
        "found": "{speculative-draft-attention-backend}, which is none of this release's attention backends",
        "expected": "one of the choices of attention-backend",
        "remedy": "correct it: the parser lets any text pass, the engine dies once the weights are loaded",
        "source": "SGLang draft_utils.py",
    },
    {
        "id": "drafter-backend-unfit",
        "key": "speculative-draft-attention-backend",
        "severity": "error",
        "when": [
            ("eagle", "is", True),
            ("drafter-backend", "in", ("torch_native", "flex_attention", "cutlass_mla", "wave")),
        ],
        "found": "{drafter-backend}, with which no release can draft",
        "expected": "a backend that EAGLE supports",
        "remedy": "set it to flashinfer, triton or trtllm_mha",
        "source": "SGLang draft_utils.py",
    },
    {
        "id": "inherited-quantization",
        "key": "speculative-draft-model-quantization",
        "severity": "error",
        "when": [
            ("eagle", "is", True),
            ("quantization", "is not", None),
            ("quantization", "not in", ("unquant",)),
            ("speculative-draft-model-quantization", "is", None),
            ("drafter-quantized", "is", False),
        ],
        "found": "nothing, so that the unquantized drafter is loaded as {quantization}, like the target",
        "expected": "unquant",
        "remedy": "set it to unquant, or leave quantization out: it is read from the checkpoint",
        "source": "sglang#28196",
    },
    {
        "id": "quantization-clash",
        "key": "quantization",
        "severity": "error",
        "when": [("quantization-clash", "is", True)],
        "found": "{quantization}, where the checkpoint is {target-quantization}",
        "expected": "what the checkpoint is",
        "remedy": "leave it out: it is read from the checkpoint",
        "source": "SGLang model_config.py",
    },
    {
        "id": "running-requests",
        "key": "max-running-requests",
        "severity": "warning",
        "when": [("speculates", "is", True), ("max-running-requests", "is", None)],
        "found": "nothing, which speculation turns into 48",
        "expected": "the number of requests that you mean to serve at once",
        "remedy": "set it: what comes above 48 would wait in silence",
        "source": "SGLang server_args.py",
    },
    {
        "id": "draft-tokens",
        "key": "speculative-num-draft-tokens",
        "severity": "warning",
        "when": [
            ("eagle", "is", True),
            ("speculative-eagle-topk", "is", 1),
            ("draft-tokens-surplus", "differs from", 0),
        ],
        "found": "{speculative-num-draft-tokens} with {speculative-num-steps} steps and topk 1",
        "expected": "steps + 1, which the engine makes of it",
        "remedy": "set it to steps + 1",
        "source": "SGLang server_args.py",
    },
    {
        "id": "draft-numbers",
        "key": "speculative-num-steps",
        "severity": "error",
        "when": [
            ("eagle", "is", True),
            ("speculative-adaptive", "is not", True),
            ("draft-numbers", "in", (1, 2)),
        ],
        "found": "only some of speculative-num-steps, -eagle-topk and -num-draft-tokens",
        "expected": "all three, or none",
        "remedy": "set all three; 3, 1 and 4 is what Kimi-K2.5's drafters are measured with",
        "source": "SGLang server_args.py",
    },
    {
        "id": "tree-backend",
        "key": "speculative-eagle-topk",
        "severity": "error",
        "when": [
            ("eagle", "is", True),
            ("speculative-eagle-topk", "above", 1),
            ("chain-backend", "is not", None),
        ],
        "found": "{speculative-eagle-topk} with {chain-backend}",
        "expected": "1, as this backend verifies no trees",
        "remedy": "set it to 1, and speculative-num-draft-tokens to steps + 1",
        "source": "SGLang server_args.py",
    },
    {
        "id": "tree-spec-v2",
        "key": "speculative-eagle-topk",
        "severity": "error",
        "when": [
            ("eagle", "is", True),
            ("speculative-eagle-topk", "above", 1),
            ("env:SGLANG_ENABLE_SPEC_V2", "in", ("1", "true", "True")),
        ],
        "until": "0.5.10.post1",
        "found": "{speculative-eagle-topk} with SGLANG_ENABLE_SPEC_V2",
        "expected": "1",
        "remedy": "set it to 1, or take SGLANG_ENABLE_SPEC_V2 out of sglang_server_environment",
        "source": "SGLang server_args.py",
    },
    {
        "id": "spec-v2",
        "key": "",
        "severity": "warning",
        "when": [("env:SGLANG_ENABLE_SPEC_V2", "is not", None)],
        "since": "0.5.14",
        "found": "SGLANG_ENABLE_SPEC_V2 in the environment, which means nothing since 0.5.14",
        "expected": "an environment that is read",
        "remedy": "take it out of sglang_server_environment",
        "source": "sglang#27964",
    },
    {
        "id": "no-drafter",
        "key": "speculative-draft-model-path",
        "severity": "error",
        "when": [("algorithm", "is", "EAGLE3"), ("drafter-path", "is", None)],
        "found": "nothing, so that the target itself would be loaded a second time as its drafter",
        "expected": "the folder of the drafter",
        "remedy": "set sglang_server_drafter_path",
        "source": "sglang#36528",
    },
    {
        "id": "no-speculation",
        "key": "speculative-algorithm",
        "severity": "warning",
        "when": [("speculates", "is", False), ("drafter-path", "is not", None)],
        "found": "nothing, so that the drafter is not used",
        "expected": "EAGLE3",
        "remedy": "set it to EAGLE3 if speculation is wanted",
        "source": "kit",
    },
    {
        "id": "unknown-algorithm",
        "key": "speculative-algorithm",
        "severity": "error",
        "when": [("algorithm", "not in", ALGORITHMS)],
        "since": "0.5.12",
        "found": "{speculative-algorithm}, which the parser lets pass and the engine then refuses",
        "expected": "EAGLE3",
        "remedy": "correct it",
        "source": "SGLang spec_info.py",
    },
    {
        "id": "tokenspeed-dtype",
        "key": "kv-cache-dtype",
        "severity": "error",
        "when": [("target-backend", "is", "tokenspeed_mla"), ("kv-cache-dtype", "not in", ("fp8_e4m3",))],
        "since": "0.5.12",
        "until": "0.5.22",
        "found": "{kv-cache-dtype} with tokenspeed_mla",
        "expected": "fp8_e4m3",
        "remedy": "set it to fp8_e4m3",
        "source": "sglang#28201",
    },
    {
        "id": "tokenspeed-renamed",
        "key": "attention-backend",
        "severity": "warning",
        "when": [("target-backend", "is", "tokenspeed_mla")],
        "since": "0.5.23",
        "found": "tokenspeed_mla, a deprecated name",
        "expected": "cutedsl_mla, which it stands for",
        "remedy": "use cutedsl_mla with kv-cache-dtype fp8_e4m3 and speculative-attention-mode decode",
        "source": "SGLang serving_hook.py",
    },
    {
        "id": "trtllm-dtype",
        "key": "kv-cache-dtype",
        "severity": "error",
        "when": [
            ("target-backend", "is", "trtllm_mla"),
            ("kv-cache-dtype", "not in", ("auto", "bf16", "fp8_e4m3", "fp4_e2m1")),
        ],
        "found": "{kv-cache-dtype} with trtllm_mla",
        "expected": "auto, bf16 or fp8_e4m3",
        "remedy": "set it to fp8_e4m3, or to bf16 in this spelling",
        "source": "SGLang server_args.py",
    },
    {
        "id": "target-backend",
        "key": "attention-backend",
        "severity": "error",
        "when": [("target", "is", "mla"), ("target-backend", "is", "trtllm_mha")],
        "found": "trtllm_mha, which takes models without MLA only",
        "expected": "a backend for MLA models",
        "remedy": "set it to trtllm_mla on B200 and B300, to flashinfer on sm120",
        "source": "SGLang attention_registry.py",
    },
    {
        "id": "sm120-attention",
        "key": "attention-backend",
        "severity": "error",
        "when": [("profile", "is", "sm120"), ("target-backend", "in", ("cutedsl_mla", "cutlass_mla"))],
        "found": "{target-backend} on sm120, for which its kernels do not exist",
        "expected": "flashinfer or triton",
        "remedy": "set it to flashinfer",
        "source": "SGLang overrides.py",
    },
    {
        "id": "sm120-trtllm",
        "key": "attention-backend",
        "severity": "warning",
        "when": [("profile", "is", "sm120"), ("target-backend", "in", ("trtllm_mla", "tokenspeed_mla"))],
        "found": "{target-backend} on sm120, where SGLang accepts it and users report that its kernels fail",
        "expected": "flashinfer or triton",
        "remedy": "set it to flashinfer, unless you have seen it serve on this board",
        "source": "field reports",
    },
    {
        "id": "sm120-drafter",
        "key": "speculative-draft-attention-backend",
        "severity": "warning",
        "when": [("profile", "is", "sm120"), ("drafter-backend", "is", "trtllm_mha")],
        "found": "trtllm_mha on sm120, for which SGLang itself never picks it",
        "expected": "flashinfer or triton",
        "remedy": "set it to flashinfer",
        "source": "SGLang model_override_base.py",
    },
    {
        "id": "sm120-moe",
        "key": "moe-runner-backend",
        "severity": "error",
        "when": [
            ("profile", "is", "sm120"),
            ("moe-runner-backend", "in", ("flashinfer_trtllm", "flashinfer_trtllm_routed")),
        ],
        "found": "{moe-runner-backend} on sm120, for which its kernels do not exist",
        "expected": "auto, flashinfer_cutlass or triton",
        "remedy": "leave it out",
        "source": "SGLang overrides.py",
    },
    {
        "id": "sm120-fp4",
        "key": "fp4-gemm-backend",
        "severity": "error",
        "when": [("profile", "is", "sm120"), ("fp4-gemm-runner-backend", "is", "flashinfer_trtllm")],
        "found": "flashinfer_trtllm on sm120, for which its kernels do not exist",
        "expected": "auto or flashinfer_cutlass",
        "remedy": "leave it out",
        "source": "SGLang overrides.py",
    },
    {
        "id": "fa3",
        "key": "attention-backend",
        "severity": "error",
        "when": [("profile", "in", BLACKWELL), ("target-backend", "is", "fa3")],
        "found": "fa3, which ends before Blackwell",
        "expected": "a backend for this GPU",
        "remedy": "leave it out on B200 and B300, set it to flashinfer on sm120",
        "source": "SGLang attention_registry.py",
    },
    {
        "id": "memory-fraction",
        "key": "mem-fraction-static",
        "severity": "error",
        "when": [("memory-fraction-sound", "is", False)],
        "found": "{mem-fraction-static}",
        "expected": "a part of one, between 0 and 1",
        "remedy": "start at 0.8",
        "source": "kit",
    },
    {
        "id": "ranks",
        "key": "tp-size",
        "severity": "error",
        "when": [("nnodes", "above", 1), ("tp-size", "is not", None), ("ranks-left-over", "above", 0)],
        "found": "{tp-size} GPUs over {nnodes} hosts",
        "expected": "a multiple of the hosts, as each holds the same part of the model",
        "remedy": "set sglang_server_tp_size to the GPUs of all hosts of the group together",
        "source": "SGLang server_args.py",
    },
    {
        "id": "host",
        "key": "host",
        "severity": "error",
        "when": [("loopback", "is", False)],
        "found": "{host}, where others reach every management route of the engine",
        "expected": "a loopback address",
        "remedy": "set sglang_server_host to 127.0.0.1 and let the edge serve the network",
        "source": "sglang#30166",
    },
    {
        "id": "key-in-clear",
        "key": "api-key",
        "severity": "error",
        "when": [("api-key", "is not", None)],
        "found": "a key in clear in the arguments",
        "expected": "none: the launcher adds it when it starts the engine",
        "remedy": "leave it out, and take a new key: this one lies in files and logs",
        "source": "kit",
    },
    {
        "id": "admin-key-in-clear",
        "key": "admin-api-key",
        "severity": "error",
        "when": [("admin-api-key", "is not", None)],
        "found": "a key in clear in the arguments",
        "expected": "none: the launcher adds it when it starts the engine",
        "remedy": "leave it out, and take a new key: this one lies in files and logs",
        "source": "kit",
    },
    {
        "id": "tokenizer-workers",
        "key": "tokenizer-worker-num",
        "severity": "error",
        "when": [("tokenizer-worker-num", "above", 1)],
        "found": "{tokenizer-worker-num}, with which the engine checks no keys, or refuses to start with one",
        "expected": "1",
        "remedy": "leave it out",
        "source": "SGLang http_server.py",
    },
    {
        "id": "grpc",
        "key": "grpc-port",
        "severity": "error",
        "when": [("grpc-port", "is not", None)],
        "since": "0.5.16",
        "found": "{grpc-port}, a listener that checks no keys",
        "expected": "none",
        "remedy": "leave it out",
        "source": "SGLang serving_hook.py",
    },
    {
        "id": "logit-processor",
        "key": "enable-custom-logit-processor",
        "severity": "error",
        "when": [("enable-custom-logit-processor", "is", True)],
        "found": "true, which lets every client run code in the engine",
        "expected": "false",
        "remedy": "leave it out",
        "source": "CVE-2026-7304",
    },
    {
        "id": "warm-up",
        "key": "skip-server-warmup",
        "severity": "warning",
        "when": [("profile", "in", BLACKWELL), ("skip-server-warmup", "is", True)],
        "found": "true, so that the first client pays for the compilation and nothing tests the start",
        "expected": "false in production",
        "remedy": "leave it out",
        "source": "SGLang http_server.py",
    },
    {
        "id": "load-format",
        "key": "load-format",
        "severity": "warning",
        "when": [
            ("modelopt", "is", True),
            ("load-format", "not in", ("auto", "runai_streamer", "remote_instance", "dummy")),
        ],
        "found": "{load-format}, which the loader of ModelOpt checkpoints does not look at",
        "expected": "auto",
        "remedy": "leave it out",
        "source": "SGLang loader.py",
    },
    {
        "id": "remote-code",
        "key": "trust-remote-code",
        "severity": "error",
        "when": [("remote-code", "is", True), ("trust-remote-code", "is", False)],
        "found": "false, where the model brings its tokenizer and its processor as code",
        "expected": "true: the revision is pinned and verified",
        "remedy": "set it to true",
        "source": "kit",
    },
]


def facts_of(values, attention, profile=None, environment=None, target=None, drafter=None):
    """Return what rules ask for: the parsed values by option, and what follows from them.

    `attention` lists the release's attention backends; `target` and `drafter` are parsed config.json, None
    where they are not known.
    """
    facts = dict(values)
    facts.update({f"env:{name}": str(value) for name, value in (environment or {}).items()})
    algorithm = values.get("speculative-algorithm")
    algorithm = algorithm.upper() if isinstance(algorithm, str) else None
    facts["profile"] = profile
    facts["algorithm"] = algorithm
    facts["speculates"] = algorithm is not None
    facts["eagle"] = algorithm in ("EAGLE", "EAGLE3", "NEXTN")
    facts["drafter-path"] = values.get("speculative-draft-model-path")
    facts["drafter"] = _kind(drafter) if facts["eagle"] else None
    facts["target"] = _kind(target)
    facts["drafter-quantized"] = None if drafter is None else bool(_quantization(drafter))
    facts["target-quantization"] = checkpoint = _quantization(target or {})
    facts["remote-code"] = None if target is None else "auto_map" in target
    asked = values.get("quantization")
    families = {str(asked).startswith("modelopt"), str(checkpoint).startswith("modelopt")}
    facts["quantization-clash"] = (
        "compressed-tensors" in (asked, checkpoint) and checkpoint is not None and families == {True, False}
    )
    facts["modelopt"] = str(asked or checkpoint).startswith("modelopt")
    facts.update(_backends(facts, attention))
    facts.update(_numbers(values))
    facts["loopback"] = _is_loopback(values.get("host"))
    return facts


def apply_rules(facts, version):
    """Return a finding for every rule that holds in a release, in the form of args.py's findings."""
    try:
        rules = known_for(RULES, version)
    except VersionError:
        # A build between releases: newer than all of them, as far as rules go.
        rules = [rule for rule in RULES if "until" not in rule]
    found = []
    for rule in rules:
        if all(OPERATORS[word](facts.get(fact), operand) for fact, word, operand in rule["when"]):
            text = {"found": rule["found"].format(**facts)}
            found.append(
                dict({n: rule[n] for n in ("id", "key", "severity", "expected", "remedy", "source")}, **text)
            )
    return found


def _kind(config):
    """Return mla or mha for a config.json, None if it is not known."""
    if config is None:
        return None
    return "mha" if text_config(config).get("kv_lora_rank") is None else "mla"


def _quantization(config):
    """Return the quantization method that a config.json states, None if there is none."""
    stated = config.get("quantization_config") or text_config(config).get("quantization_config") or {}
    return stated.get("quant_method") or ("modelopt" if stated.get("quant_algo") else None)


def _backends(facts, attention):
    """Work out which attention backend target and drafter would run on, as the releases resolve it."""
    common = facts.get("attention-backend")
    named = facts.get("decode-attention-backend") or common
    if named is None and facts.get("prefill-attention-backend") is None and facts["profile"] in DATACENTRE:
        # Asked of the architecture: Kimi-K2.5's language model is DeepSeek-V3.
        named = "trtllm_mla" if facts["target"] in (None, "mla") else None
    own = facts.get("speculative-draft-attention-backend")
    drafting = own or named
    prefill = facts.get("prefill-attention-backend") or common
    chains = [backend for backend in (named, prefill, drafting) if backend in CHAIN_ONLY]
    return {
        "target-backend": named,
        "drafter-backend": drafting if facts["eagle"] else None,
        "drafter-backend-known": None if not attention or own is None else own in attention,
        "chain-backend": chains[0] if chains else None,
    }


def _numbers(values):
    names = ("speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens")
    steps, topk, tokens = (values.get(name) for name in names)
    fraction = values.get("mem-fraction-static")
    ranks = (values.get("tp-size") or 1) * (values.get("pp-size") or 1)
    return {
        "ranks-left-over": ranks % (values.get("nnodes") or 1),
        "draft-numbers": sum(number is not None for number in (steps, topk, tokens)),
        "draft-tokens-surplus": None if None in (steps, tokens) else tokens - steps - 1,
        "memory-fraction-sound": None if fraction is None else 0 < fraction < 1,
    }


def _is_loopback(host):
    if host is None or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
