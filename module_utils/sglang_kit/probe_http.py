# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Ask the server over plain HTTP, as the node sees it. An answer of any kind is data, never an exception.

Standard library only, Python 3.8 and later: the node's own timer imports this file from its folder.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections import namedtuple
from urllib.parse import urlsplit

# status: int, or None without an answer. text: the body. error: "refused", "timeout", other words, or None.
Answer = namedtuple("Answer", ["status", "text", "error"])


def parse_url(url):
    """Return (host, port) of an http URL without a path; ValueError says what is wrong."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError(f"url is {url!r}, expected something like http://127.0.0.1:30000")
    return parts.hostname, parts.port or 80


def served_models(text):
    """Return the names in an answer of /v1/models (list of str); empty if it is not one."""
    try:
        return [str(model["id"]) for model in json.loads(text)["data"]]
    except (ValueError, KeyError, TypeError):
        return []


def read_key(path):
    """Return the engine's own key, from its file on the node, or None where there is none; OSError."""
    try:
        with open(path, encoding="ascii") as stream:
            return stream.read().strip() or None
    except FileNotFoundError:
        return None


class Server:
    """The server behind a URL.

    timeout_s: seconds to wait for each step of one request. key: the bearer key to send, or None.
    """

    def __init__(self, url, timeout_s, key=None):
        self._address = parse_url(url)
        self._timeout_s = timeout_s
        self._headers = {"Authorization": "Bearer " + key} if key else {}

    def get(self, path):
        """GET a path: Answer."""
        return self._ask("GET", path)

    def post(self, path, body):
        """POST a JSON body: Answer."""
        return self._ask("POST", path, json.dumps(body), {"Content-Type": "application/json"})

    def _ask(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection(*self._address, timeout=self._timeout_s)
        try:
            connection.request(method, path, body, dict(headers or {}, **self._headers))
            response = connection.getresponse()
            return Answer(response.status, response.read().decode("utf-8", "replace"), None)
        except ConnectionRefusedError:
            return Answer(None, "", "refused")
        except socket.timeout:
            return Answer(None, "", "timeout")
        except (OSError, http.client.HTTPException) as error:
            return Answer(None, "", str(error) or type(error).__name__)
        finally:
            connection.close()
