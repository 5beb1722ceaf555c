"""The log reader on excerpts of real logs, and on the single forms that releases differ in."""

import pathlib

import pytest
from ansible.module_utils.sglang_kit.startup_log import (
    PHASES,
    STALL_SECONDS,
    StartupLog,
    parse_bar,
    patience,
    split_prefix,
    split_record,
    told_status,
)
from hypothesis import given
from hypothesis import strategies as st

LOGS = pathlib.Path(__file__).parent / "data" / "logs"

# What a person reads from these logs: each phase in the order in which rank 0 entered it.
LOAD = ["starting", "distributed", "loading_weights/target", "weights_loaded/target"]
DRAFT = ["loading_weights/drafter", "weights_loaded/drafter"]
ROADS = {
    "0.5.21-cpu-serves-then-sigterm.log": [*LOAD, *DRAFT, "kv_cache", "warm_up", "serving", "draining"],
    "0.5.9-cpu-methods-missing.log": [*LOAD, "kv_cache"],
    "0.5.9-cpu-no-triton-driver.log": [*LOAD, "kv_cache", "distributed", *DRAFT, "kv_cache"],
    "0.5.17-tp2-scheduler-killed.log": [
        *LOAD,
        "distributed",
        *DRAFT,
        "kv_cache",
        "graph_capture/target",
        "graph_capture/drafter",
        "warm_up",
        "serving",
    ],
    # "fired up" is in this log, but nothing listens
    "0.5.17-port-taken.log": [*LOAD, "kv_cache", "graph_capture/target", "warm_up"],
    "0.5.17-truncated-shard.log": LOAD[:-1],
    "0.5.17-missing-shard.log": LOAD[:-1],
    "0.5.17-drafter-missing.log": ["starting"],
    "0.5.17-drafter-without-config.log": ["starting"],
    "0.5.17-package-missing.log": [
        *LOAD,
        "distributed",
        *DRAFT,
        "kv_cache",
        "graph_capture/target",
        "graph_capture/drafter",
    ],
    "0.5.17-load-32-shards.log": [*LOAD, "kv_cache", "warm_up", "serving"],
}


def read(name):
    log = StartupLog(at=0)
    # newline="" keeps the carriage returns
    with (LOGS / name).open(newline="", encoding="utf-8") as stream:
        for number, line in enumerate(stream.read().split("\n")):
            log.feed(line, at=number)
    return log


@pytest.mark.parametrize("name", sorted(ROADS))
def test_the_road_of_a_real_start(name):
    road = []
    for step in read(name).history:
        with_part = step["phase"] in ("loading_weights", "weights_loaded", "graph_capture")
        road.append(step["phase"] + ("/" + step["part"] if with_part else ""))
    assert road == ROADS[name]


def test_a_journal_made_of_single_frames_gives_the_same_road():
    whole = read("0.5.17-tp2-scheduler-killed.log")
    log = StartupLog(at=0)
    with (LOGS / "0.5.17-tp2-scheduler-killed.log").open(newline="", encoding="utf-8") as stream:
        for line in split_record(stream.read()):
            log.feed(line)
    assert [step["phase"] for step in log.history] == [step["phase"] for step in whole.history]
    assert log.progress == whole.progress


@pytest.mark.parametrize("name", sorted(ROADS))
def test_colours_and_unknown_lines_change_nothing(name):
    log = StartupLog(at=0)
    with (LOGS / name).open(newline="", encoding="utf-8") as stream:
        for line in stream.read().split("\n"):
            log.feed("[2026-01-01 00:00:00 TP0] what no release has ever said: 7/9")
            log.feed("\x1b[1;33m" + line.replace("\r", "\r\x1b[K") + "\x1b[0m")
    assert [step["phase"] for step in log.history] == [step["phase"] for step in read(name).history]


PIECES = [
    "\r",
    "\n",
    "[2026-01-01 00:00:00",
    " TP1]",
    "Load weight begin",
    "100%|",
    "| 3/",
    "0 [00:",
    "<?",
    "\x1b[",
]


@given(st.lists(st.one_of(st.text(), st.sampled_from(PIECES))))
def test_no_text_breaks_the_reader(pieces):
    log = StartupLog(at=0)
    log.feed("".join(pieces), at=1)
    assert log.phase in PHASES
    assert log.describe()


@pytest.mark.parametrize(
    "line, status",
    [
        (
            "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9",
            137,
        ),
        ("Subprocess scheduler_0 (pid=17) crashed with exit code 3. Triggering SIGQUIT", 3),
        ("Rank 0 scheduler is dead. Please check if there are relevant logs.", None),
    ],
)
def test_how_a_process_ended_in_the_engines_words(line, status):
    assert told_status(line) == status


