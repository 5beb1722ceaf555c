"""SGLang's own benchmark on the real engine, with and without speculation, and its page in a real browser."""

import json
import pathlib
import subprocess

import pytest

from tests import lab_hosts
from tests.lab_hosts import ROOT

KEY = "a-key-of-the-lab-that-is-not-secret"
EDGE = {
    "sglang_edge_enabled": True,
    "sglang_edge_self_signed": True,
    "sglang_edge_clients": [{"name": "bench", "key": KEY}],
}
PACKAGES = "chromium-headless-shell fonts-dejavu-core python3-pil"
# Draws the page and tells how many pixels have the colours of the newest measurement, and of the third, which
# is the one without speculation. The second, through the edge, is of one concurrency, hence no line.
BROWSER = f"""
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq && apt-get install -qq -y --no-install-recommends {PACKAGES} >/dev/null
cd /tmp && timeout 120 chromium-headless-shell --no-sandbox --disable-gpu --hide-scrollbars \
  --window-size=1100,1600 --screenshot=/tmp/page.png file:///tmp/page.html
python3 - <<'PY'
import json
from PIL import Image
page = Image.open("/tmp/page.png").convert("RGB")
counts = {{colour: count for count, colour in page.getcolors(1 << 24)}}
wanted = {{"newest": (0, 114, 178), "plain": (0, 158, 115), "white": (255, 255, 255)}}
print(json.dumps({{"size": page.size, **{{name: counts.get(rgb, 0) for name, rgb in wanted.items()}}}}))
PY
"""


@pytest.fixture(scope="module")
def node():
    yield from lab_hosts.host("scenarios", "eyes1", "58")


@pytest.fixture
def report(tmp_path):
    return tmp_path / "reports/page.html"


def kept(node):
    """The measurements that lie on the node, the oldest first."""
    read = "import glob, json; print(json.dumps([json.load(open(f)) for f in glob.glob('{}')]))"
    files = node.sh(f'python3 -c "{read.format("/opt/sglang/releases/*/bench-*.json")}"').stdout
    return sorted(json.loads(files), key=lambda record: record["at"])


def test_a_node_that_serves_nothing_is_refused(play):
    run = play("playbooks/bench.yml")
    assert run.rc != 0 and "there is nothing to measure on eyes1" in run.message


def test_with_and_without_speculation(node, play, report):
    run = play("deploy.yml", extra=EDGE)
    assert run.rc == 0, run.message
    before = node.current()
    extra = {
        **EDGE,
        "sglang_bench_concurrency": [1, 4],
        "sglang_bench_without_speculation": True,
        "sglang_bench_report": str(report),
    }
    run = play("playbooks/bench.yml", extra=extra)
    assert run.rc == 0, run.message
    first, second = kept(node)
    assert (first["speculation"], second["speculation"]) == (True, False)
    assert first["release"] == pathlib.PurePath(before).name != second["release"]
    for record in (first, second):
        assert [entry["concurrency"] for entry in record["runs"]] == [1, 4]
        for entry in record["runs"]:
            assert entry["completed"] == entry["requests"]
            assert 0 < entry["ttft_ms"]["median"] <= entry["ttft_ms"]["p95"] <= entry["e2e_latency_ms"]["p99"]
    # The cycle drafter accepts one of three.
    assert [entry["accept_length"] for entry in first["runs"]] == pytest.approx([2.0, 2.0], abs=0.1)
    assert [entry["accept_length"] for entry in second["runs"]] == [None, None]
    # It serves what it served, and speculates again.
    assert node.current() == before
    assert node.ask("/server_info")["speculative_algorithm"] == "EAGLE3"
    assert node.sh("readlink /opt/sglang/last-good").stdout.strip() == before


def test_through_the_edge(node, play, report):
    put = f"umask 077; printf %s {KEY} >/run/bench-key; cp /etc/nginx/sglang/certificate.pem /tmp/edge.pem"
    node.sh(f"{put}; chmod 644 /tmp/edge.pem")
    extra = {
        **EDGE,
        "sglang_bench_url": "https://eyes1",
        "sglang_bench_key_file": "/run/bench-key",
        "sglang_bench_ca_file": "/tmp/edge.pem",
        "sglang_bench_concurrency": [2],
        "sglang_bench_report": str(report),
    }
    count = len(kept(node))
    run = play("playbooks/bench.yml", extra=extra)
    assert run.rc == 0, run.message
    record = kept(node)[-1]
    assert len(kept(node)) == count + 1 and record["url"] == "https://eyes1"
    assert record["runs"][0]["completed"] == record["runs"][0]["requests"] == 8
    # Not the last line alone: the benchmark also asks for what the edge does not let through.
    answered = '"client":"bench".*"path":"/v1/chat/completions","status":"200"'
    assert int(node.sh(f"grep -c '{answered}' /var/log/nginx/sglang.log").stdout) >= 8


def test_a_wrong_key_is_told(node, play, report):
    node.sh("umask 077; echo wrong >/run/bench-key")
    extra = {
        **EDGE,
        "sglang_bench_url": "https://eyes1",
        "sglang_bench_key_file": "/run/bench-key",
        "sglang_bench_ca_file": "/tmp/edge.pem",
        "sglang_bench_concurrency": [1],
        "sglang_bench_report": str(report),
    }
    run = play("playbooks/bench.yml", extra=extra)
    assert run.rc != 0
    assert "and no request was answered" in run.stdout
    assert not report.exists()


def test_nothing_kept_holds_a_secret(node):
    key = node.sh("cat /etc/sglang/credentials/engine-key").stdout.strip()
    assert len(key) > 20
    assert (
        node.sh(f"grep -rlF -e {key} -e {KEY} /opt/sglang/releases --include='bench-*'", check=False).stdout
        == ""
    )


def test_the_page_in_a_browser(node, play, report):
    """Draws all that was measured above, on a host without the network that it was made with."""
    extra = {
        **EDGE,
        "sglang_bench_concurrency": [1, 2],
        "sglang_bench_rounds": 1,
        "sglang_bench_report": str(report),
    }
    assert play("playbooks/bench.yml", extra=extra).rc == 0
    copy = ["ssh", "-F", str(ROOT / ".lab/ssh/config"), node.name, "cat >/tmp/page.html"]
    subprocess.run(copy, input=report.read_bytes(), check=True)
    seen = json.loads(node.sh(BROWSER, timeout=400).stdout.splitlines()[-1])
    assert seen["size"] == [1100, 1600]
    # Lines of both, on a page that is mostly white.
    assert seen["newest"] > 300 and seen["plain"] > 300, seen
    assert 0.7 < seen["white"] / (1100 * 1600) < 0.99, seen
