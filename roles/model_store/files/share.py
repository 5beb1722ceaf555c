# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Let other nodes fetch the models of this one: share.py ROOT ADDRESS PORT, for as long as it runs.

GET /<organisation>/<name>/resolve/<commit>/<file>, as a hub has it, whole or from a byte on. Only what the
manifest of a finished snapshot names, and only reading.
"""

import http.server
import json
import os
import pathlib
import re
import socket
import sys
import urllib.parse

FILE = re.compile(r"/([\w-][\w.-]*/[\w-][\w.-]*)/resolve/([0-9a-f]{40})/(.+)", re.ASCII)
FROM = re.compile(r"bytes=(\d+)-")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # A node that went away holds no thread for ever, in seconds.
    timeout = 60

    def do_GET(self):
        found = FILE.fullmatch(urllib.parse.unquote(self.path))
        try:
            folder = self.server.root.joinpath(*found.group(1, 2))
            size = json.loads((folder / "manifest.json").read_text("utf-8"))["files"][found.group(3)]["size"]
            content = (folder / found.group(3)).open("rb")
        except (OSError, ValueError, KeyError, AttributeError):
            self.send_error(404)
            return
        asked = FROM.fullmatch(self.headers.get("Range", ""))
        first = int(asked.group(1)) if asked else 0
        with content:
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{size - 1}/{size}")
            self.send_header("Content-Length", str(max(0, size - first)))
            self.end_headers()
            if first < size:
                self.connection.sendfile(content, first, size - first)

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    def __init__(self, root, address, port):
        self.root = pathlib.Path(root)
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), Handler)

    def handle_error(self, request, client_address):
        # A node that ends a connection says so itself.
        pass


def main(root, address, port):
    with Server(root, address, int(port)) as server:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"].replace("@", "\0", 1))
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
