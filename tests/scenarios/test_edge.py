"""The edge before the real engine: who gets in, what is closed, what stays secret, what a stream outlives."""

import http.client
import json
import secrets
import ssl
import subprocess
import tarfile
import threading
import time

import pytest
import yaml

from tests import lab_hosts
from tests.lab_hosts import ROOT, wait_until

ADDRESS = "10.99.7.53"
MODEL = "kimi-k2.5-tiny"
# Planted, and searched wherever they have no business.
KEYS = {
    name: f"marked_{name}_" + secrets.token_hex(16) for name in ("alice", "hasty", "narrow", "old", "new")
}
CLIENTS = [
    {"name": "alice", "key": KEYS["alice"]},
    {"name": "hasty", "key": KEYS["hasty"], "requests_per_minute": 3},
    {"name": "narrow", "key": KEYS["narrow"], "concurrent": 2},
    {"name": "rotates", "key": KEYS["old"]},
]
OPEN = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"}
ENGINE_KEY = "/etc/sglang/credentials/engine-key"
# Where a file that everybody may read could hold a secret; the engine's tree and the models are others' work.
READABLE = (
    "/etc /home /opt/sglang/releases /root /run /run/credentials/sglang.service /srv/lab /tmp /usr/local "
    "/var/cache /var/lib/nginx /var/log"
)


@pytest.fixture(scope="module")
def node():
    yield from lab_hosts.host("scenarios", "edge1", "53")


@pytest.fixture
def publish(play, tmp_path):
    """Run a playbook with these clients, whose keys come from a file of ansible-vault."""

    def run(playbook, *options, clients=CLIENTS, extra=None):
        (tmp_path / "password").write_text("of the vault\n")
        vault = tmp_path / "vault.yml"
        vault.write_text(yaml.safe_dump({"vault_keys": {item["name"]: item["key"] for item in clients}}))
        tool = [
            ROOT / ".venv/bin/ansible-vault",
            "encrypt",
            "--vault-password-file",
            tmp_path / "password",
            vault,
        ]
        subprocess.run([str(word) for word in tool], check=True, capture_output=True)
        wanted = [{**item, "key": "{{ vault_keys['" + item["name"] + "'] }}"} for item in clients]
        return play(
            playbook,
            *(f"--vault-password-file={tmp_path}/password", f"-e @{vault}", *options),
            extra={
                "sglang_edge_enabled": True,
                "sglang_edge_self_signed": True,
                "sglang_edge_clients": wanted,
                "sglang_edge_metrics_networks": ["10.99.7.1/32"],
                # The lab leaves it out; tool calls that are asked for are written by it.
                "sglang_server_arguments": {"grammar-backend": "xgrammar"},
                **(extra or {}),
            },
        )

    return run


@pytest.fixture
def trust(node):
    """TLS that believes the certificate of the node, and nobody else's."""
    return ssl.create_default_context(cadata=node.sh("cat /etc/nginx/sglang/certificate.pem").stdout)


@pytest.fixture
def edge(trust):
    """Ask the edge from outside: edge(method, path, key, body) gives (status, headers, text)."""

    def ask(method, path, key=None, body=None, timeout=120):
        connection = connect(trust, timeout)
        try:
            connection.request(method, path, *request(key, body))
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode()
        finally:
            connection.close()

    return ask


def connect(trust, timeout=120):
    """Open a connection to the node's address, under the name that its certificate holds."""

    class Named(http.client.HTTPSConnection):
        def connect(self):
            http.client.HTTPConnection.connect(self)
            self.sock = trust.wrap_socket(self.sock, server_hostname="edge1")

    return Named(ADDRESS, timeout=timeout, context=trust)


def request(key, body):
    """Return body and headers of a request."""
    headers = {"Host": "edge1"}
    if key:
        headers["Authorization"] = "Bearer " + key
    if body is not None:
        headers["Content-Type"] = "application/json"
    return json.dumps(body) if body is not None else None, headers


