"""What the module does to the file system: check, diff, links, modes, bytecode, faults, two runs at once."""

import contextlib
import errno
import fcntl
import gc
import importlib.util
import json
import os
import pathlib
import py_compile
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time

import pytest
import python_delegate
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args

RUNNER = pathlib.Path(__file__).parent / "data" / "delegate" / "run_module.py"
WRAPPER = "class Wrapper:\n    def __init__(self):\n        self.inner = make()\n"
INNER = "class Inner:\n    def get_pair(self): ...\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "wrapper.py").write_text(WRAPPER)
    (tmp_path / "inner.py").write_text(INNER)
    return tmp_path


def arguments(folder, **more):
    return {
        "path": str(folder / "wrapper.py"),
        "class_name": "Wrapper",
        "delegate": "inner",
        "methods": ["get_pair"],
        "source": {"path": str(folder / "inner.py"), "class_name": "Inner"},
        **more,
    }


def run(folder, capsys, **more):
    """Run the module in this process; return its result."""
    try:
        with patch_module_args(arguments(folder, **more)), pytest.raises(SystemExit):
            python_delegate.main()
    finally:
        gc.enable()
    return json.loads(capsys.readouterr().out)


def start(folder, fault="", **more):
    """Start the module in a process of its own."""
    command = [sys.executable, str(RUNNER), json.dumps(arguments(folder, **more)), fault]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def test_check_mode_says_and_does_nothing(folder, capsys):
    before = (folder / "wrapper.py").stat()
    result = run(folder, capsys, _ansible_check_mode=True, _ansible_diff=True, backup=True)
    assert result["changed"] is True
    assert result["methods"]["get_pair"]["outcome"] == "added"
    assert result["diff"]["before"] == WRAPPER
    assert "    def get_pair(self):\n" in result["diff"]["after"]
    assert (folder / "wrapper.py").stat() == before
    assert entries(folder) == ["inner.py", "wrapper.py"]


def test_five_beats(folder, capsys):
    planned = run(folder, capsys, _ansible_check_mode=True)
    done = run(folder, capsys)
    for key in ("changed", "path", "methods", "delegate_lines", "summary", "checksum", "pristine_checksum"):
        assert done[key] == planned[key], key
    assert done["summary"] == "added 1 at line 6"
    text = (folder / "wrapper.py").read_text()
    again = run(folder, capsys, _ansible_diff=True)
    assert (again["changed"], again["checksum"]) == (False, done["checksum"])
    assert again["summary"] == "delegated already: 1 at line 6, file untouched"
    assert "diff" not in again
    assert (folder / "wrapper.py").read_text() == text
    back = run(folder, capsys, state="absent")
    assert (back["changed"], back["checksum"]) == (True, done["pristine_checksum"])
    assert (folder / "wrapper.py").read_text() == WRAPPER
    assert run(folder, capsys, state="absent")["changed"] is False
    assert entries(folder) == ["inner.py", "wrapper.py"]


def test_conflict_returns_what_was_found(folder, capsys):
    (folder / "wrapper.py").write_text(WRAPPER + "    get_pair = None\n")
    result = run(folder, capsys)
    assert result["failed"] is True
    assert result["methods"]["get_pair"]["outcome"] == "conflict"
    assert result["methods"]["get_pair"]["line"] == 4


def test_source_is_asked_for(folder, capsys):
    assert "source is empty" in run(folder, capsys, source=None)["msg"]


def test_backup(folder, capsys):
    result = run(folder, capsys, backup=True)
    assert pathlib.Path(result["backup_file"]).read_text() == WRAPPER
    assert "backup_file" not in run(folder, capsys, backup=True)


def test_attributes_are_kept(folder, capsys):
    path = folder / "wrapper.py"
    path.chmod(0o640)
    os.setxattr(path, "user.origin", b"wheel")
    os.utime(path, ns=(1_500_000_000_000_000_000, 1_500_000_000_000_000_000))
    if os.getuid() == 0:
        os.chown(path, 1234, 4321)
    before = path.stat()
    started = time.time_ns()
    run(folder, capsys)
    after = path.stat()
    assert stat.S_IMODE(after.st_mode) == 0o640
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)
    assert os.getxattr(path, "user.origin") == b"wheel"
    assert after.st_atime_ns == before.st_atime_ns
    assert after.st_mtime_ns >= started - 10**9


def test_a_link_stays_and_its_target_is_edited(folder, capsys):
    (folder / "real").mkdir()
    real = folder / "real" / "code.py"
    (folder / "wrapper.py").rename(real)
    (folder / "wrapper.py").symlink_to("real/code.py")
    result = run(folder, capsys)
    assert result["path"] == str(real)
    assert os.readlink(folder / "wrapper.py") == "real/code.py"
    assert "def get_pair" in real.read_text()


def test_a_broken_link_is_named(folder, capsys):
    (folder / "wrapper.py").unlink()
    (folder / "wrapper.py").symlink_to("gone.py")
    assert f"wrapper.py (a link to {folder}/gone.py)" in run(folder, capsys)["msg"]


def test_a_folder_is_no_file(folder, capsys):
    (folder / "wrapper.py").unlink()
    (folder / "wrapper.py").mkdir()
    assert "cannot be read: Is a directory" in run(folder, capsys)["msg"]


def test_a_hard_link_keeps_its_bytes(folder, capsys):
    os.link(folder / "wrapper.py", folder / "cache.py")
    run(folder, capsys)
    assert (folder / "cache.py").read_text() == WRAPPER
    assert "def get_pair" in (folder / "wrapper.py").read_text()
    assert (folder / "wrapper.py").stat().st_nlink == 1


