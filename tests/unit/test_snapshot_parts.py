# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Parts of files and what is trusted of them; the waits that servers ask for."""

import email.utils
import time

import pytest
from ansible.module_utils.sglang_kit import snapshot_http, snapshot_part
from ansible.module_utils.sglang_kit.snapshot_part import Part
from hypothesis import given
from hypothesis import strategies as st

BLOCK = 64


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_part, "BLOCK", BLOCK)
        yield


@given(pieces=st.lists(st.binary(max_size=200), max_size=8))
def test_part_is_resumed_up_to_its_last_whole_block(tmp_path_factory, pieces):
    path = tmp_path_factory.mktemp("part") / "a/x"
    part = Part(str(path))
    for piece in pieces:
        part.append(piece)
    part.close()
    whole = b"".join(pieces)
    again = Part(str(path))
    assert (again.size, again.dropped) == (len(whole) // BLOCK * BLOCK, len(whole) % BLOCK)
    again.append(whole[again.size :])
    again.finish(f"{path}.whole")
    assert path.with_suffix(".whole").read_bytes() == whole


@given(damage=st.integers(0, 5 * BLOCK - 1), cut=st.integers(0, 5 * BLOCK))
def test_nothing_behind_a_damage_is_used(tmp_path_factory, damage, cut):
    path = tmp_path_factory.mktemp("part") / "x"
    whole = bytes(range(5)) * BLOCK
    part = Part(str(path))
    part.append(whole)
    part.close()
    broken = bytearray(whole)
    broken[damage] ^= 1
    path.write_bytes(broken[:cut])
    again = Part(str(path))
    again.close()
    assert again.size == min(damage, cut) // BLOCK * BLOCK
    assert path.read_bytes() == whole[: again.size]


def test_part_without_its_list_is_not_used(tmp_path):
    (tmp_path / "x").write_bytes(b"a" * 3 * BLOCK)
    part = Part(str(tmp_path / "x"))
    part.close()
    assert (part.size, part.dropped) == (0, 3 * BLOCK)


@pytest.mark.parametrize(
    ("text", "seconds"), [("7", 7), (" 0 ", 0), ("", None), ("soon", None), ("-3", None)]
)
def test_retry_after_in_seconds(text, seconds):
    assert snapshot_http.retry_after({"Retry-After": text}) == seconds


def test_retry_after_as_a_date():
    at = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert 98 <= snapshot_http.retry_after({"Retry-After": at}) <= 100
    past = email.utils.formatdate(time.time() - 100, usegmt=True)
    assert snapshot_http.retry_after({"Retry-After": past}) == 0
    assert snapshot_http.retry_after({}) is None
