#!/usr/bin/env python3
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""A small model hub for the lab: what a huggingface_hub client asks for when it downloads.

hub.py --listen 0.0.0.0:8470 --repo org/name=/folder ...
hub.py --print-revisions --repo org/name=/folder ...      commit hashes of main as JSON, then end

A repeated --repo of the same id adds a newer commit. Folders are only read. The port opens when
all files are hashed.

GET      /api/models/<id>[/revision/<rev>]                 hash, files
GET      /api/models/<id>/tree/<rev>[/<path>]              files with digests, in pages
POST     /api/models/<id>/paths-info/<rev>                 the same for given paths
GET      /api/models/<id>/refs
HEAD GET /<id>/resolve/<rev>/<file>                        the file; a large one by redirect to /_cdn
POST     /_ctl      rules (see faults.py), token, page (entries per page of a tree), clear_log,
                    cdn (address for large files, if not the one the client used)
GET      /_log      requests so far; `token`: whether one was sent
"""

import argparse
import http.server
import json
import re
import signal
import sys
import threading
import time
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

import faults
import repos

ID = r"([^/]+/[^/]+)"
DATE = "2026-01-01T00:00:00.000Z"


class Refusal(Exception):
    """An error answer in the hub's form: status, X-Error-Code, text."""


class State:
    """What requests share."""

    def __init__(self, repositories):
        self.repos = repositories
        self.rules = faults.Rules()
        self.token = None
        self.page = 1000
        self.cdn = None
        self.log = []
        self.lock = threading.Lock()