def test_progress_through_the_shards():
    log = StartupLog(at=0)
    log.feed("[2026-01-01 00:00:00 TP0] Load weight begin. avail mem=1.00 GB", at=1)
    assert log.describe() == "loading weights"
    log.feed("Multi-thread loading shards:  48% Completed | 57/119 [01:12<01:20,  1.30s/it]", at=2)
    assert log.describe() == "loading weights 57/119 (48%)"
    assert log.bar["elapsed_s"] == 72
    assert log.bar["remaining_s"] == 80
    before = log.progress
    log.feed("Multi-thread loading shards:  48% Completed | 57/119 [01:13<01:21,  1.30s/it]", at=3)
    assert log.progress == before
    assert log.last_progress_at == 2
    log.feed("Multi-thread loading shards:  49% Completed | 58/119 [01:14<01:19,  1.30s/it]", at=4)
    assert log.progress == before + 1
    assert log.last_progress_at == 4


def test_a_line_glued_to_a_bar_is_read():
    log = StartupLog()
    log.feed(
        "Multi-thread loading shards:   0% Completed | 0/4 [00:00<?, ?it/s]"
        "[2026-01-01 00:00:00 TP0] Load weight end. elapsed=0.55 s, type=KimiK25ForConditionalGeneration,"
    )
    assert (log.phase, log.part) == ("weights_loaded", "target")


@pytest.mark.parametrize("tag", [" TP1", " DP1 TP0", " DP0 TP3 EP3", " PP1 TP0", " TP17"])
def test_other_ranks_do_not_count(tag):
    log = StartupLog()
    log.feed(f"[2026-01-01 00:00:00{tag}] Load weight begin. avail mem=138.21 GB")
    assert log.phase == "starting"
    assert log.progress == 0


@pytest.mark.parametrize("tag", ["", " TP0", " DP0 TP0", " PP0 TP0 EP0"])
def test_rank_0_counts(tag):
    log = StartupLog()
    log.feed(f"[2026-01-01 00:00:00{tag}] Load weight begin. avail mem=138.21 GB")
    assert log.phase == "loading_weights"


@pytest.mark.parametrize(
    "line, phase, part",
    [
        # wordings of 0.5.9 to 0.5.23
        ("Init torch distributed begin.", "distributed", None),
        ("Init parallel begin.", "distributed", None),
        ("Using KV cache dtype: torch.float8_e4m3fn", "kv_cache", None),
        ("KV Cache is allocated. #tokens: 4096, KV size: 0.00 GB", "kv_cache", None),
        ("MLA KV cache is allocated. dtype: torch.bfloat16, #tokens: 1, KV size: 1 GB", "kv_cache", None),
        ("Running FlashInfer autotune...", "autotune", None),
        ("Capture cuda graph begin. This can take up to several minutes.", "graph_capture", None),
        ("Capture draft cuda graph begin. This can take up to several minutes.", "graph_capture", "drafter"),
        ("Capture draft extend cuda graph begin. avail mem=1 GB", "graph_capture", "drafter"),
        ("Capture target verify CUDA graph begin. backend=full", "graph_capture", "target"),
        ("Capture target decode CUDA graph begin. backend=full", "graph_capture", "target"),
        ("Capture draft decode CUDA graph begin. backend=full", "graph_capture", "drafter"),
        ("INFO:     Waiting for application startup.", "warm_up", None),
        ("WARNING server_args.py:2385: Init torch distributed begin.", "distributed", None),
        ("SIGTERM received. signum=None frame=None. Draining requests", "draining", None),
    ],
)
def test_wordings(line, phase, part):
    log = StartupLog()
    log.feed("[2026-01-01 00:00:00] " + line)
    assert (log.phase, log.part) == (phase, part)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "\x1b[1;33m\x1b[0m",
        "\x00\ufffd",
        "[2026-01-01 00:00:00] Received a request: text='Load weight begin. Capture cuda graph begin'",
        "[2026-01-01 00:00:00] server_args={'model_path': '/m', 'note': 'Running FlashInfer autotune'}",
        "100%",
        "loading 5/4",
        "[2026-13-99 00:00:00",
        "  0%|          | 0/8 [00:00<?, ?it/s] and more",
    ],
)
def test_lines_that_say_nothing_change_no_phase(line):
    log = StartupLog()
    log.feed(line)
    assert log.phase == "starting"


def test_fired_up_alone_is_not_serving():
    log = StartupLog()
    log.feed("[2026-01-01 00:00:00] The server is fired up and ready to roll!")
    assert log.phase == "warm_up"
    log.feed(
        "[2026-01-01 00:00:00] INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)"
    )
    assert log.phase == "serving"


def test_the_launcher_knows_that_it_serves():
    log = StartupLog()
    log.feed("launcher: starting /opt/sglang/releases/r1")
    assert log.phase == "starting"
    log.feed("launcher: the server answers")
    assert log.phase == "serving"


