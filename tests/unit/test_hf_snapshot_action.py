# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The fetch as a task sees it: a scripted node in simulated time."""

import types
from unittest import mock

import pytest
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import hf_snapshot

ARGS = {"repo_id": "org/name", "revision": "main"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def going(done, phase="fetch", **more):
    progress = {
        "phase": phase,
        "files": 119,
        "files_done": done // 5,
        "bytes": 600 << 30,
        "bytes_done": done << 30,
        "rate": 2 << 30,
        "eta_s": (600 - done) // 2,
    }
    return {"changed": False, "job": "j", "revision": COMMIT, "progress": progress, **more}


DONE = {"changed": True, "path": "/srv/models/x", "revision": COMMIT}
LOST = {"changed": False, "job": "j", "lost": True}


@pytest.fixture
def task(monkeypatch):
    """Return a function that runs the plugin on a script of results, the last one for ever."""

    def go(script, check_mode=False, **args):
        script, calls, shown, clock = list(script), [], [], [0.0]

        def execute(module_name, module_args, task_vars=None):
            assert module_name == "hf_snapshot"
            calls.append(dict(module_args))
            clock[0] += module_args.get("wait", 0)
            step = script.pop(0) if len(script) > 1 else script[0]
            if isinstance(step, Exception):
                raise step
            return dict(step)

        def sleep(seconds):
            clock[0] += seconds

        monkeypatch.setattr(
            hf_snapshot, "time", types.SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
        )
        display = mock.Mock()
        display.display.side_effect = shown.append
        monkeypatch.setattr(hf_snapshot, "Display", lambda: display)
        item = mock.MagicMock(check_mode=check_mode, async_val=0, diff=False)
        item.args = dict(ARGS, **args)
        plugin = hf_snapshot.ActionModule(
            item, mock.MagicMock(), mock.MagicMock(), mock.MagicMock(), mock.MagicMock(), None
        )
        plugin._execute_module = execute
        return plugin.run(task_vars={"inventory_hostname": "n1"}), calls, shown

    return go


def test_finished_snapshot_takes_one_call_and_no_line(task):
    result, calls, shown = task([{**DONE, "changed": False}])
    assert (result["changed"], len(calls), shown) == (False, 1, [])


def test_progress_is_shown_every_ten_seconds_and_the_commit_is_kept_to(task):
    result, calls, shown = task([going(done) for done in (0, 4, 8, 12, 16, 20, 24)] + [DONE])
    assert result["changed"] is True
    assert [call["revision"] for call in calls] == ["main"] + [COMMIT] * 7
    assert [call.get("job") for call in calls] == [None] + ["j"] * 7
    assert shown == [
        "[n1] org/name: file 0 of 119, 0.00 Bytes of 600.00 GB, 2.00 GB/s, about 5:00 min left",
        "[n1] org/name: file 4 of 119, 20.00 GB of 600.00 GB, 2.00 GB/s, about 4:50 min left",
    ]


def test_reading_and_bringing_to_the_disk_are_told_apart(task):
    _, _, shown = task([going(0, "check"), *[going(600, "publish")] * 6, DONE])
    assert "reading what is there, file 0 of 119" in shown[0]
    assert shown[1] == "[n1] org/name: all 119 files are right, bringing them to the disk"


def test_dry_run_is_one_plain_call(task):
    result, calls, shown = task([DONE], check_mode=True)
    assert (result["path"], calls, shown) == (DONE["path"], [ARGS], [])


def test_warnings_of_the_first_call_reach_the_end(task):
    result, _, _ = task([going(0, warnings=["main may move"]), DONE])
    assert result["warnings"] == ["main may move"]


def test_lost_connection_is_outlasted_and_told_once(task):
    gone = {"unreachable": True, "msg": "closed"}
    result, calls, shown = task([going(0), AnsibleConnectionFailure("broken pipe"), gone, DONE])
    assert (result["changed"], len(calls)) == (True, 4)
    assert shown[1:] == ["[n1] no connection, trying again while the fetch goes on: broken pipe"]


def test_connection_that_stays_lost_ends_it(task):
    with pytest.raises(AnsibleConnectionFailure, match="closed"):
        task([going(0), {"unreachable": True, "msg": "closed"}])


def test_fetch_that_was_lost_is_begun_again(task):
    result, calls, shown = task([going(0), LOST, going(5), DONE])
    assert result["changed"] is True
    assert [call.get("job") for call in calls] == [None, "j", None, "j"]
    assert "has ended without a word; it is begun again" in shown[1]


def test_fetch_that_dies_again_and_again_is_given_up(task):
    result, calls, _ = task([going(0), LOST, going(0), LOST, going(0), LOST, DONE])
    assert result["failed"] is True
    assert len(calls) == 6
    assert "ended without a word 3 times" in result["msg"]
    assert "OOM killer" in result["msg"]


def test_death_after_progress_counts_anew(task):
    script = [step for done in range(6) for step in (going(done), LOST)]
    result, _, _ = task([*script, DONE])
    assert result["changed"] is True


def test_failure_is_the_tasks_own(task):
    result, _, _ = task([going(0), {"failed": True, "msg": "no room"}])
    assert (result["failed"], result["msg"]) == (True, "no room")
