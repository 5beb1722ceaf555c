# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Questions to a model hub's API, under a deadline, and what its refusals mean.

The hub's own client sets no time limit on these, and is not installed yet when a plan is made.
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.parse

from . import snapshot, snapshot_http

DEFAULT_ENDPOINT = "https://huggingface.co"

# Seconds without a byte after which one answer counts as lost.
SILENCE = 30
RETRIES = 3


class Refused(snapshot.SnapshotError):
    """The hub answered with an error status."""

    def __init__(self, message, status):
        super().__init__(message)
        self.status = status


def explain(status, code, repo_id, endpoint, with_token):
    """Return what an error status of the hub means and what to do; `code` is its X-Error-Code, if any."""
    found = f"the hub {endpoint} answered {status}{f' {code}' if code else ''} for {repo_id}"
    token = "A token was sent." if with_token else "No token was sent."
    if status in (401, 403) or code in ("RepoNotFound", "GatedRepo"):
        return (
            f"{found}. It says so of a misspelt name, of a private or gated repository, and of a token that "
            f"is wrong or has expired (then even of public ones). {token} Check the spelling of repo_id; "
            "accept the model's terms with the account of the token; renew the token in token_file."
        )
    if status == 429:
        return f"{found}: too many requests from this address. {token} Wait some minutes, or use a token."
    if status >= 500:
        return f"{found}: the hub has a fault of its own. Run again later, or use a mirror as endpoint."
    return f"{found}. Expected a model repository there: check endpoint and repo_id."


class Hub:
    """Asks about one repository.

    timeout: seconds that one question may take, retries and all
    """

    def __init__(self, repo_id, endpoint, token, timeout):
        self.repo_id = repo_id
        self.endpoint = endpoint.rstrip("/")
        self.token = token
        self.timeout = timeout

    def _get(self, url, deadline):
        """Return (parsed JSON, headers); raise Refused or SnapshotError."""
        attempt = 0
        while True:
            try:
                return self._try(url, deadline)
            except urllib.error.HTTPError as error:
                attempt += 1
                wait = snapshot_http.retry_after(error.headers)
                if wait is None:
                    wait = 2**attempt
                give_up = attempt > RETRIES or time.monotonic() + wait > deadline
                if error.code not in snapshot_http.RETRIED or give_up:
                    code = error.headers.get("X-Error-Code")
                    message = explain(error.code, code, self.repo_id, self.endpoint, bool(self.token))
                    raise Refused(message, error.code) from error
                time.sleep(wait)
            except (OSError, ValueError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)
                raise snapshot.SnapshotError(
                    f"no usable answer from the hub {self.endpoint} for {self.repo_id}: {reason}. Expected "
                    f"JSON within {self.timeout} s. Check endpoint, name resolution, proxy and firewall on "
                    f"this node: curl -sS '{url}'"
                ) from error

    def _try(self, url, deadline):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("time is up")
        answer = snapshot_http.get(url, self.token, min(SILENCE, left))
        parts = []
        for part in iter(lambda: answer.read(1 << 16), b""):
            parts.append(part)
            if time.monotonic() > deadline:
                raise TimeoutError("time is up while the answer came in")
        return json.loads(b"".join(parts)), answer.headers

    def _url(self, *parts):
        quoted = [urllib.parse.quote(part, safe="") for part in parts]
        return "/".join([self.endpoint, "api/models", self.repo_id, *quoted])

    def resolve(self, revision):
        """Return the commit hash of a branch, tag or commit; raise SnapshotError if there is none."""
        deadline = time.monotonic() + self.timeout
        try:
            info, _ = self._get(self._url("revision", revision), deadline)
        except Refused as refused:
            if refused.status == 404:
                raise self._no_revision(revision, deadline) from refused
            raise
        commit = info.get("sha") if isinstance(info, dict) else None
        if not isinstance(commit, str) or not snapshot.is_commit(commit):
            raise snapshot.SnapshotError(
                f"the hub {self.endpoint} names {commit!r} as the commit of {self.repo_id}; expected 40 hex "
                "digits. Check that endpoint is a model hub."
            )
        return commit

    def _no_revision(self, revision, deadline):
        """Return the error for a revision that the repository does not have; raise if it has no main."""
        info, _ = self._get(self._url(), deadline)
        return snapshot.SnapshotError(
            f"revision {revision} is not in {self.repo_id} on {self.endpoint}; its main is "
            f"{info.get('sha')}. Expected a full commit hash, a branch or a tag: pin that hash, or look one "
            "up in the repository's history."
        )

    def files(self, commit):
        """Return the RemoteFiles of a commit, by path; raise SnapshotError."""
        deadline = time.monotonic() + self.timeout
        url = self._url("tree", commit) + "?recursive=true&expand=false"
        found = []
        while url:
            try:
                page, headers = self._get(url, deadline)
            except Refused as refused:
                if refused.status == 404:
                    raise self._no_revision(commit, deadline) from refused
                raise
            try:
                found += [_remote_file(item) for item in page if item["type"] == "file"]
            except (KeyError, TypeError) as error:
                raise snapshot.SnapshotError(
                    f"the listing at {url} is not a model hub's: {error!r}. Check endpoint."
                ) from error
            url = self._next(headers.get("Link"))
        return sorted(found)

    def _next(self, link):
        """Return the address of the next page, always at this endpoint: mirrors pass on the original's."""
        match = re.search(r'<([^>]+)>;\s*rel="next"', link or "")
        if not match:
            return None
        _, found, rest = match.group(1).partition("/api/models/")
        return self.endpoint + "/api/models/" + rest if found else None


def _remote_file(item):
    lfs = item.get("lfs")
    if lfs:
        return snapshot.RemoteFile(item["path"], lfs["size"], item["oid"], lfs["oid"])
    return snapshot.RemoteFile(item["path"], item["size"], item["oid"], None)
