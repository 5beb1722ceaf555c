"""The waiting itself, with a scripted node in simulated time."""

import types
from unittest import mock

import pytest
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import sglang_ready
from observations import observation

PROVED = {
    "health_status": 200,
    "passed": True,
    "problems": [],
    "answers": [{"name": "hello", "text": "Hi", "tokens": 8}],
}
DIAGNOSES = [
    {
        "id": "truncated",
        "match": "incomplete metadata",
        "cause": "A file is cut.",
        "remedy": "Fetch it.",
        "source": "x",
    }
]


def shards(done, **more):
    return observation(described=f"loading weights {done}/119", progress=done, **{"age": 1.0, **more})


UP = observation("active", "running", "serving", described="serving", progress=200, listening=True)
DEAD = observation(
    "activating",
    "auto-restart",
    described="loading weights 57/119",
    result="exit-code",
    exit_code=1,
    exit_status=137,
    log=[
        "Scheduler hit an exception: Traceback (most recent call last):",
        "  File x",
        "E: incomplete metadata",
    ],
)


class Node:
    """Plays a script of observations, the last one for ever; an exception in it is raised."""

    def __init__(self, script, proofs):
        self.script, self.proofs = list(script), list(proofs)
        self.calls = []
        self.now = 0.0
        self.shown = []

    def execute(self, module_name, module_args, task_vars=None):
        self.calls.append((module_name, module_args))
        queue = self.proofs if module_name == "sglang_acceptance" else self.script
        step = queue.pop(0) if len(queue) > 1 else queue[0]
        if isinstance(step, Exception):
            raise step
        return step

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def wait(monkeypatch):
    def go(script, proofs=(PROVED,), check_mode=False, task="uuid", **args):
        node = Node(script, proofs)
        clock = types.SimpleNamespace(monotonic=lambda: node.now, time=lambda: node.now, sleep=node.sleep)
        monkeypatch.setattr(sglang_ready, "time", clock)
        display = mock.Mock()
        display.display.side_effect = node.shown.append
        monkeypatch.setattr(sglang_ready, "Display", lambda: display)
        asked = mock.MagicMock(check_mode=check_mode, async_val=0, diff=False, _uuid=task)
        asked.args = dict({"diagnoses": DIAGNOSES}, **args)
        plugin = sglang_ready.ActionModule(
            asked, mock.MagicMock(), mock.MagicMock(), mock.MagicMock(), mock.MagicMock(), None
        )
        plugin._execute_module = node.execute
        return plugin.run(task_vars={"inventory_hostname": "n1"}), node

    return go


def test_progress_is_shown_and_tokens_end_the_wait(wait):
    result, node = wait([shards(1), shards(57), shards(118), UP])
    assert not result.get("failed")
    assert (result["verdict"], result["changed"]) == ("up", False)
    assert result["answer"]["text"] == "Hi"
    assert result["waited_s"] == 6.0
    assert node.shown[0] == "[n1] loading weights 1/119, 1m00s"
    assert node.shown[-1] == "[n1] serving, 1m00s"


def test_a_server_that_is_up_is_not_waited_for(wait):
    result, node = wait([UP])
    assert result["waited_s"] == 0.0
    # The last look is for the evidence.
    assert [name for name, _args in node.calls] == ["sglang_probe", "sglang_acceptance", "sglang_probe"]
    assert node.calls[-1][1]["node"] is True


def test_a_host_that_answers_nobody_is_up_when_systemd_says_so(wait):
    result, node = wait([shards(1), UP], answers=False)
    assert (result["verdict"], result["answer"]) == ("up", None)
    assert "sglang_acceptance" not in [name for name, _args in node.calls]


@pytest.fixture
def server(tmp_path, monkeypatch, wait):
    """Waits for the hosts of one server, one after the other; a run's own folder lasts for all of them."""
    monkeypatch.setattr("ansible.constants.DEFAULT_LOCAL_TMP", str(tmp_path))

    def go(script, task="uuid", **args):
        return wait(script, task=task, companions=["n1", "n2"], **args)

    return go


def test_a_host_of_a_failed_server_is_not_waited_for(server):
    assert server([shards(1), dict(DEAD)])[0]["verdict"] == "dead"
    result, _node = server([shards(1), shards(2), UP])
    assert result["failed"] and result["verdict"] == "companion"
    assert "n1, which is part of the same server, has failed: it died" in result["msg"]
    assert result["waited_s"] == 0.0


def test_the_next_start_of_the_server_is_waited_for_anew(server):
    assert server([dict(DEAD)])[0]["verdict"] == "dead"
    assert server([shards(1), UP], task="another")[0]["verdict"] == "up"


def test_hosts_that_are_servers_of_their_own_do_not_hear_of_each_other(server, wait):
    assert server([dict(DEAD)])[0]["verdict"] == "dead"
    assert wait([shards(1), UP], task="uuid")[0]["verdict"] == "up"


def test_lines_are_shown_when_something_changed_and_not_too_often(wait):
    script = [shards(done) for done in range(1, 31)] + [shards(30)] * 30 + [UP]
    _result, node = wait(script)
    shards_shown = [line.split()[3] for line in node.shown if "loading" in line]
    assert shards_shown == [f"{done}/119," for done in (1, 6, 11, 16, 21, 26, 30)]


