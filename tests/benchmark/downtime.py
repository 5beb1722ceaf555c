"""Downtime of an upgrade against a bare start of the engine, on the lab that is up. It prints ratios.

usage: .venv/bin/python tests/benchmark/downtime.py [HOST]

Downtime is from the last answer of the old server to the first of the new one. The bare start is of the same
engine with the same configuration, from exec to its first answer; the bare stop from SIGTERM to its end.
"""

import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOST = sys.argv[1] if len(sys.argv) > 1 else "node1"

# Python for ansible on the host.
NICE = "/usr/local/bin/nice-python"
# Asks for one token over and over; prints the second of each answer.
ASK = r"""
import json, sys, time, urllib.request
body = json.dumps({"text": "a", "sampling_params": {"max_new_tokens": 1}}).encode()
end = time.time() + float(sys.argv[1])
stop_at_first = sys.argv[2] == "first"
while time.time() < end:
    request = urllib.request.Request("http://127.0.0.1:30000/generate", body)
    request.add_header("Content-Type", "application/json")
    try:
        urllib.request.urlopen(request, timeout=30).read()
        print(time.time(), flush=True)
        if stop_at_first:
            break
    except OSError:
        pass
    time.sleep(0.05)
"""

BARE = r"""
systemctl stop sglang
cat > /tmp/ask.py <<'PY'
{ask}
PY
cd /var/cache/sglang
set -a; . /opt/sglang/current/environment; set +a
began=$(date +%s.%N)
runuser -u sglang -- env HOME=/var/cache/sglang HF_HOME=/var/cache/sglang/hf HF_HUB_OFFLINE=1 \
  PYTHONDONTWRITEBYTECODE=1 \
  /opt/sglang/current/engine/bin/python -m sglang.launch_server --config /opt/sglang/current/server.yaml \
  >/tmp/bare.log 2>&1 &
first=$(python3 /tmp/ask.py 600 first)
pid=$(pgrep -u sglang -f 'sglang.launch_server' | head -n 1)
asked=$(date +%s.%N)
kill -TERM "$pid"
while kill -0 "$pid" 2>/dev/null; do sleep 0.05; done
echo "$began $first $asked $(date +%s.%N)"
systemctl start sglang
"""


def sh(script):
    """Run a script as root on the host; return what it printed."""
    command = ["ssh", "-F", str(ROOT / ".lab/ssh/config"), HOST, "sudo", "bash", "-s"]
    return subprocess.run(command, input=script, capture_output=True, text=True, check=True).stdout


def deploy(checkpoint):
    """Deploy; what ansible runs has a low priority: it shares processors with the engine in the lab alone."""
    command = ["nice", "-n", "19", ".venv/bin/ansible-playbook", "deploy.yml", "-i", "inventories/lab"]
    command += ["--limit", HOST, "-e", f"lab_checkpoint={checkpoint}"]
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as inventory:
        inventory.write(f"sglang: {{hosts: {{{HOST}: {{ansible_python_interpreter: {NICE}}}}}}}\n")
        inventory.flush()
        command += ["-i", inventory.name]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def bare():
    """Return how long a bare start and a bare stop take (s, s)."""
    began, first, asked, ended = (float(word) for word in sh(BARE.replace("{ask}", ASK)).split())
    return first - began, ended - asked


def upgrade(checkpoint):
    """Return how long nobody answered while a deploy switched (s)."""
    sh("nohup python3 /tmp/ask.py 900 all >/tmp/answers 2>&1 & echo $! >/tmp/ask.pid")
    deploy(checkpoint)
    answers = [float(line) for line in sh("kill $(cat /tmp/ask.pid); cat /tmp/answers").split()]
    return max(after - before for before, after in zip(answers, answers[1:]))


def main():
    sh(f"printf '#!/bin/sh\\nexec nice -n 19 /usr/bin/python3 \"$@\"\\n' >{NICE}; chmod 755 {NICE}")
    deploy("cycle")
    rounds = []
    for checkpoint in ("echo", "cycle", "echo", "cycle", "echo"):
        rounds.append((*bare(), upgrade(checkpoint)))
        print("bare start {:.1f} s, bare stop {:.1f} s, downtime of the upgrade {:.1f} s".format(*rounds[-1]))
    deploy("cycle")
    start, stop, downtime = (statistics.median(column) for column in zip(*rounds))
    print(f"median of downtime / bare start          {downtime / start:.2f}")
    print(f"median of downtime / bare stop and start {downtime / (start + stop):.2f}")


if __name__ == "__main__":
    main()
