"""What counts as a sensible answer and as real speculation; and the module against a stand-in server."""

import http.server
import json
import pathlib
import shutil
import subprocess
import sys
import threading

import pytest
import sglang_acceptance
from ansible.module_utils.sglang_kit import acceptance, probe_http
from ansible.module_utils.testing import patch_module_args

MEASURE = pathlib.Path(__file__).resolve().parents[2] / "roles/sglang_gate/files/measure.py"

# As 0.5.21 answers.
CHAT = {
    "object": "chat.completion",
    "model": "kimi-k2.5",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "The answer is 72 km/h.", "reasoning_content": None},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 23, "total_tokens": 31, "completion_tokens": 8},
}


ENGLISH = (
    "A lighthouse warns ships of rocks with a strong lamp. It was built on high ground so that "
    "the light can be seen from far away, and so that waves do not reach it."
)
GERMAN = (
    "Ein Leuchtturm warnt Schiffe mit einer starken Lampe vor Felsen. Er wurde auf einer Anhöhe "
    "gebaut, damit das Licht weit zu sehen ist und Wellen ihn nicht erreichen."
)
CHINESE = "灯塔用明亮的灯光警告船只避开礁石。它建在高处。这样远处也能看到灯光。海浪也不会到达那里。"
CODE = (
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n\n"
    "The function starts with the first two numbers. It then adds them n times and returns the result."
)


def chat(text, thinking=None, model="kimi-k2.5", finish="stop"):
    body = json.loads(json.dumps(CHAT))
    body["model"] = model
    body["choices"][0]["message"].update(content=text, reasoning_content=thinking)
    body["choices"][0]["finish_reason"] = finish
    return json.dumps(body)


def test_a_chat_completion_is_read():
    assert acceptance.chat_answer(json.dumps(CHAT)) == {
        "model": "kimi-k2.5",
        "text": "The answer is 72 km/h.",
        "thinking": "",
        "finish_reason": "stop",
        "tokens": 8,
    }


@pytest.mark.parametrize(
    "text",
    ["", "<html>", "[]", "{}", '{"choices": []}', '{"choices": [null]}', '{"choices": [{"message": 1}]}'],
)
def test_what_is_no_chat_completion(text):
    assert acceptance.chat_answer(text) is None


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("A lighthouse warns ships of the coast with a bright lamp.", None),
        ("72", None),
        ("def f(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n", None),
        ("", "it is empty"),
        (" \n", "it is empty"),
        ("\ufffd" * 5 + "abc", "it is full of replacement characters"),
        ("the " * 20, "it repeats 'the'"),
        ("!" * 100, "it is made of '!' alone"),
        ("!!!!!!!! !!!!!!!!", "it is made of '!' alone"),
        ("!?" * 50, "it repeats itself"),
        ("The lamp turns and the keeper watches. " + "and then " * 9, "it ends in a loop of 'and then '"),
        ("| a | b |\n|---|---|\n| 1 | 2 |\n\nThe table shows both.\n\n--------------------", None),
        ("The result is 1000000000000.", None),
        ("to be or not to be, " * 20, "it repeats itself"),
    ],
)
def test_degenerate(text, wrong):
    assert acceptance.degenerate(text) == wrong


@pytest.mark.parametrize(
    "prompt, answer, model, strict, wrong",
    [
        ({"expect": "72"}, chat("It is 72."), "kimi-k2.5", True, None),
        ({"expect": "FIBONACCI|def "}, chat("the fibonacci numbers"), "", True, None),
        ({"expect": "72"}, chat("It is 73."), "", True, "it does not contain '72'"),
        ({}, chat("It is 72."), "kimi-k2", True, "it comes from the model 'kimi-k2.5', expected 'kimi-k2'"),
        ({}, chat(""), "", True, "it is empty"),
        ({}, chat(None), "", False, "it is empty"),
        # a small budget of tokens that was all thought
        ({"expect": "72"}, chat("", "180 / 2.5 is 72", finish="length"), "", True, None),
        # a budget that was all thought: nothing that was not yet said is missing
        ({"expect": "72"}, chat("", "The user asks for a speed, so", finish="length"), "", True, None),
        (
            {"expect": "72"},
            chat("", "The user asks for a speed, so", finish="stop"),
            "",
            True,
            "it does not contain '72'",
        ),
        ({}, chat("", "!" * 100, finish="length"), "", True, "it is made of '!' alone"),
        ({"language": "en"}, chat(GERMAN), "", True, "it is not in the language 'en'"),
        ({"language": "en"}, chat(GERMAN), "", False, None),
        ({}, chat("!" * 100), "", True, "it is made of '!' alone"),
        ({}, chat("!" * 100), "", False, None),
        ({}, "<html>", "", False, "the server sent no chat completion"),
    ],
)
def test_judge_answer(prompt, answer, model, strict, wrong):
    assert acceptance.judge_answer(prompt, acceptance.chat_answer(answer), model, strict) == wrong