@pytest.mark.parametrize(
    "line, expected",
    [
        (
            "Loading safetensors checkpoint shards: 100% Completed | 4/4 [00:00<00:00, 214.73it/s]",
            ("Loading safetensors checkpoint shards", 100, 4, 4, 0, 0),
        ),
        (
            "Capturing batches (bs=8 avail_mem=137.90 GB):  12%|\u2588\u258e | 1/8 [00:12<01:30, 12.91s/it]",
            ("Capturing batches (bs=8 avail_mem=137.90 GB)", 12, 1, 8, 12, 90),
        ),
        ("  0%|          | 0/8 [00:00<?, ?it/s]", ("", 0, 0, 8, 0, None)),
        ("x:  50%|# | 60/119 [1:02:03<1:00:00, 60.0s/it]", ("x", 50, 60, 119, 3723, 3600)),
    ],
)
def test_parse_bar(line, expected):
    bar = parse_bar(line)
    keys = ("name", "percent", "done", "total", "elapsed_s", "remaining_s")
    assert tuple(bar[key] for key in keys) == expected


def test_prefix():
    assert split_prefix("[2026-01-01 00:00:00.123 TP0] hello") == ("hello", True)
    assert split_prefix("[2026-01-01 00:00:00,123 DP0 TP1] hello") == ("hello", False)
    assert split_prefix("hello") == ("hello", True)


def test_every_phase_of_a_start_has_a_patience():
    assert set(STALL_SECONDS) == set(PHASES) - {"draining"}


@pytest.mark.parametrize(
    "name, words",
    [
        ("0.5.17-truncated-shard.log", "Scheduler hit an exception"),
        ("0.5.17-port-taken.log", "[Errno 98] error while attempting to bind"),
        # The exception of the rank that outlived the killed one.
        ("0.5.17-tp2-scheduler-killed.log", "Scheduler hit an exception"),
    ],
)
def test_a_real_start_that_is_lost(name, words):
    assert read(name).lost.startswith(words)


@pytest.mark.parametrize(
    "line",
    [
        "[2026-01-01 00:00:00] Received sigquit from a child process. It usually means the child failed.",
        "[2026-01-01 00:00:00] SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
        "[2026-01-01 00:00:00] Rank 0 scheduler is dead. Please check if there are relevant logs.",
        "RuntimeError: Rank 3 scheduler died during initialization (exit code: -9). If exit code is -9",
        "[2026-01-01 00:00:00] Subprocess scheduler_0 (pid=17) crashed with exit code -9. Triggering SIGQUIT",
        "[2026-01-01 00:00:00] Initialization failed. warmup error: Traceback",
        "launcher: the engine's process sglang::scheduler_TP3 (pid 17) was killed by signal 9",
    ],
)
def test_words_that_say_that_a_start_is_lost(line):
    log = StartupLog(at=0)
    log.feed(line)
    assert log.lost


@pytest.mark.parametrize("name", ["0.5.21-cpu-serves-then-sigterm.log", "0.5.17-load-32-shards.log"])
def test_a_start_that_serves_is_not_lost(name):
    assert read(name).lost is None


def test_the_words_of_a_request_lose_nothing():
    log = StartupLog(at=0)
    log.feed("[2026-01-01 00:00:00] Received a request: text='Scheduler hit an exception'")
    assert log.lost is None


def test_patience_grows_with_the_largest_file():
    assert patience(0) == STALL_SECONDS
    assert patience(2 << 30) == STALL_SECONDS
    # 8 files of 5 GiB at 64 MiB a second
    assert patience(5 << 30) == dict(STALL_SECONDS, loading_weights=640)
    # 100 files of 1 GiB of which no bar tells.
    assert patience(1 << 30, 100 << 30) == dict(STALL_SECONDS, loading_weights=1600)


@pytest.mark.parametrize(
    "arguments, leads",
    [
        ("server_args=ServerArgs(model_path='/m', nnodes=2, node_rank=0, json='{}')", True),
        ("server_args=ServerArgs(model_path='/m', nnodes=2, node_rank=1, json='{}')", False),
        ("server_args={'model_path': '/m', 'nnodes': 2, 'node_rank': 0, 'tp_size': 16}", True),
        ("server_args={'model_path': '/m', 'nnodes': 3, 'node_rank': 2, 'tp_size': 24}", False),
        ("server_args={'model_path': '/m'}", True),
    ],
)
def test_the_first_line_tells_whether_rank_0_is_here(arguments, leads):
    log = StartupLog(at=0)
    assert log.leads
    log.feed(f"[2026-01-01 00:00:00] {arguments}")
    assert log.leads is leads


def test_without_rank_0_the_first_rank_that_speaks_is_followed():
    log = StartupLog(at=0)
    log.feed("[2026-01-01 00:00:00] server_args={'nnodes': 2, 'node_rank': 1}")
    for rank, said in (
        (" TP9", "Init torch distributed begin."),
        (" TP8", "Load weight begin. avail mem=1 GB"),
        (" TP9", "Load weight begin. avail mem=1 GB"),
        (" TP8", "Load weight end. elapsed=1 s, type=K"),
        (" TP9", "Load weight end. elapsed=1 s, type=K"),
        (" TP8", "Load weight begin. avail mem=1 GB"),
    ):
        log.feed(f"[2026-01-01 00:00:01{rank}] {said}")
    assert [step["phase"] for step in log.history] == [
        *("starting", "distributed", "loading_weights", "weights_loaded")
    ]
