# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Old revisions: what goes, and what always stays."""

import json
import os

import hf_snapshot_prune
import pytest
from ansible.module_utils.sglang_kit import snapshot_store
from ansible.module_utils.testing import patch_module_args

REPO = "org/name"
REVISIONS = [digit * 40 for digit in "12345"]


@pytest.fixture
def store(tmp_path):
    """Five finished revisions, the first one the oldest, read-only as they are; returns their folder."""
    parent = tmp_path / "models" / REPO
    for age, revision in enumerate(reversed(REVISIONS)):
        folder = parent / revision
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"x" * 1000)
        (folder / "manifest.json").write_text("{}")
        os.utime(folder / "manifest.json", (10000 - age, 10000 - age))
        folder.chmod(0o555)
    return parent


@pytest.fixture
def prune(tmp_path, capsys):
    def run(check=False, **arguments):
        defaults = {
            "repo_id": REPO,
            "dest": str(tmp_path / "models"),
            "wanted": [REVISIONS[4]],
            "in_use": [str(tmp_path / "releases/*/model")],
            "keep": 0,
        }
        parameters = {**defaults, **arguments, "_ansible_check_mode": check}
        with patch_module_args(parameters), pytest.raises(SystemExit):
            hf_snapshot_prune.main()
        return json.loads(capsys.readouterr().out)

    return run


def link(tmp_path, release, target):
    (tmp_path / "releases" / release).mkdir(parents=True)
    (tmp_path / "releases" / release / "model").symlink_to(target)


def left(store):
    return sorted(path.name for path in store.iterdir() if path.name != ".lock")


def test_wanted_and_linked_revisions_stay_whatever_their_age(prune, store, tmp_path):
    link(tmp_path, "a", store / REVISIONS[0])
    link(tmp_path, "b", tmp_path / "releases/a/model")
    link(tmp_path, "gone", store / ("9" * 40))
    result = prune()
    assert left(store) == [REVISIONS[0], REVISIONS[4]]
    assert (result["changed"], result["in_use"]) == (True, [REVISIONS[0]])
    assert result["freed_bytes"] == 3 * 1002
    assert prune()["changed"] is False


def test_link_through_another_way_to_the_same_folder_counts(prune, store, tmp_path):
    (tmp_path / "other").symlink_to(tmp_path / "models")
    link(tmp_path, "a", tmp_path / "other" / REPO / REVISIONS[0])
    prune()
    assert left(store) == [REVISIONS[0], REVISIONS[4]]
    (tmp_path / "releases/a/model").unlink()
    assert prune(dest=str(tmp_path / "other"))["removed"] == [str(store / REVISIONS[0])]


def test_newest_of_the_others_stay_as_told(prune, store):
    result = prune(keep=2)
    assert result["removed"] == [str(store / name) for name in (REVISIONS[1], REVISIONS[0])]


def test_dry_run_removes_nothing(prune, store):
    result = prune(check=True)
    assert (result["changed"], len(result["removed"])) == (True, 4)
    assert left(store) == REVISIONS


def test_what_nobody_fetched_stays_and_unfinished_ones_go(prune, store):
    (store / ("a" * 40)).mkdir()
    (store / "notes").mkdir()
    (store / f".{REVISIONS[0]}.partial").mkdir()
    (store / f".{REVISIONS[4]}.partial").mkdir()
    (store / f".{REVISIONS[1]}.job").write_text("{}")
    prune()
    assert left(store) == sorted([f".{REVISIONS[4]}.partial", REVISIONS[4], "a" * 40, "notes"])


def test_model_that_is_being_fetched_is_left_alone(prune, store, tmp_path):
    with snapshot_store.Store(str(tmp_path / "models"), REPO, REVISIONS[4]).lock():
        assert "is already fetching org/name" in prune()["msg"]
    assert left(store) == REVISIONS


def test_negative_number_is_refused(prune):
    assert prune(keep=-1)["msg"] == "keep is -1; expected a number of revisions, or 0"