def test_acceptance_is_tokens_over_verify_steps_of_all_requests_together():
    metas = [
        {"completion_tokens": 16, "spec_verify_ct": 8, "spec_accept_length": 2.0},
        {"completion_tokens": 64, "spec_verify_ct": 16, "spec_accept_length": 4.0},
    ]
    assert acceptance.acceptance(metas) == {
        "length": 3.333,
        "tokens": 80,
        "verify_steps": 24,
        "requests": 2,
        "speculated": 2,
        "accepted": None,
        "proposed": None,
    }


def test_requests_without_a_verify_step_do_not_dilute_the_length():
    metas = [{"completion_tokens": 16, "spec_verify_ct": 8}, {"completion_tokens": 100}]
    measured = acceptance.acceptance(metas)
    assert (measured["length"], measured["speculated"], measured["requests"]) == (2.0, 1, 2)
    assert acceptance.judge_acceptance(measured, (1.7, 4.0)) == "only 1 of 2 requests were speculated"


@pytest.mark.parametrize(
    "text, is_foreign",
    [(ENGLISH, False), (CODE, False), (GERMAN, True), (CHINESE, True), ("72 km/h", False), ("", False)],
)
def test_the_language_of_an_answer(text, is_foreign):
    assert acceptance.foreign(text, "en") is is_foreign


def test_a_thought_without_a_parser_is_told_from_the_answer():
    answer = acceptance.chat_answer(chat("<think>180 / 2.5</think>It is 72."))
    assert (answer["text"], answer["thinking"]) == ("It is 72.", "<think>180 / 2.5")
    answer = acceptance.chat_answer(chat("<think>180 / 2.5 is", finish="length"))
    assert (answer["text"], answer["thinking"]) == ("", "<think>180 / 2.5 is")


# The field names of 0.5.10, 0.5.11, 0.5.17 (which has the old ones as well) and 0.5.21.
@pytest.mark.parametrize(
    "counts",
    [
        {"spec_accept_token_num": 8, "spec_draft_token_num": 24},
        {"spec_accepted_drafts": 8, "spec_proposed_drafts": 24},
        {
            "spec_num_correct_drafts": 8,
            "spec_num_proposed_drafts": 24,
            "spec_accept_token_num": 9,
            "spec_draft_token_num": 25,
        },
        {"spec_num_correct_drafts": 8, "spec_num_proposed_drafts": 24},
    ],
)
def test_draft_tokens_are_counted_by_each_releases_names(counts):
    measured = acceptance.acceptance([dict(counts, completion_tokens=16, spec_verify_ct=8)] * 2)
    assert (measured["accepted"], measured["proposed"]) == (16, 48)


def test_the_gauge_of_the_metrics():
    text = (
        "# HELP sglang:spec_accept_length The average acceptance length of speculative decoding.\n"
        "# TYPE sglang:spec_accept_length gauge\n"
        'sglang:spec_accept_length{engine_type="unified",model_name="kimi",tp_rank="0"} 2.5\n'
        'sglang:spec_accept_length{engine_type="unified",model_name="kimi",tp_rank="1"} 1.5\n'
        'sglang:spec_accept_rate{engine_type="unified",model_name="kimi",tp_rank="0"} 0.4\n'
    )
    assert acceptance.metrics_acceptance(text) == 2.0
    assert acceptance.metrics_acceptance("sglang:spec_accept_length{} NaN\n") is None
    assert acceptance.metrics_acceptance("") is None


def test_the_settings_of_a_server_hold_no_key():
    info = {"version": "0.5.21", "api_key": "s3cret", "admin_api_key": "s3cret", "tp_size": 8}
    assert acceptance.server_settings(json.dumps(info)) == {"version": "0.5.21", "tp_size": 8}
    assert acceptance.server_settings("<html>") == {}
    assert acceptance.server_settings("[]") == {}


