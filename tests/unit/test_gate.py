"""The judgement over a row of observations, in simulated time."""

import pytest
from ansible.module_utils.sglang_kit import gate
from ansible.module_utils.sglang_kit.startup_log import StartupLog
from observations import observation

UP = observation("active", "running", "serving", listening=True)


def watched(**options):
    """Return a watch that has found its run."""
    watch = gate.Watch(3600, **options)
    assert watch.judge(observation(), 0) is None
    assert watch.invocation == "one"
    return watch


def test_a_twenty_minute_load_with_progress_is_waited_for():
    watch = watched()
    for second in range(2, 1200, 2):
        assert watch.judge(observation(age=8.0), second) is None
    assert watch.judge(UP, 1200).kind == "up"


def test_an_open_port_while_systemd_still_starts_it_is_not_up():
    assert watched().judge(observation(listening=True), 2) is None


def test_a_closed_port_is_no_failure():
    assert watched().judge(observation("active", "running", "loading_weights"), 2) is None


@pytest.mark.parametrize(
    "seen, kind, text",
    [
        (observation("failed", "failed", result="exit-code"), "dead", "it died"),
        (observation("activating", "auto-restart"), "dead", "it died (systemd starts it again)"),
        (observation(restarts=1, invocation="two"), "dead", "it died (systemd starts it again)"),
        (observation("deactivating", "final-sigterm", result="exit-code"), "dead", "it died"),
        (observation("inactive", "dead", invocation=""), "gone", "it was stopped"),
        (observation(invocation="two"), "gone", "it was replaced by another start"),
        (observation(exists=False, load_state="not-found"), "absent", "the node has no such unit"),
        (observation(load_state="masked"), "absent", "the unit is masked"),
    ],
)
def test_an_end_is_seen_in_the_first_observation_of_it(seen, kind, text):
    assert watched().judge(seen, 2) == gate.Verdict(kind, text)


def test_a_run_that_is_being_stopped_is_waited_for():
    assert watched().judge(observation("deactivating", "stop-sigterm"), 2) is None


def test_restarts_of_earlier_days_do_not_count():
    watch = gate.Watch(3600)
    assert (
        watch.judge(observation("active", "running", "serving", restarts=5, listening=True), 0).kind == "up"
    )


def test_a_queued_restart_is_waited_for():
    watch = gate.Watch(3600, previous="one")
    assert watch.judge(UP, 0) is None
    assert watch.judge(observation("deactivating", "stop-sigterm"), 60) is None
    assert watch.judge(observation(invocation="two"), 64) is None
    assert watch.invocation == "two"
    assert watch.judge(dict(UP, unit=dict(UP["unit"], invocation="two")), 70).kind == "up"


@pytest.mark.parametrize(
    "state, kind, text", [("inactive", "gone", "it is not running"), ("failed", "dead", "it has failed")]
)
def test_a_unit_that_does_not_run_gets_a_short_grace(state, kind, text):
    watch = gate.Watch(3600, previous="one")
    seen = observation(state, "dead", result="start-limit-hit", invocation="one")
    assert watch.judge(seen, 0) is None
    assert watch.judge(seen, gate.GRACE_S) == gate.Verdict(kind, text)


@pytest.mark.parametrize("state, kind", [("inactive", "gone"), ("failed", "dead")])
def test_a_start_that_was_over_before_the_first_look_is_judged_in_it(state, kind):
    watch = gate.Watch(3600, previous="one")
    assert watch.judge(observation(state, "dead", result="exit-code", invocation="two"), 0).kind == kind
    assert watch.invocation == "two"


def test_a_hang_ends_when_its_phase_has_no_patience_left():
    watch = watched(stall_s={"loading_weights": 90})
    assert watch.judge(observation(age=89.0), 100) is None
    assert watch.judge(observation(age=91.0, phase="graph_capture"), 101) is None
    verdict = watch.judge(observation(age=91.0), 102)
    assert verdict == gate.Verdict("stalled", "no progress for 91 s (allowed: 90 s)")


