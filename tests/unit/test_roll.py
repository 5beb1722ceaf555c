"""What a roll reads of routers: who knows a node, and what clients got since it is back."""

import base64
import json
import pathlib
import runpy

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
filters = runpy.run_path(str(ROOT / "plugins/filter/sglang_gateway.py"))["FilterModule"]().filters()
# As smg 1.13.0 writes them.
READING = """
# TYPE smg_http_responses_total counter
smg_http_responses_total{{path="/workers",status_code="503",error_code=""}} 42
smg_http_responses_total{{path="/v1/chat/completions",status_code="200",error_code=""}} {good}
smg_http_responses_total{{path="/v1/chat/completions",status_code="503",error_code="no_worker"}} {bad}
smg_http_responses_total{{path="/v1/models",status_code="401",error_code=""}} {refused}
smg_router_requests_total{{endpoint="chat",streaming="false"}} 3
"""


def listed(host, **kept):
    text = json.dumps({"in": [], "out": [], **kept})
    return {"item": host, "content": base64.b64encode(text.encode()).decode()}


def test_a_node_is_known_where_it_is_in_or_out_on_purpose():
    lists = [
        listed("g1", **{"in": ["https://a"]}),
        listed("g2", out=["https://a"]),
        listed("g3", out=["https://ab"]),
    ]
    assert filters["sglang_gateway_knowing"](lists, "https://a") == ["g1", "g2"]


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ((10, 0, 0), (15, 0, 0), {"all": 5, "failed": 0}),
        ((10, 1, 0), (15, 3, 4), {"all": 11, "failed": 2}),
        # The router was started in between: it counts from nothing again.
        ((10, 5, 0), (4, 1, 0), {"all": 5, "failed": 1}),
        ((0, 0, 0), (0, 0, 0), {"all": 0, "failed": 0}),
    ],
)
def test_answers_are_counted_between_two_readings(before, after, found):
    readings = [READING.format(good=good, bad=bad, refused=refused) for good, bad, refused in (before, after)]
    assert filters["sglang_gateway_answered"](readings) == found


def test_a_router_that_has_answered_nothing_yet_counts_from_nothing():
    assert filters["sglang_gateway_answered"](["", READING.format(good=2, bad=1, refused=0)]) == {
        "all": 3,
        "failed": 1,
    }


def test_of_hosts_that_are_one_server_rank_0_alone_answers():
    hostvars = {"n1": {}, "n2": {"sglang_server_span": "pair"}, "n3": {"sglang_server_span": "pair"}}
    groups = {"pair": ["n3", "n2"]}
    assert filters["sglang_gateway_answering"](["n1", "n2", "n3"], hostvars, groups) == ["n1", "n3"]