# Measured on real engines with drafters that are perfect, middling, useless, and not there.
@pytest.mark.parametrize(
    "length, wrong",
    [
        (4.0, None),
        (2.0, None),
        (1.02, "speculation is silently off"),
        (1.0, "speculation is silently off"),
        (1.3, "the acceptance length is 1.3, expected 1.7 to 4.0"),
        (4.2, "the acceptance length is 4.2, expected 1.7 to 4.0"),
        (None, "speculation is off: none of 2 requests had a verify step"),
    ],
)
def test_judge_acceptance(length, wrong):
    measured = {"length": length, "tokens": 1, "verify_steps": 1, "requests": 2, "speculated": 2}
    found = acceptance.judge_acceptance(measured, (1.7, 4.0))
    assert found == wrong if wrong is None else found.startswith(wrong)


def test_the_servers_own_figure():
    info = json.dumps({"version": "0.5.21", "internal_states": [{"avg_spec_accept_length": 2.0004}]})
    assert acceptance.server_acceptance(info) == 2.0
    assert acceptance.server_acceptance(json.dumps({"internal_states": [{}]})) is None
    assert acceptance.server_acceptance("<html>") is None


def test_a_server_figure_far_from_the_measured_one_is_remarked():
    assert acceptance.compare_with_server(2.0, 2.4) is None
    assert acceptance.compare_with_server(2.0, None) is None
    assert "is 1.0, measured now: 2.0" in acceptance.compare_with_server(2.0, 1.0)


class StandIn(http.server.BaseHTTPRequestHandler):
    """A stand-in for the server; its class attributes say how it behaves."""

    key = None
    health = 200
    text = "The answer is 72 km/h."
    verify_steps = 8
    asked = None

    def do_GET(self):
        self.asked.append(self.path)
        if self.path == "/health":
            self.answer(self.health, "")
        elif self.key and self.headers["Authorization"] != "Bearer " + self.key:
            self.answer(401, "")
        elif self.path == "/v1/models":
            self.answer(200, json.dumps({"data": [{"id": "kimi-k2.5"}]}))
        elif self.path == "/server_info":
            self.answer(200, json.dumps({"internal_states": [{"avg_spec_accept_length": 2.0}]}))
        else:
            self.answer(404, "")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body))
        if self.key and self.headers["Authorization"] != "Bearer " + self.key:
            self.answer(401, "")
        elif self.path == "/v1/chat/completions" and body["model"] == "kimi-k2.5":
            self.answer(200, chat(self.text))
        elif self.path == "/generate":
            meta = {"completion_tokens": 16}
            if self.verify_steps:
                meta["spec_verify_ct"] = self.verify_steps
            self.answer(200, json.dumps({"text": "x", "meta_info": meta}))
        else:
            self.answer(500, "internal\nerror")

    def answer(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    """Return a function that starts a stand-in server: (url, list of what it was asked)."""
    servers = []

    def start(**behaviour):
        handler = type("Handler", (StandIn,), dict(behaviour, asked=[]))
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}", handler.asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def run(capsys, **params):
    params.setdefault("prompts", [{"name": "maths", "text": "How fast?", "expect": "72", "max_tokens": 32}])
    with patch_module_args(params), pytest.raises(SystemExit):
        sglang_acceptance.main()
    return json.loads(capsys.readouterr().out)


def test_a_server_that_passes(serve, capsys):
    url, asked = serve()
    result = run(
        capsys, url=url, model="kimi-k2.5", band=[1.7, 4.0], native_format="<|user|>{prompt}<|assistant|>"
    )
    assert (result["passed"], result["problems"], result["changed"]) == (True, [], False)
    assert result["model"] == "kimi-k2.5"
    assert result["answers"][0]["text"] == "The answer is 72 km/h."
    assert result["acceptance"]["length"] == 2.0
    assert result["acceptance"]["server"] == 2.0
    assert result["acceptance"]["metrics"] is None
    posts = dict(item for item in asked if isinstance(item, tuple))
    assert posts["/v1/chat/completions"]["temperature"] == 0
    assert posts["/v1/chat/completions"]["max_tokens"] == 32
    assert posts["/generate"]["text"] == "<|user|>How fast?<|assistant|>"


def test_a_server_that_asks_for_its_key(serve, capsys, tmp_path):
    url, _asked = serve(key="k3y")
    key = tmp_path / "engine-key"
    assert "the server serves [], expected kimi-k2.5" in str(
        run(capsys, url=url, model="kimi-k2.5", key_file=str(key))
    )
    key.write_text("k3y\n")
    result = run(capsys, url=url, model="kimi-k2.5", band=[1.7, 4.0], key_file=str(key))
    assert (result["passed"], result["acceptance"]["server"]) == (True, 2.0)
    assert "k3y" not in str(result)


