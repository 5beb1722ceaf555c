# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Workers of a router: what is decided, and what the module does with a router like smg 1.13."""

import http.server
import importlib.util
import json
import pathlib
import sys
import threading
import time
import types

import pytest
import sglang_worker
from ansible.errors import AnsibleFilterError
from ansible.module_utils.sglang_kit import gateway, gateway_http
from ansible.module_utils.testing import patch_module_args

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONTROL_KEY, WORKER_KEY = "control" * 6, "worker_" * 6
A, B = "https://a.example", "https://b.example:8443"


def load(path):
    spec = importlib.util.spec_from_file_location("loaded", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


filters = load("plugins/filter/sglang_gateway.py")


def worker(url, status="ready", **more):
    healthy = status == "ready"
    return gateway.Worker(url, more.get("id", url), status, healthy, 0)


@pytest.mark.parametrize(
    ("listed", "url", "state", "action"),
    [
        ([], A, "present", "add"),
        ([worker(A)], A, "present", None),
        ([worker(A, "failed")], A, "present", None),
        ([worker(A, "draining")], A, "present", None),
        ([worker(B)], A, "present", "add"),
        ([worker(A)], A, "held", "remove"),
        ([worker(A, "not_ready")], A, "absent", "remove"),
        ([worker(A, "draining")], A, "held", None),
        ([worker(B)], A, "absent", None),
        ([], A, "held", None),
    ],
)
def test_what_is_to_be_done(listed, url, state, action):
    assert gateway.decide(listed, url, state) == action


@pytest.mark.parametrize(
    ("listed", "others"),
    [
        ([worker(A)], "none"),
        ([worker(A), worker(B, "draining")], f"{B} (draining)"),
        ([worker(A), worker(B, "failed")], f"{B} (failed)"),
        ([worker(A), worker(B)], None),
        # What is ill itself takes nothing away.
        ([worker(A, "not_ready")], None),
        ([worker(A, "draining"), worker(B)], None),
        ([worker(B)], None),
    ],
)
def test_the_last_healthy_worker_is_known(listed, others):
    expected = others and f"{A} is the last healthy worker; the others: {others}"
    assert gateway.refusal(listed, A) == expected


@pytest.mark.parametrize(
    ("before", "state", "after"),
    [
        ({"in": [], "out": []}, "present", {"in": [A], "out": []}),
        ({"in": [A], "out": []}, "held", {"in": [], "out": [A]}),
        ({"in": [B], "out": [A]}, "present", {"in": [A, B], "out": []}),
        ({"in": [A, B], "out": []}, "absent", {"in": [B], "out": []}),
        ({"in": [B], "out": [A]}, "absent", {"in": [B], "out": []}),
        ({"in": [A], "out": []}, "present", {"in": [A], "out": []}),
    ],
)
def test_what_is_remembered(before, state, after):
    assert gateway.keep(before, A, state) == after
    assert gateway.parse_kept(gateway.write_kept(after)) == after


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"in": [], "out": null}', '{"in": ["node1"], "out": []}'])
def test_a_list_that_is_none_is_refused(text):
    with pytest.raises(ValueError):
        gateway.parse_kept(text)


@pytest.mark.parametrize(
    ("kept", "listed", "add", "remove"),
    [
        ({"in": [A], "out": []}, [], [A], []),
        ({"in": [A], "out": []}, [worker(A, "failed")], [], []),
        ({"in": [], "out": [A]}, [worker(A)], [], [A]),
        # Somebody's own, or one that was registered after it had been taken out.
        ({"in": [B], "out": []}, [worker(A), worker(B)], [], [A]),
        ({"in": [], "out": [A]}, [worker(A, "draining")], [], []),
        # It drains first, and is added when it is gone.
        ({"in": [A], "out": []}, [worker(A, "draining")], [], []),
    ],
)
def test_a_router_is_kept_to_its_list(kept, listed, add, remove):
    found, gone = gateway.correct(kept, listed)
    assert (found, [item.url for item in gone]) == (add, remove)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("https://a.example/", A),
        ("http://10.0.0.1:30000", "http://10.0.0.1:30000"),
        ("https://[fd00::1]:443", "https://[fd00::1]:443"),
    ],
)
def test_urls_are_compared_in_one_form(given, url):
    assert gateway.normal_url(given) == url
    assert gateway.is_same(given, url)


