"""The benchmark's runner and the page that it ends in."""

import html.parser
import importlib.util
import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = load("bench_run", "roles/sglang_bench/files/run.py")
page = load("bench_filter", "plugins/filter/sglang_bench.py")

CONFIG = """# Written by Ansible (role sglang_server). Keys are the engine's own long options.
json-model-override-args: "{\\"a\\": 1}"
model-path: "/srv/models/nvidia/Kimi-K2.5-NVFP4/abc"
served-model-name: "kimi-k2.5"
speculative-algorithm: "EAGLE3"
tp-size: 8
"""
SETTINGS = {"url": "http://127.0.0.1:30000", "concurrency": 4, "requests": 16, "output_tokens": 256}
METRICS = """# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{is_streaming="false",model_name="m"} 100.0
sglang:generation_tokens_total{is_streaming="true",model_name="m"} 1.5e+02
sglang:spec_verify_calls_total{model_name="m"} 125.0
sglang:spec_verify_calls_created{model_name="m"} 1e9
"""


def test_the_release_s_own_files_are_read():
    config = run.read_config(CONFIG)
    assert config["model-path"] == "/srv/models/nvidia/Kimi-K2.5-NVFP4/abc"
    assert (config["tp-size"], config["speculative-algorithm"]) == (8, "EAGLE3")
    assert run.read_environment('# by Ansible\nOMP_NUM_THREADS="1"\n') == {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("sign", [":", "_"])
def test_counters_are_summed(sign):
    text = METRICS.replace("sglang:", "sglang" + sign)
    assert run.counters(text) == {run.TOKENS: 250.0, run.STEPS: 125.0}


@pytest.mark.parametrize(
    "before, after, told, expected",
    [
        ({run.TOKENS: 50, run.STEPS: 25}, {run.TOKENS: 250, run.STEPS: 125}, 9.9, 2.0),
        ({run.TOKENS: 0}, {run.TOKENS: 30, run.STEPS: 10}, None, 3.0),
        ({run.TOKENS: 50, run.STEPS: 25}, {run.TOKENS: 90, run.STEPS: 25}, None, None),
        # A release that does not count its steps.
        ({run.TOKENS: 50}, {run.TOKENS: 90}, 2.71828, 2.718),
        ({run.TOKENS: 50}, {run.TOKENS: 90}, None, None),
    ],
)
def test_the_acceptance_length_is_that_of_the_run(before, after, told, expected):
    assert run.accept_length(before, after, told) == expected


def test_the_command_line():
    words = run.command("/e/bin/python", run.read_config(CONFIG), SETTINGS, "/t/p.json", "/t/o.jsonl")
    assert words[:4] == ["/e/bin/python", "-B", "-m", "sglang.bench_serving"]
    options = dict(zip(words[4:-1:2], words[5:-1:2]))
    assert options["--max-concurrency"] == "4" and options["--num-prompts"] == "16"
    assert options["--tokenizer"] == "/srv/models/nvidia/Kimi-K2.5-NVFP4/abc"
    assert words[-1] == "--disable-tqdm"


def result(**more):
    found = dict.fromkeys(run.FIGURES, 1)
    found.update(output_throughput=62.0, server_info={"api_key": "secret"})
    for latency in run.LATENCIES:
        found.update({f"{summary}_{latency}_ms": 10.0 for summary in run.SUMMARIES})
    return dict(found, **more)


def test_what_is_kept_holds_no_key():
    kept = run.figures(result(), SETTINGS, 2.5)
    assert "secret" not in json.dumps(kept)
    assert (kept["concurrency"], kept["requests"], kept["accept_length"]) == (4, 16, 2.5)
    assert kept["ttft_ms"] == {"mean": 10.0, "median": 10.0, "p90": 10.0, "p95": 10.0, "p99": 10.0}


def test_a_release_without_a_percentile():
    old = result()
    del old["p95_ttft_ms"]
    assert "p95" not in run.figures(old, SETTINGS, None)["ttft_ms"]


def test_the_prompts_are_many_and_different():
    prompts = json.loads((ROOT / "roles/sglang_bench/files/prompts.json").read_text(encoding="utf-8"))
    assert len(prompts) == len(set(prompts)) >= 20
    assert all(len(prompt) > 40 for prompt in prompts)


def record(at, release="0.5.23-abc", speculation=True, **figures):
    runs = [
        dict(
            run.figures(
                result(output_throughput=10.0 * places, **figures), dict(SETTINGS, concurrency=places), 2.5
            )
        )
        for places in (1, 4)
    ]
    for entry in runs:
        entry.update(completed=16, accept_length=2.5 if speculation else None)
    return {
        "at": at,
        "host": "n<1>",
        "release": release,
        "url": "http://e",
        "speculation": speculation,
        "output_tokens": 256,
        "runs": runs,
    }


class Reader(html.parser.HTMLParser):
    """Counts the tags, keeps text and attributes, and sees that all that is opened is closed."""

    EMPTY = ("meta", "line", "circle", "polyline")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_draws_this_release_against_others():
    text = page.report(
        [
            record("2026-05-01T10:00:00+00:00", release="0.5.21-old"),
            record("2026-06-01T10:00:00+00:00"),
            record("2026-06-01T11:00:00+00:00", release="0.5.23-plain", speculation=False),
        ]
    )
    read = Reader(text)
    assert read.open == []
    assert read.tags.count("svg") == 5 and read.tags.count("table") == 3
    # Throughput of three, acceptance of two; of each latency three, with two more percentiles of the first.
    assert read.tags.count("polyline") == 3 + 2 + 3 * 5
    said = " ".join(read.text)
    assert "Benchmark of n<1>" in said and "0.5.23-plain, without speculation" in said
    # The one that speculates comes first, though the other is newer.
    assert said.index("0.5.23-abc") < said.index("0.5.23-plain") < said.index("0.5.21-old")


def test_the_page_needs_nothing_else():
    text = page.report([record("2026-06-01T10:00:00+00:00")])
    assert not {"script", "link", "img", "iframe"} & set(Reader(text).tags)
    assert [value for name, value in Reader(text).attributes if name in ("href", "src")] == []
    assert not re.search(r"url\(|@import", text)


def test_points_lie_where_their_figures_say():
    text = page.chart("T", "u", [("#000", "", "l", {1: 0.0, 4: 100.0})], [1, 4])
    circles = [(float(x), float(y)) for x, y in re.findall(r'circle cx="([\d.]+)" cy="([\d.]+)"', text)]
    inner = page.WIDTH - page.LEFT - page.RIGHT
    assert circles == [
        (page.LEFT + inner / 4, page.HEIGHT - page.BOTTOM),
        (page.LEFT + 3 * inner / 4, page.TOP),
    ]


@pytest.mark.parametrize(
    "top, steps", [(100, [0, 20, 40, 60, 80, 100]), (0.07, [0, 0.02, 0.04, 0.06, 0.08]), (0, [0, 1])]
)
def test_the_axis_has_round_numbers(top, steps):
    assert page.nice_steps(top) == pytest.approx(steps)


def test_requests_without_an_answer_are_said():
    failed = record("2026-06-01T10:00:00+00:00")
    failed["runs"][0]["completed"] = 14
    assert "2 requests were not answered" in page.report([failed])


def test_nothing_measured():
    with pytest.raises(ValueError, match="no measurements"):
        page.report([])