def test_only_one_generating_request_at_a_time_and_only_when_up(wait):
    _result, node = wait([shards(1), UP, UP], [dict(PROVED, health_status=503, passed=False), PROVED])
    names = [name for name, _args in node.calls]
    polls = ["sglang_probe", "sglang_probe", "sglang_acceptance", "sglang_probe", "sglang_acceptance"]
    assert names == [*polls, "sglang_probe"]


def test_a_death_ends_the_wait_in_the_poll_that_sees_it(wait):
    result, node = wait([shards(57), DEAD])
    assert result["failed"]
    assert result["verdict"] == "dead"
    assert result["waited_s"] == 2.0
    assert [entry["id"] for entry in result["causes"]] == ["truncated"]
    assert result["msg"].splitlines()[:3] == [
        "sglang.service on n1: it died (systemd starts it again) while loading weights 57/119: "
        "exit status 137",
        "Cause: A file is cut.",
        "Remedy: Fetch it.",
    ]
    assert "  E: incomplete metadata" in result["msg"].splitlines()
    # The evidence is that of the run that died, though systemd may have started another.
    assert node.calls[-1][1]["invocation"] == "one"
    # The node itself is looked at when there is something to explain, not before.
    assert [args.get("node", False) for _name, args in node.calls] == [False, False, True]
    assert "  kernel: NVRM: Xid 79" in result["msg"].splitlines()


def test_a_node_waits_by_itself_only_for_a_start(wait):
    _result, node = wait(
        [shards(1), shards(1), UP, UP], [dict(PROVED, health_status=503, passed=False), PROVED]
    )
    probes = [args for name, args in node.calls if name == "sglang_probe"]
    assert [args.get("wait") for args in probes] == [None, 8.0, 8.0, None, None]
    assert probes[1]["seen"] == shards(1)["unit"]


def test_the_line_that_speaks_for_the_cause_is_shown_wherever_it_stands(wait):
    lines = ["E: incomplete metadata", *(f"something else, number {n}" for n in range(30))]
    result, _node = wait([shards(57), dict(DEAD, log=lines)])
    said = result["msg"].splitlines()
    assert said[said.index("What speaks for the cause:") + 1] == "  E: incomplete metadata"
    assert said.count("  E: incomplete metadata") == 1


def test_a_death_without_a_known_cause_says_so(wait):
    dead = dict(DEAD, log=["what nobody has seen"])
    result, _node = wait([shards(57), dead])
    assert "No known cause fits." in result["msg"]
    assert "  what nobody has seen" in result["msg"]


def test_a_hang_ends_within_its_patience(wait):
    script = [shards(57, age=float(2 * i)) for i in range(100)]
    result, node = wait(script, patience={"loading_weights": 30})
    assert result["verdict"] == "stalled"
    assert node.now == 32.0
    assert "no progress for 32 s (allowed: 30 s) while loading weights 57/119" in result["msg"]


def test_a_long_load_with_progress_is_waited_for(wait):
    result, node = wait([*(shards(done) for done in range(1, 600)), UP], patience={"loading_weights": 30})
    assert result["verdict"] == "up"
    assert node.now == 1198.0


def test_the_budget(wait):
    result, node = wait([shards(1)], budget=60)
    assert result["verdict"] == "late"
    assert node.now == 62.0
    assert "it is not up after 60 s while loading weights 1/119" in result["msg"]


def test_no_unit(wait):
    result, _node = wait([observation("inactive", "dead", None, exists=False, load_state="not-found")])
    assert result["verdict"] == "absent"
    assert result["msg"].splitlines()[0] == "sglang.service on n1: the node has no such unit"


def test_healthy_but_another_model(wait):
    proof = dict(PROVED, passed=False, problems=["the server serves ['a'], expected b"], answers=[])
    result, _node = wait([UP], [proof], model="b")
    assert result["verdict"] == "wrong"
    assert "it is healthy, but the server serves ['a'], expected b" in result["msg"]


def test_a_lost_connection_is_outlasted(wait):
    lost = AnsibleConnectionFailure("broken pipe")
    result, node = wait([shards(1), lost, lost, UP])
    assert result["verdict"] == "up"
    assert node.shown.count("[n1] no connection, trying again: broken pipe") == 1


def test_a_connection_that_stays_lost_is_not(wait):
    with pytest.raises(AnsibleConnectionFailure):
        wait([shards(1), AnsibleConnectionFailure("no route to host")])


@pytest.mark.parametrize(
    "observation, said",
    [
        (UP, "check mode: the server is active (running); not waited for"),
        (
            observation("inactive", "dead", None, exists=False, load_state="not-found"),
            "check mode: the node has no server yet",
        ),
    ],
)
def test_check_mode_looks_once(wait, observation, said):
    result, node = wait([observation], check_mode=True)
    assert result["skipped"]
    assert not result.get("failed")
    assert result["msg"] == said
    assert node.shown == ["[n1] " + said]
    assert [name for name, _args in node.calls] == ["sglang_probe"]