def test_a_server_that_serves_for_days_without_progress_is_no_hang():
    watch = watched()
    assert watch.judge(observation("active", "running", "serving", age=900000.0), 2) is None
    assert watch.judge(observation("activating", "start", "serving", age=900000.0), 4).kind == "stalled"


def test_the_budget_bounds_everything():
    watch = watched()
    assert watch.judge(observation(), 3600) is None
    assert watch.judge(observation(), 3601) == gate.Verdict("late", "it is not up after 3600 s")


def test_health_is_given_time_and_then_called_a_stall():
    watch = watched()
    assert watch.see_health(503, 10) is None
    assert watch.see_health(None, 70) is None
    assert watch.see_health(200, 80).kind == "up"
    watch = watched()
    assert watch.see_health(503, 10) is None
    assert watch.see_health(503, 131) == gate.Verdict(
        "stalled", "it is started, but its health endpoint says 503 for 120 s"
    )


@pytest.mark.parametrize(
    "unit, text",
    [
        ({"result": "exit-code", "exit_code": 1, "exit_status": 137}, "exit status 137"),
        ({"result": "signal", "exit_code": 2, "exit_status": 9}, "killed by signal 9"),
        ({"result": "timeout", "exit_code": 1, "exit_status": 0}, "systemd says timeout"),
        ({"result": "start-limit-hit", "exit_code": 1, "exit_status": 0}, "systemd says start-limit-hit"),
    ],
)
def test_how_it_ended(unit, text):
    assert gate.how_it_ended(unit) == text


def test_the_progress_line():
    seen = observation(age_s=190.2)
    assert gate.progress_line(seen) == "loading weights, 3m10s"
    # the engine's own estimate, until there is a rate to measure
    seen["start"]["bar"] = {"done": 0, "total": 119, "remaining_s": 80}
    assert gate.progress_line(seen) == "loading weights, 3m10s, about 1m20s left"
    stopped = observation("inactive", "dead", main_pid=0)
    assert gate.progress_line(stopped) == "the unit is inactive (dead)"


def test_phase_times_end_with_serving_or_now():
    history = [
        {"phase": "starting", "part": None, "at": 100.0},
        {"phase": "loading_weights", "part": "target", "at": 110.0},
    ]
    assert gate.phase_times(history, 130.0) == [
        {"phase": "starting", "part": None, "at": 100.0, "seconds": 10.0},
        {"phase": "loading_weights", "part": "target", "at": 110.0, "seconds": 20.0},
    ]
    history.append({"phase": "serving", "part": "target", "at": 125.0})
    assert gate.phase_times(history, 999.0)[-1]["seconds"] == 15.0
    assert len(gate.phase_times(history, 999.0)) == 2


KIMI = {
    "target": {"files": 119, "bytes": 550 * gate.GIB, "largest_bytes": 5 * gate.GIB},
    "drafter": {"files": 1, "bytes": 2 * gate.GIB, "largest_bytes": 2 * gate.GIB},
}


def test_the_rate_and_the_time_left_are_measured_up_to_the_newest_shard():
    seen = dict(observation(age_s=190.2, age=7.0), weights=KIMI)
    seen["start"].update(
        described="loading weights 50/119 (42%)",
        phase_s=117.0,
        bar={"done": 50, "total": 119, "remaining_s": 3},
    )
    # 231 of 550 GiB in 110 s; 69 shards more at 2.2 s each
    assert gate.progress_line(seen) == (
        "loading weights 50/119 (42%), 231 of 550 GiB at 2.10 GiB/s, 3m10s, about 2m31s left"
    )


def test_the_drafter_has_its_own_size():
    seen = dict(observation(), weights=KIMI)
    seen["start"].update(part="drafter", phase_s=2.0, bar={"done": 1, "total": 2, "remaining_s": 1})
    assert gate.progress_line(seen) == "loading weights, 1 of 2 GiB, 1m00s, about 1s left"


