# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What a router's workers are, what they should be, and what to do about it. Pure.

The router forgets its workers when it ends, and a registration that waits for a node is neither listed nor
can it be taken back. So the list of wanted workers is a file beside the router ("kept"):
{"in": [urls], "out": [urls]}. "in" are to be registered; "out" are held out on purpose, until put_back.

Standard library only, Python 3.8 and later: the router's launcher imports this file from its folder.
"""

from __future__ import annotations

import json
import secrets
from collections import namedtuple
from urllib.parse import urlsplit

# id: str, until the worker is removed. status: the router's word. healthy: bool. load: requests in flight.
Worker = namedtuple("Worker", ["url", "id", "status", "healthy", "load"])

ROUTED_TO = "x-smg-routed-worker-id"
# How long the router tries to register a worker that does not answer. Short, since it cannot be taken back.
STARTUP_S = 20
# After that, and a little more, a worker that is not listed is not about to be.
PENDING_S = 25


def normal_url(url):
    """Return the URL of a worker or router as it is compared; ValueError if it is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError(
            f"{url!r} is no address of a server; expected something like https://node1.example.net"
        )
    return f"{parts.scheme}://{parts.netloc}"


def read_workers(text):
    """Return the Workers of an answer of GET /workers; ValueError if it is none."""
    try:
        return [
            Worker(
                normal_url(item["url"]),
                str(item["id"]),
                str(item.get("status", "")),
                item["is_healthy"] is True,
                int(item.get("load", 0)),
            )
            for item in json.loads(text)["workers"]
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no list of workers: {text[:200]}") from error


def find(workers, url):
    """Return the Worker of that URL, or None."""
    return next((worker for worker in workers if worker.url == url), None)


def is_ready(worker):
    """True if the router sends requests to it."""
    return worker is not None and worker.healthy and worker.status in ("ready", "")


def parse_kept(text):
    """Return the kept list of a file's text; None is an empty one. ValueError if it is none."""
    if text is None:
        return {"in": [], "out": []}
    try:
        found = json.loads(text)
        return {key: [normal_url(url) for url in found[key]] for key in ("in", "out")}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError('expected {"in": [urls], "out": [urls]}') from error


def keep(kept, url, state):
    """Return the kept list after url is to be present, held (out on purpose) or absent (forgotten)."""
    rest = {key: [other for other in urls if other != url] for key, urls in kept.items()}
    if state == "present":
        rest["in"] = sorted([*rest["in"], url])
    elif state == "held":
        rest["out"] = sorted([*rest["out"], url])
    return rest


def write_kept(kept):
    """Return the text of a kept list."""
    return json.dumps(kept, indent=2, sort_keys=True) + "\n"


def decide(workers, url, state):
    """Return what the router is to be told about url: "add", "remove" or None.

    A worker that drains is on its way out already, and has to be gone before it can be added again.
    """
    worker = find(workers, url)
    if state == "present":
        return "add" if worker is None else None
    return None if worker is None or worker.status == "draining" else "remove"


def refusal(workers, url):
    """Return why url must not be removed: no other worker would be left to answer; or None."""
    if not is_ready(find(workers, url)):
        return None
    others = [worker for worker in workers if worker.url != url]
    if any(is_ready(worker) for worker in others):
        return None
    listed = ", ".join(f"{worker.url} ({worker.status})" for worker in others) or "none"
    return f"{url} is the last healthy worker; the others: {listed}"


def correct(kept, workers):
    """Return (urls to add, Workers to remove) that bring a router to its kept list."""
    listed = {worker.url for worker in workers}
    add = [url for url in kept["in"] if url not in listed]
    remove = [worker for worker in workers if worker.url not in kept["in"] and worker.status != "draining"]
    return add, remove


def question(model, number):
    """Return a chat whose beginning is its own, so that no cache decides where it goes."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"{secrets.token_hex(8)} {number}: say yes."}],
        "max_tokens": 4,
        "temperature": 0,
    }


def is_same(routed_to, url):
    """True if the header that names who answered (or None) names url."""
    try:
        return routed_to is not None and normal_url(routed_to) == url
    except ValueError:
        return False
