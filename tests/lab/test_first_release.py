"""SGLang 0.5.9, the release that needs the patch: it dies without the methods and gets past that with them.

Beyond that point 0.5.9 has no EAGLE path on a CPU: it stops in a Triton kernel, for want of a GPU driver.
"""

import json
import subprocess

import pytest

from tests.lab_hosts import ROOT

CRASH = "'KimiK25ForConditionalGeneration' object has no attribute 'set_eagle3_layers_to_capture'"
NO_GPU = "0 active drivers"
TARGET_LOADED = "type=KimiK25ForConditionalGeneration"
DRAFTER_LOADED = "type=LlamaForCausalLMEagle3"

LAUNCH = """
cd /tmp && timeout 300 runuser -u sglang -- env HOME=/tmp/first-release PYTHONDONTWRITEBYTECODE=1 \
  PYTHONPATH={path} SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1 \
  {tree}/bin/python -m sglang.launch_server --model-path {target} --speculative-draft-model-path {drafter} \
  --trust-remote-code --device cpu --attention-backend torch_native --port 30059 \
  --speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 1 \
  --speculative-num-draft-tokens 4 --disable-overlap-schedule --skip-server-warmup \
  --max-total-tokens 4096 --max-running-requests 4 --mem-fraction-static 0.3 2>&1
"""


@pytest.fixture(scope="module")
def staged(node):
    """Where the model and the drafter are on the node, and the folder of a second, pristine package."""
    target, drafter = (
        node.sh(f"ls -d /srv/models/lab/{name}/*").stdout.strip()
        for name in ("Kimi-K2.5-tiny-cycle", "Kimi-K2.5-tiny-cycle-eagle3")
    )
    node.sh("install -d -o sglang /tmp/first-release")
    return {"target": target, "drafter": drafter, "pristine": "/tmp/first-release/pristine"}


def tree(node):
    return node.sh("ls -d /opt/sglang/engines/0.5.9-*").stdout.strip()


def test_staging_adds_three_methods_beside_the_server_that_runs(node, play):
    before = node.invocation()
    run = play("deploy.yml", "--tags stage", extra={"sglang_engine_version": "0.5.9"})
    assert run.rc == 0, run.message
    assert "0.5.9: added" in run.stdout
    assert node.invocation() == before
    file = f"{tree(node)}/lib/python3.11/site-packages/sglang/srt/models/kimi_k25.py"
    text = node.sh(f"cat {file}").stdout
    for name in ("set_eagle3_layers_to_capture", "get_embed_and_head", "set_embed_and_head"):
        assert text.count(f"    def {name}(self") == 1


def test_patched_engine_gets_past_the_crash(node, staged):
    log = node.sh(
        LAUNCH.format(path="/srv/lab/cpu_stand_in", tree=tree(node), **staged), check=False, timeout=320
    )
    assert TARGET_LOADED in log.stdout, log.stdout[-3000:]
    assert CRASH not in log.stdout
    assert DRAFTER_LOADED in log.stdout
    assert NO_GPU in log.stdout


def test_unpatched_engine_dies_after_the_load(node, staged):
    node.sh(
        f"mkdir -p {staged['pristine']}; "
        f"cp -r {tree(node)}/lib/python3.11/site-packages/sglang {staged['pristine']}/"
    )
    undo = {
        "path": staged["pristine"] + "/sglang/srt/models/kimi_k25.py",
        "class_name": "KimiK25ForConditionalGeneration",
        "delegate": "language_model",
        "methods": ["set_eagle3_layers_to_capture"],
        "state": "absent",
    }
    subprocess.run(
        [
            "ansible",
            node.name,
            "-i",
            str(node.inventory),
            "-m",
            "python_delegate",
            "-a",
            json.dumps(undo),
        ],
        check=True,
        env={"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "PATH": "/usr/bin:/bin:" + str(ROOT / ".venv/bin")},
    )
    path = f"{staged['pristine']}:/srv/lab/cpu_stand_in"
    log = node.sh(LAUNCH.format(path=path, tree=tree(node), **staged), check=False, timeout=320)
    assert TARGET_LOADED in log.stdout, log.stdout[-3000:]
    assert CRASH in log.stdout
    assert DRAFTER_LOADED not in log.stdout
