# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What one server over several hosts leans on, held against the sources of every release."""

from __future__ import annotations

import ast
import pathlib
import re

import yaml
from ansible.module_utils.sglang_kit.releases_flags import read_flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
GROUP = yaml.safe_load((ROOT / "roles/sglang_server/vars/main/group.yml").read_text())


def test_a_file_may_set_the_options_of_a_group(served):
    flags = read_flags(str(served.package))
    for name in GROUP["__sglang_server_group_arguments"]:
        assert name in flags and flags[name]["in_file"] and not flags[name]["deprecated"], name
    # The other spelling, which the examination must refuse as well.
    assert "nccl-init-addr" in flags


def test_a_host_without_clients_says_that_it_is_ready(served):
    """After its ranks are ready, and until they end, it answers /health with 200: the launcher's sign."""
    text = (served.package / "srt/entrypoints/engine.py").read_text()
    branch = re.search(r"\n( +)if [\w.()]*node_rank >= 1:\n(.*?)\n\1[^ \n]", text, re.DOTALL).group(2)
    ready = re.search(r"wait_for_(scheduler_)?ready\(", branch).start()
    answers = branch.index("launch_dummy_health_check_server(")
    ends = re.search(
        r"block_until_scheduler_exits\(\)|wait_for_completion\(\)|proc\.join\(\)", branch
    ).start()
    assert ready < answers < ends
    tree = ast.parse((served.package / "srt/utils/common.py").read_text())
    (dummy,) = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "launch_dummy_health_check_server"
    ]
    answer = ast.unparse(dummy).split("@app.get('/health')", 1)[1].split("@app", 1)[0]
    assert "return Response(status_code=200)" in answer


def test_the_address_of_a_host_is_taken_from_the_environment(served, sources):
    (name,) = GROUP["__sglang_server_group_environment"]
    assert re.search(rf"host_ip = os\.getenv\(\"{name}\"", sources(served))


def test_the_log_tells_which_host_of_the_group_it_is_of(served, sources):
    text = sources(served)
    assert re.search(r"logger\.info\(f\"\{server_args=\}\"\)|logger\.info\(f\"server_args=\{", text)
    # Only rank 0 draws the bars of a load.
    loader = (served.package / "srt/model_loader/weight_utils.py").read_text()
    assert "not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0" in loader
