# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The playbook that previews an upgrade, run as people run it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLAYBOOK = str(pathlib.Path(sys.executable).parent / "ansible-playbook")


def preview(*arguments):
    environment = dict(os.environ, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"), ANSIBLE_NOCOLOR="1")
    command = [PLAYBOOK, "playbooks/preview_upgrade.yml", *arguments]
    return subprocess.run(
        command, cwd=str(ROOT), env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "number, patch, contract, line",
    [
        ("0.5.8", "refused", "unknown", "Contract   cannot be judged: KimiK25ForConditionalGeneration in"),
        (
            "0.5.9",
            "needed",
            "missing",
            "Contract   satisfied once it is patched; EAGLE-3 asks for get_embed_and_head",
        ),
    ],
)
def test_a_preview(tmp_path, number, patch, contract, line):
    output = tmp_path / "preview.json"
    done = preview("-e", f"sglang_engine_version={number}", "-e", f"preview_upgrade_output={output}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert line in done.stdout
    report = json.loads(output.read_text())
    assert (report["version"], report["patch"]["verdict"]) == (number, patch)
    assert report["contract"]["verdict"] == contract
    assert report["contract"]["missing_after_patch"] == []
    assert report["needs"]["torch"] and report["arguments"]["looked_at"] > 10


def test_a_preview_with_the_arguments_of_an_inventory(tmp_path):
    inventory = tmp_path / "hosts.yml"
    arguments = (
        "{cuda-graph-max-bs: 16, enable-dp-attention: true, no-such-flag: 1, kv-cache-dtype: fp8_e4m3}"
    )
    inventory.write_text(
        "sglang:\n  hosts:\n    node7:\n      ansible_host: 192.0.2.1\n      sglang_server_profile: sm120\n"
        f"      sglang_server_arguments: {arguments}\n"
    )
    output = tmp_path / "preview.json"
    done = preview(
        "-i", str(inventory), "-e", "sglang_engine_version=0.5.23", "-e", f"preview_upgrade_output={output}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text())
    assert (report["patch"]["verdict"], report["contract"]["verdict"]) == ("upstream", "satisfied")
    assert "Contract   satisfied: the model has all that EAGLE-3 asks of it" in done.stdout
    looked = report["arguments"]
    assert (looked["node"], looked["profile"]) == ("node7", "sm120")
    assert [(found["flag"], found["problem"]) for found in looked["changed"]] == [
        ("cuda-graph-max-bs", "unknown"),
        ("enable-dp-attention", "not in a file"),
        ("no-such-flag", "unknown"),
    ]
    assert "cuda-graph-max-bs: unknown; use --cuda-graph-max-bs-decode" in done.stdout


@pytest.mark.parametrize(
    "number, message",
    [
        ("latest", "'latest' is not a version of SGLang. Give an exact release number"),
        ("0.5.99", "SGLang 0.5.99 is not published. The newest releases are"),
        (None, "Which release? Give its exact version"),
    ],
)
def test_a_preview_of_nonsense(number, message):
    done = preview(*(["-e", f"sglang_engine_version={number}"] if number else []))
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