def chat(tokens, **more):
    message = [{"role": "user", "content": "Hello"}]
    return {
        "model": MODEL,
        "messages": message,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


class Stream(threading.Thread):
    """One streamed answer. times: when each event came; events: their data; error: what went wrong."""

    def __init__(self, trust, key, tokens):
        super().__init__()
        self.arguments = (trust, key, tokens)
        self.status, self.times, self.events, self.error = None, [], [], None
        self.began = time.monotonic()
        self.start()

    def run(self):
        trust, key, tokens = self.arguments
        connection = connect(trust, 300)
        try:
            connection.request("POST", "/v1/chat/completions", *request(key, chat(tokens, stream=True)))
            answer = connection.getresponse()
            self.status = answer.status
            for line in answer:
                if line.startswith(b"data: "):
                    self.times.append(time.monotonic())
                    self.events.append(line[6:].decode().strip())
        except (OSError, http.client.HTTPException) as error:
            self.error = repr(error)
        finally:
            connection.close()

    @property
    def whole(self):
        return self.status == 200 and self.events[-1:] == ["[DONE]"] and self.error is None


def marks(node):
    """All that must stay secret: the clients' keys, the engine's, and a line of the certificate's key."""
    engine = node.sh(f"cat {ENGINE_KEY}").stdout.strip()
    private = node.sh("sed -n 2p /etc/nginx/sglang/private_key.pem").stdout.strip()
    assert len(engine) == 64 and len(private) == 64
    return [*KEYS.values(), engine, private]


def error_of(text):
    return json.loads(text)["error"]["code"]


def test_check_mode_on_an_empty_host_ends_well(node, publish):
    run = publish("deploy.yml", "--check", "--diff")
    assert run.rc == 0, run.message
    assert not any(key in run.stdout for key in KEYS.values())
    assert node.sh("ls /etc/nginx /etc/sglang", check=False).stdout == ""


def test_a_deploy_publishes_and_says_no_secret(node, publish):
    # What any user of the node could see meanwhile: all arguments, and all environments.
    node.sh(
        "touch /root/watched; systemd-run --quiet --unit=watch bash -c 'cd /root; while sleep 0.2; do "
        'cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr "\\0" "\\n" | '
        "sort -u - watched >watched.new; mv watched.new watched; done'"
    )
    run = publish("deploy.yml", "--diff", "-vvv")
    assert run.rc == 0, run.message
    node.sh("systemctl stop watch")
    secret = marks(node)
    assert not any(mark in run.stdout for mark in secret)
    watched = node.sh("cat /root/watched; rm /root/watched*").stdout
    assert "sglang.launch_server" in watched
    assert not any(mark in watched for mark in secret)


def test_second_run_changes_nothing(node, publish):
    before = node.invocation()
    run = publish("deploy.yml", "--diff")
    assert (run.rc, run.changed) == (0, 0), run.stdout[-4000:]
    assert node.invocation() == before
    assert publish("deploy.yml", "--check").changed == 0


def test_the_keys_open_what_they_should_and_no_more(node, edge):
    engine_key = node.sh(f"cat {ENGINE_KEY}").stdout.strip()
    assert edge("GET", "/v1/models", KEYS["alice"])[0] == 200
    for key in (
        None,
        "x",
        KEYS["alice"].upper(),
        KEYS["alice"][:-1],
        KEYS["alice"] + "x",
        KEYS["new"],
        engine_key,
    ):
        status, headers, text = edge("GET", "/v1/models", key)
        assert (status, error_of(text), headers["WWW-Authenticate"]) == (401, "invalid_api_key", "Bearer")
    # Past the edge, on the node itself: the engine knows its own key alone.
    for key, status in ((KEYS["alice"], "401"), (engine_key, "200")):
        ask = "curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:30000/v1/models"
        assert node.sh(f"{ask} -H @- <<<'Authorization: Bearer {key}'").stdout == status


def test_every_other_route_of_the_engine_is_closed(node, edge):
    document = node.sh(
        f'curl -fsS http://127.0.0.1:30000/openapi.json -H "Authorization: Bearer $(cat {ENGINE_KEY})"'
    ).stdout
    paths = json.loads(document)["paths"]
    assert {"/flush_cache", "/server_info", "/update_weights_from_disk", "/v1/chat/completions"} <= set(paths)
    secret = marks(node)
    found = {}
    for path, methods in paths.items():
        for method in methods:
            sent = {} if method in ("post", "put") else None
            status, _headers, text = edge(
                method.upper(), path.replace("{", "").replace("}", ""), KEYS["alice"], sent
            )
            assert not any(mark in text for mark in secret), path
            found[method, path] = status
    closed = {route for route, status in found.items() if status == 404}
    assert {path for _method, path in found.keys() - closed} == OPEN
    hidden = [
        "/docs",
        "/redoc",
        "/metrics/",
        "/get_server_info",
        "/dumper/status",
        "/v1/chat/completions/",
        "/v1",
    ]
    tricks = [
        "/v1/models/../../server_info",
        "/v1/models/%2e%2e/%2e%2e/server_info",
        "//server_info",
        "/v1/models;/x",
    ]
    for path in hidden + tricks:
        assert edge("GET", path, KEYS["alice"])[0] == 404, path
    for path in ("/server_info/../v1/models", "/v1//models", "/v1/%6dodels?x=/server_info"):
        # nginx takes these for the open route, and sends the open route's own path.
        assert json.loads(edge("GET", path, KEYS["alice"])[2])["data"][0]["id"] == MODEL
    assert edge("DELETE", "/v1/chat/completions", KEYS["alice"])[0] == 405


def test_health_needs_no_key_and_metrics_are_for_their_network(node, edge):
    assert edge("GET", "/health")[0] == 200
    # From the bridge's address it is allowed, from the node itself it is not.
    assert "sglang:" in edge("GET", "/metrics")[2]
    inside = node.sh(
        "curl -sk -o /dev/null -w '%{http_code} %{http_version}' https://127.0.0.1/metrics"
    ).stdout
    assert inside == "404 2"


def test_old_protocols_are_refused(node):
    for version, status in (("1.1", "35"), ("1.2", "0")):
        ask = (
            f"curl -sk -o /dev/null --tls-max {version} --ciphers DEFAULT@SECLEVEL=0 https://127.0.0.1/health"
        )
        assert node.sh(f"{ask}; echo $?").stdout == status + "\n", version


def test_requests_of_impossible_size_are_refused(edge):
    status, _headers, text = edge(
        "POST", "/v1/chat/completions", KEYS["alice"], chat(1, note="x" * (65 << 20))
    )
    assert (status, error_of(text)) == (413, "request_too_large")


def test_images_of_some_size_go_through(edge):
    # Text in the place of an image: what the edge sees is the size.
    status, _headers, text = edge(
        "POST", "/v1/chat/completions", KEYS["alice"], chat(1, note="x" * (20 << 20))
    )
    assert status == 200, text[:300]


def test_the_engine_fetches_no_image_from_anywhere(edge):
    image = {"type": "image_url", "image_url": {"url": "http://10.99.7.2:8470/image.png"}}
    body = {**chat(1), "messages": [{"role": "user", "content": [image]}]}
    status, _headers, text = edge("POST", "/v1/chat/completions", KEYS["alice"], body)
    assert status == 400, text
    assert "Media URL domain is not allowed" in text


def test_streams_come_as_they_are_made(trust):
    stream = Stream(trust, KEYS["alice"], 300)
    stream.join()
    assert stream.whole, stream.error
    first, last = stream.times[0] - stream.began, stream.times[-1] - stream.began
    assert first < last / 2
    gaps = [later - earlier for earlier, later in zip(stream.times, stream.times[1:])]
    assert max(gaps) < (last - first) / 2, "it came in one piece"


def test_real_clients(node):
    node.sh("grep -q edge1 /etc/hosts || echo 127.0.0.1 edge1 >>/etc/hosts")
    given = {
        "url": "https://edge1/v1",
        "model": MODEL,
        "key": KEYS["alice"],
        "ca": "/etc/nginx/sglang/certificate.pem",
    }
    program = (ROOT / "tests/scenarios/openai_client.py").read_text()
    # The openai package of the engine's own tree; it must not leave bytecode there.
    python = "PYTHONDONTWRITEBYTECODE=1 /opt/sglang/current/engine/bin/python"
    node.sh(f"cat >/run/client.py <<'PROGRAM'\n{program}\nPROGRAM")
    said = node.sh(f"{python} /run/client.py <<'GIVEN'\n{json.dumps(given)}\nGIVEN").stdout
    assert said.startswith("passed with openai "), said
    body = json.dumps(chat(16, stream=True))
    events = node.sh(
        f"curl -fsSN --cacert /etc/nginx/sglang/certificate.pem https://edge1/v1/chat/completions "
        f"-H @<(echo 'Authorization: Bearer {KEYS['alice']}') --json @- <<'BODY'\n{body}\nBODY"
    ).stdout
    assert events.count("data: {") >= 2
    assert events.rstrip().endswith("data: [DONE]")


def test_limits_are_each_clients_own(edge, trust):
    seen = [edge("GET", "/v1/models", KEYS["hasty"]) for _time in range(4)]
    assert [status for status, _headers, _text in seen] == [200, 200, 200, 429]
    assert (error_of(seen[3][2]), seen[3][1]["Retry-After"]) == ("rate_limit_exceeded", "5")
    assert edge("GET", "/v1/models", KEYS["alice"])[0] == 200
    running = [Stream(trust, KEYS["narrow"], 200) for _stream in range(2)]
    wait_until(lambda: all(stream.times for stream in running), 60, "two streams")
    assert edge("GET", "/v1/models", KEYS["narrow"])[0] == 429
    for stream in running:
        stream.join()
        assert stream.whole, stream.error
    assert edge("GET", "/v1/models", KEYS["narrow"])[0] == 200


def test_two_hundred_streams_at_once_lose_none(node, trust):
    streams = [Stream(trust, KEYS["alice"], 8) for _stream in range(200)]
    for stream in streams:
        stream.join(400)
    assert [stream.error or stream.status for stream in streams if not stream.whole] == []
    assert {len(stream.events) for stream in streams} <= set(range(3, 12))


def test_another_key_needs_no_restart_and_cuts_no_stream(node, edge, trust, publish):
    before = node.invocation(), node.sh("systemctl show -P MainPID nginx").stdout
    stream = Stream(trust, KEYS["old"], 1500)
    wait_until(lambda: stream.times, 60, "a stream")
    changed = [*CLIENTS[:3], {"name": "rotates", "key": KEYS["new"]}]
    run = publish("deploy.yml", "--tags publish", "-vvv", "--diff", clients=changed)
    assert (run.rc, run.changed) == (0, 1), run.message
    assert not any(key in run.stdout for key in KEYS.values())
    wait_until(lambda: edge("GET", "/v1/models", KEYS["old"])[0] == 401, 10, "the old key refused")
    assert edge("GET", "/v1/models", KEYS["new"])[0] == 200
    assert stream.times[-1] != stream.times[0]
    stream.join()
    assert stream.whole, stream.error
    assert before == (node.invocation(), node.sh("systemctl show -P MainPID nginx").stdout)
    assert publish("deploy.yml", "--tags publish").rc == 0


def test_a_closed_edge_lets_streams_finish_and_takes_no_new_request(edge, trust, play):
    def turn(entry):
        return play("tests/scenarios/edge.yml", extra={"entry": entry})

    stream = Stream(trust, KEYS["alice"], 1500)
    wait_until(lambda: stream.times, 60, "a stream")
    assert turn("close").changed > 0
    for method, path, body in (("POST", "/v1/chat/completions", chat(1)), ("GET", "/v1/models", None)):
        status, headers, text = edge(method, path, KEYS["alice"], body)
        assert (status, error_of(text), headers["Retry-After"]) == (503, "closed", "60")
    assert edge("GET", "/health")[0] == 503
    assert stream.is_alive(), "the stream must outlast the closing for this test to mean anything"
    assert turn("close").changed == 0
    stream.join()
    assert stream.whole, stream.error
    assert turn("open").changed == 1
    assert turn("open").changed == 0
    assert edge("GET", "/v1/models", KEYS["alice"])[0] == 200


def test_a_deploy_opens_what_an_interrupted_one_left_closed(node, edge, publish):
    node.sh("mkdir -p /run/sglang-edge && touch /run/sglang-edge/closed")
    assert edge("GET", "/v1/models", KEYS["alice"])[0] == 503
    assert publish("deploy.yml").rc == 0
    assert edge("GET", "/v1/models", KEYS["alice"])[0] == 200


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"key": "marked_short"}, "client 'alice': its key has 12 characters; expected 32 to 128"),
        ({"name": "Alice"}, "client 'Alice': expected a name of small letters"),
        ({"requests_per_hour": 1}, "sglang_edge_clients.requests_per_hour"),
    ],
)
def test_clients_that_cannot_be_are_refused_without_their_keys(play, wrong, said):
    clients = [{**CLIENTS[0], **wrong}, CLIENTS[1]]
    extra = {"sglang_edge_enabled": True, "sglang_edge_self_signed": True, "sglang_edge_clients": clients}
    run = play("playbooks/preflight.yml", "-vvv", extra=extra)
    assert run.rc != 0
    assert said in run.stdout
    assert not any(key in run.stdout for key in [*KEYS.values(), "marked_short"])