def tree_item(path, entry, expand):
    item = {"type": "file", "oid": entry.blob_id, "size": entry.size, "path": path}
    if entry.sha256:
        item["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
    if expand:
        item["lastCommit"] = {"id": "0" * 40, "title": "add", "date": DATE}
    return item


def tree_items(entries, below, recursive, expand):
    """Return the items of a tree listing: files and, before their content, folders."""
    prefix = below.rstrip("/") + "/" if below else ""
    items, folders = [], set()
    for path, entry in entries.items():
        if not path.startswith(prefix):
            continue
        parents = path[len(prefix) :].split("/")[:-1]
        for depth in range(1, len(parents) + 1 if recursive else min(len(parents), 1) + 1):
            folder = prefix + "/".join(parents[:depth])
            if folder not in folders:
                folders.add(folder)
                items.append({"type": "directory", "oid": "0" * 40, "size": 0, "path": folder})
        if recursive or not parents:
            items.append(tree_item(path, entry, expand))
    return items


def model_info(repo_id, commit, entries, blobs):
    siblings = []
    for path, entry in entries.items():
        sibling = {"rfilename": path}
        if blobs:
            sibling.update(size=entry.size, blobId=entry.blob_id)
            if entry.sha256:
                pointer = entry.pointer_size
                sibling["lfs"] = {"sha256": entry.sha256, "size": entry.size, "pointerSize": pointer}
        siblings.append(sibling)
    return {
        "_id": "0" * 24,
        "id": repo_id,
        "modelId": repo_id,
        "author": repo_id.split("/")[0],
        "sha": commit,
        "lastModified": DATE,
        "createdAt": DATE,
        "private": False,
        "gated": False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        "usedStorage": sum(entry.size for entry in entries.values()),
        "siblings": siblings,
    }


def byte_range(header, size):
    """Return (start, end) of a single-range header, end exclusive; None if there is no such range."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header.strip())
    if not match or not any(match.groups()):
        return None
    first, last = match.groups()
    if not first:
        return max(size - int(last), 0), size
    return int(first), min(int(last) + 1, size) if last else size


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "lab-hub", ""

    def log_message(self, *args):
        """Requests are kept in the state instead."""

    def note(self, status, sent):
        record = {"method": self.command, "path": self.path, "status": status, "sent": sent}
        record["range"] = self.headers.get("Range")
        record["token"] = "Authorization" in self.headers
        with self.server.state.lock:
            self.server.state.log.append(record)
        return record

    def reply(self, status, body=b"", headers=None, note=True):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        if note:
            self.note(status, len(body))
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    # -- dispatch

    def do_GET(self):
        state = self.server.state
        if self.path == "/_log":
            with state.lock:
                log = list(state.log)
            return self.reply(200, log, note=False)
        self.rule = state.rules.pick(self.command, self.path)
        if self.rule and self.rule.do == "status":
            return self.reply(self.rule.code, headers=self.rule.headers)
        if self.rule and self.rule.do == "delay":
            time.sleep(self.rule.seconds)
        try:
            if not self.path.startswith("/_cdn/"):
                self.check_token()
            self.route()
        except Refusal as refusal:
            status, code, message = refusal.args
            headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
            self.reply(status, {"error": message}, headers)
        return None

    do_HEAD = do_GET

    def do_POST(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return self.control() if self.path == "/_ctl" else self.do_GET()

    def route(self):
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        for pattern, action in (
            (rf"/api/models/{ID}(?:/revision/([^/]+))?", self.info),
            (rf"/api/models/{ID}/tree/([^/]+)(?:/(.+))?", self.tree),
            (rf"/api/models/{ID}/paths-info/([^/]+)", self.paths_info),
            (rf"/api/models/{ID}/refs", self.refs),
            (rf"/{ID}/resolve/([^/]+)/(.+)", self.resolve),
            (rf"/_cdn/{ID}/([0-9a-f]{{40}})/(.+)", self.cdn),
        ):
            match = re.fullmatch(pattern, url.path)
            if match:
                return action(query, *(unquote(part) if part else part for part in match.groups()))
        raise Refusal(404, None, "Not found")

    def check_token(self):
        token, sent = self.server.state.token, self.headers.get("Authorization")
        if token and sent is None:
            raise Refusal(401, "GatedRepo", "Access to this model is restricted. Please log in.")
        if token and sent != "Bearer " + token:
            raise Refusal(401, None, "Invalid username or password.")

    def find(self, repo_id, revision):
        """Return (commit hash, entries)."""
        repo = self.server.state.repos.get(repo_id)
        if repo is None:
            # The public hub says 401, not 404, to whoever might not be allowed to know.
            raise Refusal(401, "RepoNotFound", "Repository not found")
        commit = repo.resolve(revision or "main")
        if commit is None:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repo.commits[commit]

    # -- answers

    def info(self, query, repo_id, revision):
        commit, entries = self.find(repo_id, revision)
        self.reply(200, model_info(repo_id, commit, entries, query.get("blobs", "").lower() == "true"))

    def refs(self, query, repo_id):
        commit, _ = self.find(repo_id, None)
        main = {"name": "main", "ref": "refs/heads/main", "targetCommit": commit}
        self.reply(200, {"branches": [main], "converts": [], "tags": []})

    def tree(self, query, repo_id, revision, below):
        commit, entries = self.find(repo_id, revision)
        flags = [query.get(name, "").lower() == "true" for name in ("recursive", "expand")]
        items = tree_items(entries, below, *flags)
        if below and not items:
            raise Refusal(404, "EntryNotFound", f"{below} does not exist")
        page = min(int(query.get("limit", 1000)), self.server.state.page)
        start = int(query.get("cursor", 0))
        headers = {"X-Repo-Commit": commit}
        if start + page < len(items):
            following = urlencode({**query, "limit": page, "cursor": start + page})
            headers["Link"] = f'<{self.base()}{urlsplit(self.path).path}?{following}>; rel="next"'
        self.reply(200, items[start : start + page], headers)

    def paths_info(self, query, repo_id, revision):
        _, entries = self.find(repo_id, revision)
        if "json" in self.headers.get("Content-Type", ""):
            form = json.loads(self.body)
        else:
            form = parse_qs(self.body.decode())
        known = [path for path in form.get("paths", []) if path in entries]
        self.reply(200, [tree_item(path, entries[path], True) for path in known])

    def base(self):
        """Return the address by which this client reached the hub."""
        return "http://" + self.headers["Host"]

    def entry(self, repo_id, revision, path):
        commit, entries = self.find(repo_id, revision)
        if path not in entries:
            raise Refusal(404, "EntryNotFound", "Entry not found")
        entry = entries[path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{entry.etag}"', "Accept-Ranges": "bytes"}
        if entry.sha256:
            # Without the linked size old clients take the redirect's own length, zero, for the file's.
            headers.update({"X-Linked-Size": str(entry.size), "X-Linked-Etag": f'"{entry.sha256}"'})
        return commit, entry, headers

    def resolve(self, query, repo_id, revision, path):
        commit, entry, headers = self.entry(repo_id, revision, path)
        if not entry.sha256:
            return self.send_file(entry, headers)
        headers["Location"] = f"{self.server.state.cdn or self.base()}/_cdn/{repo_id}/{commit}/{quote(path)}"
        return self.reply(302, headers=headers)

    def cdn(self, query, repo_id, commit, path):
        # Clients that follow the redirect with HEAD, as it stays on this host, need all headers here.
        _, entry, headers = self.entry(repo_id, commit, path)
        self.send_file(entry, headers)

    def send_file(self, entry, headers):
        fault = self.rule.do if self.rule else None
        size = min(self.rule.after, entry.size) if fault == "resize" else entry.size
        status, start, end = 200, 0, size
        wanted = byte_range(self.headers.get("Range", ""), size)
        if wanted and fault != "whole":
            start, end = wanted
            if start >= size:
                return self.reply(416, headers={"Content-Range": f"bytes */{size}"})
            status, headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{size}"
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(end - start))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        # Before the body: a client that has all of it may ask for the log at once.
        record = self.note(status, 0)
        try:
            if self.command != "HEAD" and end > start:
                with entry.disk.open("rb") as content:
                    if fault in faults.IN_BODY:
                        faults.send_body(self, content, start, end, self.rule, record)
                    else:
                        faults.send(self, content, start, end, record)
        except OSError:
            # The client went away.
            self.close_connection = True
        return None

    # -- control

    def control(self):
        state = self.server.state
        try:
            order = json.loads(self.body)
            unknown = set(order) - {"rules", "token", "page", "clear_log", "cdn"}
            if unknown:
                raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
            if "rules" in order:
                state.rules.replace(order["rules"])
        except (TypeError, ValueError) as error:
            return self.reply(400, {"error": str(error)}, note=False)
        with state.lock:
            state.token = order.get("token", state.token)
            state.page = order.get("page", state.page)
            state.cdn = order.get("cdn", state.cdn)
            if order.get("clear_log"):
                state.log.clear()
        return self.reply(200, {}, note=False)


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """A client that goes away is no event here."""


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--listen", default="127.0.0.1:8470", metavar="HOST:PORT", help="port 0 picks a free one"
    )
    parser.add_argument("--repo", action="append", required=True, metavar="ORG/NAME=FOLDER")
    parser.add_argument("--print-revisions", action="store_true")
    args = parser.parse_args()
    repositories = repos.load(args.repo)
    if args.print_revisions:
        print(json.dumps({repo_id: repo.main for repo_id, repo in repositories.items()}, indent=2))
        return
    host, _, port = args.listen.rpartition(":")
    server = Server((host, int(port)), Handler)
    server.state = State(repositories)
    for repo_id, repo in repositories.items():
        print(f"{repo_id} main {repo.main}", flush=True)
    print("listening on http://{}:{}".format(*server.server_address), flush=True)
    # As the first process of a container it would otherwise ignore the signal.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server.serve_forever()


if __name__ == "__main__":
    main()
