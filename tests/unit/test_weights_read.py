# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Reading weights: what is in memory, how fast the rest comes, and what is left alone."""

import os
import pathlib
import tempfile

import pytest
import weights_read as module
from ansible.module_utils.sglang_kit import weights_read

MIB = 1 << 20


def shard(folder, number, size):
    path = folder / f"model-{number}.safetensors"
    path.write_bytes(os.urandom(size))
    with path.open("rb") as content:
        os.fsync(content.fileno())
        os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


@pytest.fixture
def folder():
    """A folder on a disk: what lies in memory anyway can neither be measured nor warmed."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as found:
        yield pathlib.Path(found)


def test_files_are_the_weights_alone_and_the_largest_first(tmp_path):
    for name, size in (("a.safetensors", 1), ("b.safetensors", 3), ("config.json", 9)):
        (tmp_path / name).write_bytes(b"x" * size)
    assert weights_read.files_of(tmp_path) == [
        (str(tmp_path / "b.safetensors"), 3),
        (str(tmp_path / "a.safetensors"), 1),
    ]
    assert weights_read.files_of(tmp_path / "none") == []


def test_cached_bytes_follow_what_was_read(folder):
    path = shard(folder, 1, 8 * MIB + 100)
    size = path.stat().st_size
    assert weights_read.cached_bytes(path, size) == 0
    path.read_bytes()
    assert weights_read.cached_bytes(path, size) == size
    assert weights_read.cached_bytes(path, 0) == 0


def test_rate_is_measured_past_the_cache_and_leaves_it_alone(folder):
    path = shard(folder, 1, 96 * MIB)
    found = weights_read.files_of(folder)
    assert weights_read.direct_rate(found, 64 * MIB, 60) > 1 * MIB
    assert weights_read.direct_rate(found, 64 * MIB, 0) is None
    assert weights_read.cached_bytes(path, 96 * MIB) == 0


def test_rate_of_several_files(folder):
    for number in range(10):
        shard(folder, number, 9 * MIB)
    assert weights_read.direct_rate(weights_read.files_of(folder), 512 * MIB, 60) > 1 * MIB


def test_rate_of_too_little_is_none(folder):
    shard(folder, 1, 8 * MIB)
    assert weights_read.direct_rate(weights_read.files_of(folder), 64 * MIB, 60) is None
    assert weights_read.direct_rate([], 64 * MIB, 60) is None


def test_warming_brings_all_into_memory(folder):
    paths = [shard(folder, number, 8 * MIB) for number in range(3)]
    assert weights_read.warm(weights_read.files_of(folder), lambda: True) == (24 * MIB, True)
    assert all(weights_read.cached_bytes(path, 8 * MIB) == 8 * MIB for path in paths)


def test_warming_stops_when_memory_grows_short(folder, monkeypatch):
    monkeypatch.setattr(weights_read, "ASK_EVERY", 8 * MIB)
    shard(folder, 1, 20 * MIB)
    answers = iter([True, False])
    came, whole = weights_read.warm(weights_read.files_of(folder), lambda: next(answers))
    assert (came, whole) == (8 * MIB, False)


@pytest.mark.parametrize(
    "reserve, check_mode, warmed, cached",
    [(0, False, "all", 4 * MIB), (1 << 20, False, "refused", 0), (0, True, "no", 0)],
)
def test_warming_needs_room_for_the_model_and_the_reserve(
    folder, monkeypatch, reserve, check_mode, warmed, cached
):
    monkeypatch.setattr(os, "nice", lambda _: None)
    shard(folder, 1, 4 * MIB)
    params = {"path": folder, "measure_mib": 64, "measure_seconds": 5, "warm": True, "reserve_gib": reserve}
    result = module.run(params, check_mode)
    assert (result["warmed"], result["cached_bytes"], result["changed"]) == (warmed, cached, False)
    # A model of 4 MiB is there in a moment.
    assert (result["bytes"], result["rate"], result["seconds"]) == (4 * MIB, None, None)


def test_model_that_is_not_there_has_nothing_to_read(tmp_path):
    params = {
        "path": tmp_path / "none",
        "measure_mib": 64,
        "measure_seconds": 5,
        "warm": False,
        "reserve_gib": 0,
    }
    result = module.run(params, True)
    assert (result["files"], result["bytes"], result["seconds"]) == (0, 0, None)


def test_available_memory_is_in_bytes(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable:  42 kB\n")
    assert weights_read.available(tmp_path / "meminfo") == 42 << 10
