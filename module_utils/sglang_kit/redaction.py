# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Take secrets out of text that others will read: the journal, a bug report.

Standard library only, Python 3.8 and later: the launcher imports this file from its folder.
"""

from __future__ import annotations

import re

_KEY = r"(?:admin[_-])?api[_-]key|ssl[_-]keyfile[_-]password|hf[_-]token"
_SECRET_NAME = r"token|secret|passw(?:or)?d|api[_-]?key"
_PATTERNS = [
    # 'api_key': 'x' and api_key='x' in the line of server arguments
    re.compile(r"(['\"]?\b(?:" + _KEY + r")['\"]?\s*[:=]\s*['\"])[^'\"]*"),
    # --api-key x, and '--api-key', 'x' in a printed argument list
    re.compile(r"(--(?:" + _KEY + r")(?:['\"]\s*,\s*['\"]|[= ]+['\"]?))[^\s'\",\]]+"),
    re.compile(r"(\b(?i:bearer) +)[A-Za-z0-9._~+/=-]{8,}"),
    # Tokens of the model hub, whatever stands before them.
    re.compile(r"()\bhf_[A-Za-z0-9]{20,}"),
    # KEY=value of an environment and key: value of YAML, where the name says that it is secret
    re.compile(r"(?mi)(^[ \t]*(?:[a-z][a-z0-9_-]*)?(?:" + _SECRET_NAME + r")[ \t]*[=:][ \t]*)[^\s#].*$"),
    # A password within an address
    re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s/:@]*:)[^\s/@]+(?=@)"),
    re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)[^-]*"),
]
# Of what stands in a file of secrets, shorter words are names. The keys of engine and edge are longer.
_SHORTEST = 32


def redact(text, secrets=()):
    """Return the text with the values of keys, and every literal of `secrets`, replaced by ***."""
    for secret in secrets:
        text = text.replace(secret, "***")
    for pattern in _PATTERNS:
        text = pattern.sub(r"\1***", text)
    return text


def words_of(text):
    """Return what may be secret in the text of a file of secrets (list of str, the longest first)."""
    words = {word for word in re.findall(r"[A-Za-z0-9_-]+", text) if len(word) >= _SHORTEST}
    return sorted(words, key=len, reverse=True)