class SlowNode:
    """A node whose disk gives a shard every `period` seconds, in simulated time, as the probe sees it."""

    def __init__(self, period, hang_at=None):
        self.period, self.hang_at = period, hang_at
        self.log = StartupLog(at=0.0)
        self.log.feed("[2026-01-01 00:00:00 TP0] Load weight begin. avail mem=170.00 GB", 0.0)
        self.done = 0

    def at(self, now):
        while self.done < 119 and (self.done + 1) * self.period <= now and self.done != self.hang_at:
            self.done += 1
            bar = f"{self.done * 100 // 119:3d}% Completed | {self.done}/119 [00:01<00:01, 1it/s]"
            self.log.feed("Multi-thread loading shards: " + bar, self.done * self.period)
        if self.done == 119:
            return dict(UP, weights=KIMI)
        seen = dict(observation(age_s=now, age=now - self.log.last_progress_at), weights=KIMI)
        seen["start"].update(
            phase=self.log.phase, described=self.log.describe(), bar=self.log.bar, phase_s=now
        )
        return seen


def ends(node, watch):
    """The second and the verdict with which a watch of that node ends, polled every two seconds."""
    now = 0.0
    while True:
        verdict = watch.judge(node.at(now), now)
        if verdict:
            return now, verdict
        now += 2.0


def test_a_load_of_twenty_minutes_and_more_ends_well():
    now, verdict = ends(SlowNode(period=10.5), gate.Watch(600))
    assert verdict.kind == "up"
    assert 1240 < now < 1260


def test_a_load_that_hangs_ends_within_what_its_files_are_allowed():
    # 8 files of 5 GiB at 64 MiB a second
    allowed = 640
    now, verdict = ends(SlowNode(period=2.0, hang_at=57), gate.Watch(600))
    assert verdict.kind == "stalled"
    assert 57 * 2 + allowed < now <= 57 * 2 + allowed + 4
    assert f"(allowed: {allowed} s)" in verdict.text


def test_a_host_without_bars_is_allowed_what_all_its_weights_are():
    watch = watched()
    for leads, age, ended in ((True, 641.0, True), (False, 641.0, False), (False, 8850.0, True)):
        seen = dict(observation(age=age), weights=KIMI)
        seen["start"]["leads"] = leads
        verdict = watch.judge(seen, 10)
        assert (verdict is not None and verdict.kind == "stalled") is ended


def test_small_files_are_allowed_no_less_than_any_start():
    watch = watched()
    assert watch.judge(observation(age=299.0), 10) is None
    assert watch.judge(observation(age=301.0), 12).kind == "stalled"


def test_the_whole_budget_grows_with_the_weights():
    seen = dict(observation(), weights=KIMI)
    watch = gate.Watch(600)
    assert watch.judge(seen, 0) is None
    # 552 GiB at a quarter of a GiB a second
    assert watch.judge(seen, 600 + 2208) is None
    assert watch.judge(seen, 600 + 2209) == gate.Verdict("late", "it is not up after 2808 s")


def test_what_is_seen_on_the_node():
    node = {
        "kernel": ["Out of memory: Killed process 17 (python)"],
        "kernel_readable": True,
        "gpus": [
            {"index": 0, "used_mib": 0, "total_mib": 183359, "holders": []},
            {
                "index": 1,
                "used_mib": 2575,
                "total_mib": 183359,
                "holders": [{"pid": 423, "name": "python3", "memory_mib": 2566, "user": "ops", "unit": None}],
            },
        ],
        "shm": {"total_bytes": 64 << 20, "free_bytes": 1 << 20},
    }
    assert gate.seen_on_node(node, dead=True) == [
        "kernel: Out of memory: Killed process 17 (python)",
        "GPU 1: 2566 MiB held by python3 (pid 423, user ops, no unit)",
        "/dev/shm: 1 of 64 MiB free",
    ]
    # A process that lives holds its own memory.
    assert "GPU" not in " ".join(gate.seen_on_node(node, dead=False))
    empty = {"kernel": [], "kernel_readable": False, "gpus": None, "shm": None}
    assert gate.seen_on_node(empty, dead=True) == []