@pytest.mark.parametrize("given", ["node1", "ftp://a", "https://", "https://a/v1", "https://a?x"])
def test_what_is_no_address_is_refused(given):
    with pytest.raises(ValueError, match="no address of a server"):
        gateway.normal_url(given)
    assert not gateway.is_same(given, A)


def test_a_list_of_workers_is_read_and_nothing_else():
    # As smg 1.13.0 writes it.
    text = (
        '{"workers":[{"id":"01a2","model_id":"m","url":"https://a.example","models":[{"id":"m"}],'
        '"worker_type":"regular","is_healthy":true,"status":"ready","load":3,"http2":false}],"total":1}'
    )
    assert gateway.read_workers(text) == [gateway.Worker(A, "01a2", "ready", True, 3)]
    for wrong in ("", "no json", "{}", '{"workers": [{"url": "https://a.example"}]}', "[]"):
        with pytest.raises(ValueError):
            gateway.read_workers(wrong)


class StandIn:
    """A router and its workers in one server, as smg 1.13.0 was seen to behave.

    202 says that something is begun. A worker drains for some time before it is gone; one that waits for its
    health is neither listed nor deleted.

    drain_s: seconds of draining. deaf: URLs that never become ready. wrong_key: workers answer 401.
    elsewhere: how many answers come from another worker first. ill: health is 503.
    """

    def __init__(self):
        self.listed, self.calls, self.asked = {}, [], 0
        self.drain_s, self.deaf, self.wrong_key, self.elsewhere, self.ill = 0.6, set(), False, 0, False
        stand_in = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_args):
                pass

            def do(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or "null")
                status, answer, headers = stand_in.answer(self.command, self.path, self.headers, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = do

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def put(self, url, status="ready"):
        self.listed[url] = {
            "id": f"id-{len(self.calls)}-{url[-4:]}",
            "status": status,
            "since": time.monotonic(),
        }

    def answer(self, method, path, headers, body):
        key = (headers.get("Authorization") or "").replace("Bearer ", "")
        if path.startswith("/workers"):
            if key != CONTROL_KEY:
                return 401, {"error": "Missing or invalid Authorization header"}, {}
            return (*self.workers(method, path, body), {})
        if path == "/health":
            return (503 if self.ill else 200), {}, {}
        if key != WORKER_KEY or self.wrong_key:
            return 401, {"error": {"code": "invalid_api_key"}}, {}
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny"}]}, {}
        self.asked += 1
        # The worker's own answer has no such header; here both are one server.
        self.elsewhere, here = max(0, self.elsewhere - 1), self.elsewhere == 0
        return 200, {"model": body["model"]}, {"X-Smg-Routed-Worker-Id": self.url if here else B}

    def workers(self, method, path, body):
        now = time.monotonic()
        for url, item in list(self.listed.items()):
            if item["status"] == "draining" and now - item["since"] > self.drain_s:
                del self.listed[url]
        if method == "GET":
            found = [
                {
                    "url": url,
                    "id": item["id"],
                    "status": item["status"],
                    "is_healthy": item["status"] == "ready",
                }
                for url, item in self.listed.items()
            ]
            return 200, {"workers": found}
        self.calls.append(
            (method, body["url"] if body else path.rpartition("/")[2], (body or {}).get("api_key"))
        )
        if method == "POST":
            if body["url"] in self.listed:
                return 409, {"code": "WORKER_ALREADY_EXISTS"}
            if body["url"] not in self.deaf:
                self.put(body["url"])
            return 202, {"status": "accepted"}
        for item in self.listed.values():
            if item["id"] == path.rpartition("/")[2]:
                item.update(status="draining", since=now)
                return 202, {"status": "accepted"}
        return 404, {"code": "WORKER_NOT_FOUND"}


@pytest.fixture
def router():
    stand_in = StandIn()
    yield stand_in
    stand_in.close()


@pytest.fixture
def run(router, tmp_path, capsys):
    """Run the module for the stand-in's own address, or another one."""
    for name, key in (("control-key", CONTROL_KEY), ("worker-key", WORKER_KEY)):
        (tmp_path / name).write_text(key + "\n")

    def call(state="present", check=False, **arguments):
        parameters = {
            "url": router.url,
            "state": state,
            "router": router.url,
            "key_file": str(tmp_path / "control-key"),
            "worker_key_file": str(tmp_path / "worker-key"),
            "remember": str(tmp_path / "workers.json"),
            "wait": 3,
            **arguments,
            "_ansible_check_mode": check,
        }
        with patch_module_args(parameters), pytest.raises(SystemExit):
            sglang_worker.main()
        return json.loads(capsys.readouterr().out)

    return call


def kept(tmp_path):
    return json.loads((tmp_path / "workers.json").read_text())


def test_a_worker_is_added_once_and_waited_for(run, router, tmp_path):
    assert run(check=True)["changed"] and router.calls == []
    assert not (tmp_path / "workers.json").exists()
    done = run()
    assert (done["changed"], done["ready"], done["held"]) == (True, True, [])
    assert [(item["url"], item["status"]) for item in done["workers"]] == [(router.url, "ready")]
    assert router.calls == [("POST", router.url, WORKER_KEY)]
    assert kept(tmp_path) == {"in": [router.url], "out": []}
    done = run()
    assert (done["changed"], done["ready"], len(router.calls)) == (False, True, 1)


def test_a_worker_is_taken_out_and_gone_when_the_module_ends(run, router, tmp_path):
    run()
    router.put(B)
    done = run("held", check=True)
    assert done["changed"] and len(router.calls) == 1 and kept(tmp_path)["in"] == [router.url]
    assert json.loads(done["diff"]["after"]) == {"workers": [B], "held": [router.url]}
    done = run("held")
    assert done["changed"] and done["waited"] >= router.drain_s
    assert [item["url"] for item in done["workers"]] == [B]
    assert kept(tmp_path) == {"in": [], "out": [router.url]}
    assert not run("held")["changed"]
    done = run()
    assert (done["changed"], done["ready"]) == (True, True)
    assert kept(tmp_path) == {"in": [router.url], "out": []}


def test_a_worker_that_drains_is_added_again_when_it_is_gone(run, router):
    run()
    router.put(B)
    run("held", wait=0)
    done = run()
    assert done["ready"] and done["waited"] > router.drain_s / 2
    assert [call[0] for call in router.calls] == ["POST", "DELETE", "POST"]


@pytest.mark.parametrize("state", ["held", "absent"])
def test_the_last_healthy_worker_stays(run, router, tmp_path, state):
    run()
    router.put(B, "failed")
    for check in (True, False):
        done = run(state, check=check)
        assert done["failed"] and "Nothing was changed" in done["msg"]
        assert f"{router.url} is the last healthy worker; the others: {B} (failed)" in done["msg"]
    assert kept(tmp_path)["in"] == [router.url] and len(router.calls) == 1
    done = run(state, keep_last=False)
    assert done["changed"] and [item["url"] for item in done["workers"]] == [B]


def test_two_that_leave_at_once_do_not_count_on_each_other(run, router, tmp_path):
    run()
    router.put(B)
    with sglang_worker.alone(str(tmp_path / "workers.json")):
        box = []
        thread = threading.Thread(target=lambda: box.append(run("held")))
        thread.start()
        thread.join(1)
        assert thread.is_alive() and router.calls[1:] == []
        # The other one was first.
        router.listed[B]["status"] = "draining"
        router.listed[B]["since"] = time.monotonic() + 60
    thread.join(10)
    assert "last healthy worker" in box[0]["msg"]


def test_a_worker_that_does_not_come_is_explained(run, router):
    router.deaf.add(router.url)
    done = run(wait=1)
    assert done["failed"] and done["timed_out"] and not done["ready"]
    assert f"does not take {router.url} after 1 s (not listed)" in done["msg"]
    router.wrong_key = True
    done = run(wait=1)
    assert "/v1/models: 401" in done["msg"]
    assert "compare sglang_gateway_worker_key with sglang_edge_clients" in done["msg"]


def test_an_answer_is_proved_to_be_the_workers_own(run, router):
    router.elsewhere = 3
    done = run(prove=True)
    # The first went to the worker itself.
    assert (done["asked"], router.asked) == (3, 4)


def test_a_worker_that_never_answers_through_the_router_fails(run, router):
    router.elsewhere = 1000
    done = run(prove=True)
    assert done["failed"] and "not one of 60 questions" in done["msg"]


def test_a_worker_with_another_key_fails_though_it_is_healthy(run, router):
    run()
    router.wrong_key = True
    done = run(prove=True)
    assert done["failed"] and "does not name its model: 401" in done["msg"]


def test_a_router_that_is_down_forgets_who_is_taken_out(run, router, tmp_path):
    run()
    router.close()
    done = run("held", wait=1)
    assert done["changed"] and not done["ready"], done
    assert kept(tmp_path) == {"in": [], "out": [router.url]}
    done = run()
    assert done["failed"] and "systemctl start sglang-gateway" in done["msg"]
    assert kept(tmp_path)["in"] == []


def test_a_host_without_a_router_needs_nothing(run, router, tmp_path):
    router.close()
    done = run("held", remember=str(tmp_path / "nowhere/workers.json"))
    assert (done["changed"], done.get("failed")) == (False, None)


def test_keys_that_are_refused_or_missing_are_named(run, router, tmp_path):
    (tmp_path / "control-key").write_text("0th3r\n")
    done = run()
    assert "does not take the key of" in done["msg"] and "0th3r" not in done["msg"]
    (tmp_path / "control-key").unlink()
    assert "there is no key in" in run()["msg"]


@pytest.mark.parametrize("field", ["url", "router"])
def test_an_address_that_is_none_is_refused(run, field):
    assert "is no address of a server" in run(**{field: "node1"})["msg"]


def test_a_broken_list_is_not_written_over(run, router, tmp_path):
    (tmp_path / "workers.json").write_text("{")
    done = run()
    assert done["failed"] and "is no list of workers" in done["msg"]
    assert (tmp_path / "workers.json").read_text() == "{" and router.calls == []


def test_a_key_does_not_follow_a_redirect(router):
    router.workers = lambda *_args: (302, {})
    assert gateway_http.Router(router.url, CONTROL_KEY).workers().status == 302


# The launcher's thread that keeps a router to its list.
@pytest.fixture
def keeper(router, tmp_path, monkeypatch):
    """One look of the keeper: keeper(in, out) returns all calls so far. smg itself is stood in for."""
    monkeypatch.setitem(sys.modules, "smg", types.SimpleNamespace(launch_router=types.SimpleNamespace()))
    monkeypatch.syspath_prepend(ROOT / "module_utils/sglang_kit")
    program = load("roles/sglang_gateway/files/router.py")
    path = tmp_path / "workers.json"
    made = program.Keeper(
        gateway_http.Router(router.url, CONTROL_KEY, WORKER_KEY), router.url, path, WORKER_KEY, None
    )

    def look(wanted, held=()):
        path.write_text(gateway.write_kept({"in": list(wanted), "out": list(held)}))
        made.keep()
        return [call[:2] for call in router.calls]

    look.path, look.made = path, made
    return look


def test_the_keeper_adds_who_is_healthy_and_waits_for_who_is_not(keeper, router):
    router.ill = True
    assert keeper([router.url]) == []
    router.ill = False
    assert keeper([router.url]) == [("POST", router.url)]
    assert keeper([router.url]) == [("POST", router.url)]


def test_the_keeper_begins_no_second_registration_beside_the_first(keeper, router):
    router.deaf.add(router.url)
    assert keeper([router.url]) == keeper([router.url]) == [("POST", router.url)]


def test_the_keeper_removes_who_is_not_wanted(keeper, router):
    router.put(router.url)
    router.put(B)
    assert keeper([router.url], [B]) == [("DELETE", router.listed[B]["id"])]
    # It drains, and is not removed twice.
    assert len(keeper([router.url], [B])) == 1


def test_the_keeper_does_nothing_by_a_list_that_it_cannot_read(keeper, router, capsys):
    router.put(B)
    keeper.path.write_text("{")
    keeper.made.keep()
    keeper.path.unlink()
    keeper.made.keep()
    assert router.calls == []
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["level"] for line in said] == ["WARN", "WARN"]


