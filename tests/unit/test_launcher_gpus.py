"""What the launcher sees of the GPUs before a start, against a stand-in that answers as nvidia-smi does."""

import pytest

from tests.unit.test_launcher import launcher  # noqa: F401

# In the form of driver 580.159.04, by which an idle H200 has 0 or 4 MiB in use.
GPUS = "0, GPU-1dd0, {0}\n1, GPU-a8f0, 4\n"
# Of a program in a container the driver may know the memory and not the process.
STAND_IN = """#!/bin/sh
case "$1" in
--query-gpu=*)
  echo x >>{folder}/asked
  answer={folder}/gpus.$(wc -l <{folder}/asked)
  [ -e "$answer" ] || answer={folder}/gpus
  cat "$answer" ;;
--query-compute-apps=*) cat {folder}/apps ;;
esac
exit {status}
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Put an nvidia-smi into the path; gpus: its answers to the first questions, and to all that follow."""

    def install(*gpus, apps="", status=0):
        for number, text in enumerate(gpus[:-1], start=1):
            (tmp_path / f"gpus.{number}").write_text(text)
        (tmp_path / "gpus").write_text(gpus[-1])
        (tmp_path / "apps").write_text(apps)
        (tmp_path / "nvidia-smi").write_text(STAND_IN.format(folder=tmp_path, status=status))
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


@pytest.mark.parametrize(
    ("used", "apps", "expected"),
    [
        ("5", "", []),
        ("1024", "", []),
        (
            "90112",
            "GPU-1dd0, 4242, 60000\nGPU-1dd0, 4243, 30000\nGPU-a8f0, 7, 1\n",
            ["GPU 0 90112 MiB (pid 4242 60000 MiB, pid 4243 30000 MiB)"],
        ),
        ("90112", "", ["GPU 0 90112 MiB (by no process that can be seen)"]),
        ("[N/A]", "", []),
    ],
)
def test_what_holds_the_gpus(launcher, smi, used, apps, expected):  # noqa: F811
    smi(GPUS.format(used), apps=apps)
    assert launcher.held_gpus() == expected


def test_node_without_the_program_holds_nothing(launcher, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launcher.held_gpus() == []


def test_driver_that_does_not_answer_is_left_to_the_engine(launcher, smi):  # noqa: F811
    smi("Unable to determine the device handle for GPU0000:18:00.0: Unknown Error\n", status=15)
    assert launcher.held_gpus() == []


def test_memory_that_comes_back_is_waited_for(launcher, smi, monkeypatch):  # noqa: F811
    monkeypatch.setattr(launcher, "VACANT_INTERVAL_S", 0.01)
    smi(GPUS.format(90112), GPUS.format(90112), GPUS.format(5))
    assert launcher.Launcher.wait_for_gpus() == []


def test_memory_that_stays_held_is_named_at_the_bound(launcher, smi, monkeypatch):  # noqa: F811
    monkeypatch.setattr(launcher, "VACANT_INTERVAL_S", 0.01)
    monkeypatch.setattr(launcher, "VACANT_S", 0.1)
    smi(GPUS.format(90112), apps="GPU-1dd0, 4242, 90000\n")
    assert launcher.Launcher.wait_for_gpus() == ["GPU 0 90112 MiB (pid 4242 90000 MiB)"]