def test_what_nginx_refuses_is_put_back(node, edge, publish):
    files = "/etc/nginx/conf.d/sglang.conf /etc/nginx/sglang/clients.map"
    before = node.sh(f"sha256sum {files}").stdout
    run = publish("deploy.yml", "--tags publish", extra={"sglang_edge_metrics_networks": ["nowhere"]})
    assert run.rc != 0
    assert "nginx refuses the configuration; it was put back as it was" in run.message
    assert 'invalid network "nowhere"' in run.message
    assert node.sh(f"sha256sum {files}; nginx -t").stdout == before
    assert edge("GET", "/v1/models", KEYS["alice"])[0] == 200


def test_secrets_lie_nowhere_that_others_can_read(node):
    secret = "\n".join(marks(node))
    patterns = f"cat >/root/marks <<'MARKS'\n{secret}\nMARKS\n"
    for where in (
        "journalctl --all --output=json --no-pager",
        "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'",
        "cat /opt/sglang/releases/*/*.json /opt/sglang/releases/*/*.md /opt/sglang/releases/*/server.yaml",
        "cat /run/sglang/started.json /var/log/nginx/*",
        "systemctl show sglang nginx; systemctl cat sglang; systemctl status sglang nginx",
    ):
        assert node.sh(f"{patterns}({where}) | grep -cFf /root/marks; rm /root/marks").stdout == "0\n", where
    held = (
        f"find {READABLE} -xdev -type f ! -path /root/marks -exec grep -lFf /root/marks {{}} + | "
        "xargs stat -c '%a %U %n'"
    )
    files = node.sh(f"{patterns}{held}; rm /root/marks").stdout.splitlines()
    # Where they belong, and readable by their owner alone; the last is systemd's own copy.
    assert set(files) == {
        "400 sglang /run/credentials/sglang.service/engine-key",
        f"600 root {ENGINE_KEY}",
        "600 root /etc/nginx/sglang/clients.map",
        "600 root /etc/nginx/sglang/engine.conf",
        "600 root /etc/nginx/sglang/private_key.pem",
        "600 sglang /run/sglang/server.yaml",
    }