# What the role is given.
NODE = {"inventory_hostname": "n1", "sglang_edge_enabled": True}
KNOWN = {"first": "0.5.9", "below": "0.6"}


@pytest.mark.parametrize(
    ("more", "url"),
    [
        ({}, "https://n1"),
        ({"sglang_edge_names": ["a.example", "b"]}, "https://a.example"),
        ({"sglang_edge_listen": ["10.0.0.5:8443"]}, "https://n1:8443"),
        ({"sglang_edge_listen": ["[::]:443 reuseport"]}, "https://n1"),
        ({"sglang_gateway_worker_url": "http://10.0.0.5:30000/"}, "http://10.0.0.5:30000"),
    ],
)
def test_where_a_node_is_reached(more, url):
    assert filters.worker_url({**NODE, **more}) == url


def test_where_a_node_cannot_be_reached():
    with pytest.raises(AnsibleFilterError, match="n1: sglang_gateway_worker_url is 'n1:30000'"):
        filters.worker_url({**NODE, "sglang_gateway_worker_url": "n1:30000"})


def client(**more):
    return {"sglang_edge_clients": [{"name": "gateway", "key": WORKER_KEY, **more}]}


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (client(), None),
        ({**client(), "sglang_engine_version": "0.5.9"}, None),
        ({**client(), "sglang_engine_version": "0.5.23.post1"}, None),
        ({**client(), "sglang_engine_version": "0.5.8"}, "sglang_engine_version is 0.5.8"),
        ({**client(), "sglang_engine_version": "0.6.0"}, "sglang_engine_version is 0.6.0"),
        ({}, "none of its sglang_edge_clients has the key"),
        (
            {"sglang_edge_clients": [{"name": "gateway", "key": "k" * 32}]},
            "none of its sglang_edge_clients has",
        ),
        (client(concurrent=8), "client 'gateway' has a limit"),
        (client(requests_per_minute=60), "client 'gateway' has a limit"),
        ({"sglang_edge_enabled": False}, "it has no edge"),
        ({"sglang_edge_enabled": False, "sglang_gateway_worker_url": "http://n1:30000"}, None),
    ],
)
def test_nodes_that_a_router_cannot_use_are_named(more, problem):
    found = filters.node_problems([{**NODE, **more}], WORKER_KEY, KNOWN)
    assert len(found) == (problem is not None)
    if problem:
        assert found[0].startswith("n1: ") and problem in found[0] and WORKER_KEY not in found[0]


