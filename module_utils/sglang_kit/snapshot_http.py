# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""HTTP as a model hub needs it: redirects to other hosts without the token, waits that a server asks for.

Ansible's open_url sets up a process-wide opener at each call; files are fetched by several threads.
"""

from __future__ import annotations

import email.utils
import time
import urllib.error
import urllib.parse
import urllib.request

# Answers after which the same question may bring another one.
RETRIED = (408, 425, 429, 500, 502, 503, 504)
AGENT = "sglang-kit"


def origin(url):
    """Return (scheme, host and port) of a URL: who gets to see what is sent to it."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows up to ten redirects; the token goes on only to where it was sent in the first place."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        following = urllib.request.Request(newurl, headers=req.headers)
        token = req.unredirected_hdrs.get("Authorization")
        if token and origin(newurl) == origin(req.full_url):
            following.add_unredirected_header("Authorization", token)
        return following

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302


def _opener(proxies):
    # Neither files nor ftp: a redirect must not lead there.
    opener = urllib.request.OpenerDirector()
    opener.add_handler(urllib.request.ProxyHandler(proxies))
    for handler in (
        urllib.request.UnknownHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        _Redirects,
    ):
        opener.add_handler(handler())
    opener.addheaders = [("User-Agent", AGENT)]
    return opener


def get(url, token, timeout, headers=None, proxies=None):
    """Return the answer to a GET, its body unread; raise OSError (HTTPError for an error status).

    timeout: seconds that connecting, and each read, may take
    proxies: {scheme: address}, None for those of the environment
    """
    request = urllib.request.Request(url, headers=headers or {})
    if token:
        request.add_unredirected_header("Authorization", "Bearer " + token)
    return _opener(proxies).open(request, timeout=timeout)


def retry_after(headers):
    """Return the seconds that a Retry-After header asks for; None without one."""
    asked = (headers.get("Retry-After") or "").strip()
    if asked.isdigit():
        return int(asked)
    try:
        return max(0, email.utils.parsedate_to_datetime(asked).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