def test_a_report_of_a_fault_holds_no_secret(node, play, tmp_path):
    token = "marked_token_" + secrets.token_hex(16)
    engine_key = node.sh(f"cat {ENGINE_KEY}").stdout.strip()
    # As if the engine had said its keys, and somebody had set a token for it.
    node.sh(
        f"logger --journald <<'LINE'\nMESSAGE=planted {engine_key} and {KEYS['alice']}, Bearer {token}\n"
        f"OBJECT_SYSTEMD_UNIT=sglang.service\nLINE\n"
        f"echo 'HF_TOKEN=\"{token}\"' >>/opt/sglang/current/environment"
    )
    run = play("playbooks/collect_info.yml", extra={"collect_info_dest": str(tmp_path)})
    node.sh("sed -i /HF_TOKEN/d /opt/sglang/current/environment")
    assert (run.rc, run.changed) == (0, 0), run.message
    (path,) = tmp_path.glob("sglang-edge1-*.tar.gz")
    with tarfile.open(path) as archive:
        texts = {
            entry.name.split("/", 1)[1]: archive.extractfile(entry).read().decode()
            for entry in archive.getmembers()
        }
    assert "planted *** and ***, Bearer ***" in texts["journal.txt"]
    assert "HF_TOKEN=***" in texts["files/opt/sglang/current/environment"]
    for name, text in texts.items():
        assert not any(mark in text for mark in [*marks(node), token]), name
    assert "the server answers" in texts["journal.txt"]
    assert json.loads(texts["files/opt/sglang/current/gate.json"])["passed"] is True
    assert json.loads(texts["probe.json"])["unit"]["active_state"] == "active"
    assert "nvidia-smi is not installed" in texts["missing.txt"]
    assert node.sh("ls /root").stdout == ""


