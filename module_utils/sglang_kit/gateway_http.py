# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Ask a router and its workers over HTTP or HTTPS. An answer of any kind is data, never an exception.

Standard library only, Python 3.8 and later: the router's launcher imports this file from its folder.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections import namedtuple

# status: int, or None without an answer. text: the body. headers: by their names in small letters.
# error: words, or None.
Answer = namedtuple("Answer", ["status", "text", "headers", "error"])
REFUSED = "refused"


class _Straight(urllib.request.HTTPRedirectHandler):
    """A key goes to the server that was named, and nowhere else."""

    def redirect_request(self, *_args, **_kwargs):
        return None


def ask(method, url, key=None, body=None, ca_file=None, timeout_s=10):
    """Send one request, past any proxy: Answer.

    body: sent as JSON. ca_file: PEM of who may vouch for the server, beside the system's.
    timeout_s: of each step.
    """
    headers = {"Accept": "application/json"}
    if key:
        headers["Authorization"] = "Bearer " + key
    data = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        data = json.dumps(body).encode()
    try:
        handlers = [urllib.request.ProxyHandler({}), _Straight()]
        if url.startswith("https:"):
            context = ssl.create_default_context()
            if ca_file:
                context.load_verify_locations(ca_file)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
            return _answer(answer.status, answer)
    except urllib.error.HTTPError as error:
        with error:
            return _answer(error.code, error)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ConnectionRefusedError):
            return Answer(None, "", {}, REFUSED)
        if isinstance(reason, (socket.timeout, TimeoutError)):
            return Answer(None, "", {}, f"no answer within {timeout_s} s")
        return Answer(None, "", {}, str(reason) or type(reason).__name__)


def _answer(status, stream):
    headers = {name.lower(): value for name, value in stream.headers.items()}
    return Answer(status, stream.read().decode("utf-8", "replace"), headers, None)


def in_words(answer):
    """Return what an answer says, for a message: status and beginning, or why there is none."""
    if answer.status is None:
        return answer.error
    return f"{answer.status} {answer.text.strip()[:300]}".strip()


class Router:
    """A router's own interface.

    key: its control key. worker_key: what its workers ask for, or None. timeout_s: of each step.
    """

    def __init__(self, url, key, worker_key=None, timeout_s=10):
        self._url = url
        self._key = key
        self._worker_key = worker_key
        self._timeout_s = timeout_s

    def workers(self):
        """GET /workers: Answer."""
        return ask("GET", self._url + "/workers", self._key, timeout_s=self._timeout_s)

    def add(self, url):
        """Register a worker: Answer; 202 says that it is begun, 409 that the URL is there already."""
        body = {"url": url}
        if self._worker_key:
            body["api_key"] = self._worker_key
        return ask("POST", self._url + "/workers", self._key, body, timeout_s=self._timeout_s)

    def remove(self, worker_id):
        """Begin to drain a worker: Answer; 202, or 404 if it is gone."""
        return ask("DELETE", f"{self._url}/workers/{worker_id}", self._key, timeout_s=self._timeout_s)
