# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The program that fetches files with the hub's client, in a process of its own (see snapshot_transfer).

Standard input: one line of JSON (repo_id, revision, endpoint, token, folder, workers, paths, force); then it
stays open for as long as this process is wanted.
Standard output: a JSON list, one entry per file: {path, error: null or {type, message, status, errno}}.
"""

from __future__ import annotations

import concurrent.futures
import errno
import json
import os
import sys
import threading
import time

ATTEMPTS = 3
# Trying again does not help against these.
FINAL_STATUS = (401, 403, 404)


def end_with_parent():
    """Stop when the other end of standard input is gone, so that no orphan writes on."""
    sys.stdin.read()
    os._exit(1)


def describe(error):
    """Return what is known of an error; the client wraps the telling one in others."""
    status = number = None
    inner = error
    while inner is not None:
        status = status or getattr(getattr(inner, "response", None), "status_code", None)
        number = number or getattr(inner, "errno", None)
        inner = inner.__cause__ or inner.__context__
    return {"type": type(error).__name__, "message": str(error), "status": status, "errno": number}


def fetch(download, job, path):
    for attempt in range(ATTEMPTS):
        try:
            download(
                job["repo_id"],
                path,
                revision=job["revision"],
                endpoint=job["endpoint"],
                local_dir=job["folder"],
                token=job["token"] or False,
                force_download=job["force"],
            )
            return {"path": path, "error": None}
        except Exception as error:
            found = describe(error)
            final = found["status"] in FINAL_STATUS or found["errno"] == errno.ENOSPC
            if final or attempt == ATTEMPTS - 1:
                return {"path": path, "error": found}
            time.sleep(2**attempt)
    return None


def main():
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_parent, daemon=True).start()
    from huggingface_hub import hf_hub_download

    with concurrent.futures.ThreadPoolExecutor(job["workers"]) as pool:
        results = list(pool.map(lambda path: fetch(hf_hub_download, job, path), job["paths"]))
    json.dump(results, sys.stdout)
    sys.stdout.flush()
    # The thread that waits on standard input would hold up an ordinary end.
    os._exit(0)


if __name__ == "__main__":
    main()