READ_ONLY, DENIED, NOT_PERMITTED = "Read-only file system", "Permission denied", "Operation not permitted"
FOUND_INSIDE = {
    **dict.fromkeys(("etc", "engine", "models"), READ_ONLY),
    **dict.fromkeys(("devices", "others"), "nothing"),
    **dict.fromkeys(("home", "engine_key", "client_keys"), DENIED),
    "packets": "Address family not supported by protocol",
    **dict.fromkeys(("outside", "namespace", "mount", "trace"), NOT_PERMITTED),
    # What compilers and kernels need.
    **dict.fromkeys(("machine_code", "compiled_kernel", "threads", "bound_process"), "works"),
    "memory": "policy: default",
}


def test_another_key_of_the_engine_and_the_unit_seen_from_inside(node, edge, publish):
    before = node.sh(f"cat {ENGINE_KEY}; rm {ENGINE_KEY}").stdout
    program, drop_in = "/usr/local/lib/inside.py", "/run/systemd/system/sglang.service.d"
    text = (ROOT / "tests/scenarios/inside_service.py").read_text()
    node.sh(
        f"cat >{program} <<'PROGRAM'\n{text}\nPROGRAM\nchmod 644 {program}; mkdir -p {drop_in}\n"
        f"printf '[Service]\\nExecStartPre=/usr/bin/python3 -I {program}\\n' >{drop_in}/inside.conf\n"
        "systemctl daemon-reload"
    )
    run = publish("deploy.yml")
    node.sh(f"rm -r {drop_in} {program}; systemctl daemon-reload")
    assert run.rc == 0, run.message
    assert node.sh(f"cat {ENGINE_KEY}").stdout != before
    assert edge("POST", "/v1/chat/completions", KEYS["alice"], chat(4))[0] == 200
    said = node.sh("journalctl -u sglang -o cat | grep ^inside").stdout.splitlines()
    assert dict(line.split(" ", 2)[1:] for line in said) == FOUND_INSIDE
    assert (
        node.sh("systemd-analyze security sglang --no-pager --threshold=15 >/dev/null; echo $?").stdout
        == "0\n"
    )