def test_stale_bytecode_cannot_be_picked_up(folder, capsys):
    path = folder / "wrapper.py"
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    mine = importlib.util.cache_from_source(path)
    py_compile.compile(str(path), mine, invalidation_mode=unchecked)
    cache = pathlib.Path(mine).parent
    for name in ("wrapper.cpython-38.pyc", "wrapper.cpython-312.opt-2.pyc"):
        shutil.copy(mine, cache / name)
    kept = ["wrapper_two.cpython-312.pyc", "wrapper.x.cpython-312.pyc"]
    for name in kept:
        shutil.copy(mine, cache / name)
    run(folder, capsys)
    assert entries(cache) == sorted(kept)
    command = [sys.executable, "-c", "import wrapper; print(hasattr(wrapper.Wrapper, 'get_pair'))"]
    assert subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout == "True\n"


def test_bytecode_beside_a_link_goes_too(folder, capsys):
    (folder / "real").mkdir()
    (folder / "wrapper.py").rename(folder / "real" / "code.py")
    (folder / "wrapper.py").symlink_to("real/code.py")
    for name in ("__pycache__/wrapper.cpython-312.pyc", "real/__pycache__/code.cpython-312.pyc"):
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(b"stale")
    run(folder, capsys)
    assert entries(folder / "__pycache__") == entries(folder / "real" / "__pycache__") == []


# --- faults ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["kill_before_write", "kill_before_rename", "kill_after_rename"])
def test_killed(fault, folder, capsys):
    killed = start(folder, fault)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    text = (folder / "wrapper.py").read_text()
    done = fault == "kill_after_rename"
    assert ("def get_pair" in text) is done
    assert done or text == WRAPPER
    result = run(folder, capsys)
    assert result["changed"] is not done
    assert result["checksum"] == run(folder, capsys)["checksum"]
    assert entries(folder) == ["inner.py", "wrapper.py"]


def test_no_room(folder):
    process = start(folder, "no_room")
    result = json.loads(process.communicate()[0])
    assert result["failed"] is True
    assert f"wrapper.py was not edited: [Errno {errno.EFBIG}]" in result["msg"]
    assert "the file system has room" in result["msg"]
    assert (folder / "wrapper.py").read_text() == WRAPPER
    assert entries(folder) == ["inner.py", "wrapper.py"]


def test_disk_full_at_the_last_moment(folder, capsys, monkeypatch):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in run(folder, capsys)["msg"]
    assert (folder / "wrapper.py").read_text() == WRAPPER
    assert entries(folder) == ["inner.py", "wrapper.py"]


@pytest.mark.parametrize("check", [False, True], ids=["run", "check"])
def test_unwritable_folder(check):
    # Not under tmp_path, whose parents another user may not enter.
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "wrapper.py").write_text(WRAPPER)
        (folder / "inner.py").write_text(INNER)
        folder.chmod(0o555)
        process = start(folder, "nobody" if os.getuid() == 0 else "", _ansible_check_mode=check)
        result = json.loads(process.communicate()[0])
        folder.chmod(0o755)
        assert f"The folder {folder} cannot be written by this user" in result["msg"]
        assert (folder / "wrapper.py").read_text() == WRAPPER


def test_changed_by_another_while_read(folder, capsys, monkeypatch):
    make_plan = python_delegate.make_plan

    def slow(params):
        plan = make_plan(params)
        (folder / "wrapper.py").write_text(WRAPPER + "# edited\n")
        return plan

    monkeypatch.setattr(python_delegate, "make_plan", slow)
    assert "was changed by another process while it was read" in run(folder, capsys)["msg"]
    assert (folder / "wrapper.py").read_text() == WRAPPER + "# edited\n"
    assert entries(folder) == ["inner.py", "wrapper.py"]


def test_rename_refused(folder, capsys, monkeypatch):
    def refuse(self, src, dest):
        raise Exception(f"Could not replace {dest!r} with {src!r}.")

    monkeypatch.setattr(AnsibleModule, "atomic_move", refuse)
    assert "was not edited: Could not replace" in run(folder, capsys)["msg"]
    assert entries(folder) == ["inner.py", "wrapper.py"]


@contextlib.contextmanager
def folder_lock(folder):
    """Hold the lock that a run takes; gives its descriptor."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def waits_for_lock(process, folder):
    """Whether a process has the folder open, as it does from the moment it asks for the lock."""
    opened = pathlib.Path(f"/proc/{process.pid}/fd")
    try:
        return any(os.readlink(entry) == str(folder) for entry in opened.iterdir())
    except OSError:
        return False


def test_two_runs_at_once(folder):
    with folder_lock(folder) as lock:
        runs = [start(folder), start(folder)]
        wait_for(lambda: all(waits_for_lock(process, folder) for process in runs))
        fcntl.flock(lock, fcntl.LOCK_UN)
        results = [json.loads(process.communicate()[0]) for process in runs]
    assert sorted(result["changed"] for result in results) == [False, True]
    assert sorted(result["methods"]["get_pair"]["outcome"] for result in results) == ["added", "ours"]
    assert (folder / "wrapper.py").read_text().count("def get_pair") == 1
    assert entries(folder) == ["inner.py", "wrapper.py"]


def test_a_lock_held_for_too_long_is_named(folder, capsys, monkeypatch):
    monkeypatch.setattr(python_delegate, "LOCK_SECONDS", 0)
    with folder_lock(folder):
        assert f"has held the lock on {folder}" in run(folder, capsys)["msg"]
    assert (folder / "wrapper.py").read_text() == WRAPPER
