# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What is known about SGLang releases and cannot be read from their sources: data, and how to ask it.

`since` and `until` are the first and the last release that an entry is about; left out, there is no bound.
"""

from __future__ import annotations

import re

# The first release of model classes that came late.
FIRST_RELEASE = {"KimiK25ForConditionalGeneration": "0.5.9", "Eagle3DeepseekV2ForCausalLM": "0.5.12"}

# Flags that left the command line, with what took their place.
RENAMED = {
    "cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "cuda-graph-bs": "--cuda-graph-bs-decode",
    "disable-cuda-graph": "--cuda-graph-backend-decode=disabled and --cuda-graph-backend-prefill=disabled",
    "enable-dp-attention": "--attn-dp-size",
    "disable-piecewise-cuda-graph": "--cuda-graph-backend-prefill=disabled",
    "piecewise-cuda-graph-max-tokens": "--cuda-graph-max-bs-prefill",
}

# NVIDIA driver branch that a CUDA generation of the kernels needs.
DRIVERS = {12: 570, 13: 580}

# Id, first and last release, subject. As published with the advisory; the official record is the authority.
_ADVISORIES = (
    ("CVE-2026-3059", None, "0.5.9", "pickle over ZMQ: code execution from the network without a login"),
    ("CVE-2026-3060", None, "0.5.9", "pickle between encoder and server: code execution without a login"),
    ("CVE-2026-7669", None, "0.5.9", "the tokenizer loader runs code from a model folder"),
    ("CVE-2026-14890", None, "0.5.14", "ZMQ of the expert-parallel backup"),
    ("CVE-2026-15969", None, "0.5.15", "/load_lora_adapter_from_tensors takes any pickle"),
    ("CVE-2026-15976", None, "0.5.15", "/update_weights_from_disk loads pickled weights"),
    ("CVE-2026-86793", None, "0.5.18", "/update_weights_from_tensor is open where no key is set"),
    ("CVE-2026-92972", None, "0.5.19", "PUT /route of the bootstrap server for prefill and decode"),
    ("CVE-2026-93034", None, "0.5.20", "pickle on ZMQ, from the network with DP attention"),
    ("CVE-2026-93088", "0.5.11", "0.5.14", "the diffusion server, which this kit does not start"),
    ("CVE-2026-109227", None, "0.5.21", "a client's video exhausts the memory"),
    ("CVE-2026-110807", None, "0.5.21", "denial of service through generation requests"),
    ("CVE-2026-110809", None, "0.5.21", "denial of service through sessions"),
    ("CVE-2026-111391", "0.5.10", "0.5.22", "the dumper's port evaluates code"),
    ("CVE-2026-111392", "0.5.13", "0.5.21", "poisoned KV cache through hashes of images"),
)
ADVISORIES = [dict(zip(("id", "since", "until", "about"), row)) for row in _ADVISORIES]

TRAPS = [
    {
        "since": "0.5.9",
        "until": "0.5.10.post1",
        "what": "CUDA graphs are captured with the default layers, whatever the drafter's configuration says",
        "remedy": "harmless with ids 1, 29, 57 or none; else take 0.5.11 or later",
    },
    {
        "until": "0.5.12.post1",
        "what": "one is added to every layer id of a drafter",
        "remedy": "take 0.5.13 or later for drafters with ids like 2, 30, 58 if the acceptance length is low",
    },
    {
        "until": "0.5.11",
        "what": "MLA drafters (Eagle3DeepseekV2ForCausalLM) cannot be loaded",
        "remedy": "take 0.5.12 or later, or a drafter of the Llama type",
    },
    {
        "until": "0.5.10.post1",
        "what": "SGLANG_ENABLE_SPEC_V2=1 is needed for overlap scheduling with speculation",
        "remedy": "set it in sglang_server_environment; from 0.5.14 on it means nothing",
    },
    {
        "until": "0.5.9",
        "what": "a scheduler that dies is noticed by nobody but /health",
        "remedy": "the gate and the monitoring watch /health; take 0.5.10 or later",
    },
    {
        "since": "0.5.10",
        "until": "0.5.13.post1",
        "what": "prefill CUDA graphs are on by default and take several GB",
        "remedy": "set disable-piecewise-cuda-graph if memory is short",
    },
    {
        "since": "0.5.12",
        "until": "0.5.12.post1",
        "what": "capture of draft graphs fails on B300 with an sm100f kernel (reported with GLM-5)",
        "remedy": "take another release on B300",
    },
    {
        "since": "0.5.14",
        "what": "drafter weights count inside mem-fraction-static",
        "remedy": "a value tuned on an older release may have to be raised",
    },
    {
        "since": "0.5.18",
        "until": "0.5.18",
        "what": "it pins FlashInfer 0.6.17, with which NVFP4 MoE gave NaN on sm100 and sm103",
        "remedy": "take another release, and let the gate judge real answers",
    },
    {
        "until": "0.5.19",
        "what": "a clean stop ends with SIGKILL, like a crash",
        "remedy": "nothing to do: the launcher tells them apart",
    },
]


class VersionError(Exception):
    """What was given is not the version of a release; the message says what is."""


def version_key(version):
    """Return a sort key: 0.5.10rc0 < 0.5.10 < 0.5.10.post1 < 0.5.11; VersionError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)+)(rc|\.post)?(\d*)", version)
    if not found or bool(found.group(2)) != bool(found.group(3)):
        raise VersionError(
            f"{version!r} is not a version of SGLang. Give an exact release number such as 0.5.23 or "
            "0.5.15.post1."
        )
    numbers, rank, serial = found.groups()
    return tuple(int(n) for n in numbers.split(".")), {"rc": -1, None: 0, ".post": 1}[rank], int(serial or 0)


def known_for(entries, version):
    """Return the entries of a list above that are about `version`, without their bounds."""
    key = version_key(version)
    return [
        {name: value for name, value in entry.items() if name not in ("since", "until")}
        for entry in entries
        if (not entry.get("since") or version_key(entry["since"]) <= key)
        and (not entry.get("until") or key <= version_key(entry["until"]))
    ]


def read_needs(metadata, wheel=""):
    """Read what a release needs from the texts of its METADATA and WHEEL files.

    Returns ``{"python", "glibc", "torch", "cuda", "driver", "kernels", "flashinfer", "transformers"}``:
    strings as the release states them, None where it states nothing; `cuda` is the major version, `driver`
    the oldest branch.
    """
    pins = {}
    requirement = re.compile(r"^Requires-Dist: *([\w.-]+)(?:\[[^\]]*\])? *([^;\n]*)", re.MULTILINE)
    for name, pin in requirement.findall(metadata):
        pins.setdefault(name.lower().replace("_", "-"), pin.strip())
    python = re.search(r"^Requires-Python: *(.+)$", metadata, re.MULTILINE)
    glibc = re.search(r"manylinux_(\d+)_(\d+)_", wheel)
    cuda = re.search(r"(\d+)", pins.get("cuda-python", ""))
    cuda = int(cuda.group(1)) if cuda else None
    kernels = next((f"{name}{pins[name]}" for name in ("sglang-kernel", "sgl-kernel") if name in pins), None)
    return {
        "python": python.group(1).strip() if python else None,
        "glibc": ".".join(glibc.groups()) if glibc else None,
        "torch": pins.get("torch", "").lstrip("=") or None,
        "cuda": cuda,
        "driver": DRIVERS.get(cuda),
        "kernels": kernels,
        "flashinfer": pins.get("flashinfer-python", "").lstrip("=") or None,
        "transformers": pins.get("transformers", "").lstrip("=") or None,
    }