@pytest.mark.parametrize(
    "behaviour, params, problem",
    [
        ({"health": 503}, {}, "the health endpoint does not say 200, but HTTP 503"),
        ({}, {"model": "other"}, "the server serves ['kimi-k2.5'], expected other"),
        ({"text": "It is 73."}, {}, "maths: it does not contain '72'"),
        ({"text": "72 " * 30}, {}, "maths: it repeats '72'"),
        ({"verify_steps": 16}, {"band": [1.7, 4.0]}, "speculation is silently off: 1.0 tokens a step"),
        ({"verify_steps": 0}, {"band": [1.7, 4.0]}, "speculation is off: none of 1 requests"),
    ],
)
def test_a_server_that_does_not_pass(serve, capsys, behaviour, params, problem):
    url, _asked = serve(**behaviour)
    result = run(capsys, url=url, **params)
    assert not result["passed"]
    assert not result.get("failed")
    assert len(result["problems"]) == 1
    assert result["problems"][0].startswith(problem)


def test_without_a_band_nothing_is_measured(serve, capsys):
    url, asked = serve(verify_steps=0)
    result = run(capsys, url=url)
    assert result["passed"]
    assert result["acceptance"] is None
    assert "/server_info" not in asked


def test_a_server_that_is_not_there(capsys):
    result = run(capsys, url="http://127.0.0.1:1")
    assert result["problems"] == ["the health endpoint does not say 200, but refused"]
    assert result["health_status"] is None


def test_check_mode_asks_nothing(serve, capsys):
    url, asked = serve()
    result = run(capsys, url=url, _ansible_check_mode=True)
    assert result["skipped"]
    assert asked == []


@pytest.mark.parametrize("band", [[2.0], [3.0, 2.0], [1.0, 2.0, 3.0]])
def test_a_band_that_is_none(capsys, band):
    result = run(capsys, url="http://127.0.0.1:1", band=band)
    assert result["failed"]
    assert "expected the lowest and the highest length" in result["msg"]


def test_an_answer_in_another_language_does_not_pass(serve, capsys):
    url, _asked = serve(text=GERMAN)
    prompt = {"name": "prose", "text": "How does a lighthouse work?", "max_tokens": 32, "language": "en"}
    result = run(capsys, url=url, prompts=[prompt])
    assert result["problems"] == ["prose: it is not in the language 'en'"]


@pytest.fixture
def measure(tmp_path):
    """Return a function that runs the node's own measurement as its unit does: (metrics, what it printed)."""
    for source in (MEASURE, acceptance.__file__, probe_http.__file__):
        shutil.copy(source, tmp_path)

    def go(url):
        settings = {
            "url": url,
            "timeout": 5,
            "key_file": str(tmp_path / "engine-key"),
            "model": "kimi-k2.5",
            "prompts": [{"name": "maths", "text": "How fast?", "expect": "72", "max_tokens": 32}],
            "sensible": True,
            "native_format": "{prompt}",
            "band": [1.7, 4.0],
        }
        (tmp_path / "settings.json").write_text(json.dumps(settings))
        done = subprocess.run(
            [sys.executable, "-I", "measure.py", "settings.json", "sglang_gate.prom"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        rows = (tmp_path / "sglang_gate.prom").read_text().splitlines()
        return dict(row.rsplit(" ", 1) for row in rows if not row.startswith("#")), done.stdout

    return go


def test_the_nodes_own_measurement_of_a_server_that_passes(serve, measure):
    url, _asked = serve()
    metrics, said = measure(url)
    assert said == ""
    assert metrics["sglang_gate_passed"] == "1"
    assert metrics["sglang_gate_acceptance_length"] == "2.0"
    assert metrics["sglang_gate_speculated_requests"] == metrics["sglang_gate_requests"] == "1"
    assert float(metrics['sglang_gate_answer_seconds{prompt="maths"}']) >= 0


def test_the_nodes_own_measurement_of_a_server_that_is_gone(measure):
    metrics, said = measure("http://127.0.0.1:1")
    assert metrics.pop("sglang_gate_passed") == "0"
    assert list(metrics) == ["sglang_gate_last_run_timestamp_seconds"]
    assert said == "the health endpoint does not say 200, but refused\n"