def test_no_node_and_no_key_are_named():
    found = filters.node_problems([], "short", KNOWN)
    assert [text.partition(":")[0] for text in found] == ["sglang_gateway_nodes", "sglang_gateway_worker_key"]


def test_nodes_that_share_an_address_are_named_together():
    shared = {"sglang_edge_names": ["llm"], "sglang_edge_clients": [{"name": "gateway", "key": WORKER_KEY}]}
    nodes = [{**NODE, **shared, "inventory_hostname": name} for name in ("n1", "n2")]
    (found,) = filters.node_problems(nodes, WORKER_KEY, KNOWN)
    assert found.startswith("n1, n2: the router would reach all of them at https://llm.")
    nodes[1]["sglang_edge_listen"] = ["8443"]
    assert filters.node_problems(nodes, WORKER_KEY, KNOWN) == []


def test_flags_become_words():
    given = {"port": 1, "log-json": True, "tls": False, "none": None, "ca-cert-paths": ["a", "b"]}
    assert filters.words(given) == ["--port", "1", "--log-json", "--ca-cert-paths", "a", "b"]


def test_a_router_may_be_for_some_nodes_only():
    gateways = [{"inventory_hostname": "g1"}, {"inventory_hostname": "g2", "sglang_gateway_nodes": ["n2"]}]
    assert filters.routers(gateways, "n1", ["n1", "n2"]) == ["g1"]
    assert filters.routers(gateways, "n2", ["n1", "n2"]) == ["g1", "g2"]


def test_the_role_gives_up_registrations_when_the_launcher_thinks_so():
    text = (ROOT / "roles/sglang_gateway/vars/main.yml").read_text()
    assert f"worker-startup-timeout-secs: {gateway.STARTUP_S}\n" in text
    assert gateway.STARTUP_S < gateway.PENDING_S
