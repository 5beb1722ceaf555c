"""The role's proof by import, on small packages in place of SGLang."""

import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "roles" / "sglang_patch" / "files" / "prove_import.py"
GOOD = "import torch\nclass Wrapper:\n    def get_pair(self): ...\n"


def prove(folder, text, torch="", methods="get_pair"):
    (folder / "sglang").mkdir()
    path = folder / "sglang" / "wrapper.py"
    path.write_text(text)
    if torch is not None:
        (folder / "torch.py").write_text(torch)
    command = [sys.executable, "-B", "-", str(path), "sglang.wrapper", "Wrapper", methods]
    environment = {"PYTHONPATH": str(folder), "HOME": str(folder)}
    return subprocess.run(
        command, input=SCRIPT.read_text(), env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "text, torch, status, says",
    [
        (GOOD, "", 0, "imported, Wrapper has the methods"),
        (GOOD, None, 3, "torch is not installed in this tree"),
        (GOOD, "raise OSError('libcuda.so.1 is not there')", 3, "OSError: libcuda.so.1 is not there"),
        (GOOD + "import nowhere\n", "", 3, "ModuleNotFoundError: No module named 'nowhere'"),
        (GOOD.replace("self)", "self, a: Nowhere)"), "", 1, "NameError: name 'Nowhere' is not defined"),
        (GOOD + "x = = 1\n", "", 1, "SyntaxError: invalid syntax (wrapper.py, line 4)"),
        (GOOD.replace("get_pair", "got_pair"), "", 1, "Wrapper lacks get_pair"),
        (GOOD + "    get_pair = None\n", "", 1, "Wrapper lacks get_pair"),
    ],
)
def test_status_and_last_line(tmp_path, text, torch, status, says):
    done = prove(tmp_path, text, torch)
    assert done.stdout.splitlines()[-1] == says
    assert done.returncode == status
    assert not list(tmp_path.rglob("*.pyc"))


def test_nothing_lands_in_the_home(tmp_path):
    torch = "import os, pathlib\npathlib.Path(os.environ['HOME'], 'cache').write_text('x')\n"
    assert prove(tmp_path, GOOD, torch).returncode == 0
    assert not (tmp_path / "cache").exists()