def test_a_drain_beyond_its_bound_says_what_it_cut(node, trust, publish):
    assert publish("deploy.yml", extra={"sglang_server_drain_seconds": 12}).rc == 0
    streams = [Stream(trust, KEYS["alice"], 1800) for _stream in range(2)]
    wait_until(lambda: all(stream.times for stream in streams), 60, "two streams")
    node.sh("systemctl stop sglang")
    for stream in streams:
        stream.join()
        assert not stream.whole
    said = node.sh("journalctl -u sglang -o cat -n 200").stdout
    assert "launcher: still draining after 12 s, 2 requests in flight are lost" in said
    assert node.sh("systemctl show -P Result sglang; ls /dev/shm").stdout == "success\n"
    node.sh("systemctl start sglang")
    assert publish("deploy.yml", extra={"sglang_server_drain_seconds": 12}).changed == 0


def test_a_restart_loses_no_stream_and_opens_again(node, edge, trust):
    stream = Stream(trust, KEYS["alice"], 400)
    wait_until(lambda: stream.times, 60, "a stream")
    node.sh("systemctl restart --no-block sglang")
    wait_until(lambda: edge("GET", "/v1/models", KEYS["alice"])[0] == 503, 10, "a closed edge")
    assert stream.is_alive(), "the stream must outlast the closing for this test to mean anything"
    stream.join()
    assert stream.whole, stream.error
    wait_until(
        lambda: node.sh("systemctl is-active sglang", check=False).stdout != "active\n", 60, "the stop"
    )
    wait_until(lambda: edge("GET", "/v1/models", KEYS["alice"])[0] == 200, 300, "an open edge")
    assert node.sh("systemctl is-active sglang").stdout == "active\n", "it opens when the server answers"


def test_a_boot_brings_all_of_it_up_with_nobody_there(node, edge):
    before, invocation = node.current(), node.invocation()
    node.sh("touch /run/before-the-boot; systemctl reboot")
    # A boot empties /run; until ssh is back the status is another one.
    wait_until(lambda: node.sh("test -e /run/before-the-boot", check=False).returncode == 1, 120, "a boot")
    seen = []

    def served():
        try:
            seen.append(edge("POST", "/v1/chat/completions", KEYS["alice"], chat(4))[0])
        except OSError:
            seen.append(None)
        return seen[-1] == 200

    wait_until(served, 300, "an answer through the edge")
    assert set(seen) <= {None, 503, 200}
    assert node.current() == before
    assert node.invocation() != invocation
    # The engine's first answers come a moment before the launcher's own question is answered.
    active = "systemctl is-active sglang nginx"
    wait_until(lambda: node.sh(active, check=False).stdout == "active\nactive\n", 60, "both active")


def test_an_upgrade_serves_or_turns_away_and_cuts_nothing(edge, publish):
    answers, over = [], threading.Event()

    def ask():
        while not over.is_set():
            status, _headers, text = edge("POST", "/v1/chat/completions", KEYS["alice"], chat(16))
            answers.append(status if status == 200 else error_of(text))

    askers = [threading.Thread(target=ask) for _number in range(3)]
    for asker in askers:
        asker.start()
    try:
        run = publish("deploy.yml", extra={"lab_checkpoint": "echo"})
    finally:
        over.set()
        for asker in askers:
            asker.join()
    assert run.rc == 0, run.message
    assert set(answers) == {200, "closed"}
    assert answers[-1] == 200


def test_an_engine_that_is_down_is_said_in_the_api_s_own_words(node, edge):
    node.sh("systemctl stop sglang")
    assert error_of(edge("POST", "/v1/chat/completions", KEYS["alice"], chat(1))[2]) == "closed"
    node.sh("rm /run/sglang-edge/closed")
    status, headers, text = edge("POST", "/v1/chat/completions", KEYS["alice"], chat(1))
    assert (status, error_of(text), headers["Retry-After"]) == (503, "unavailable", "30")
    assert edge("GET", "/health")[0] == 503


def test_uninstall_takes_the_edge_and_its_keys_away(node, publish):
    assert publish("playbooks/uninstall.yml", extra={"uninstall_confirm": True}).rc == 0
    assert node.sh("ls /etc/nginx/conf.d/sglang.conf /etc/nginx/sglang /etc/sglang", check=False).stdout == ""
    assert node.sh("nginx -t && systemctl is-active nginx").stdout == "active\n"
