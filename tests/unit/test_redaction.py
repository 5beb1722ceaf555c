# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What is taken out of the journal and of reports, and what must stay readable."""

import pytest
from ansible.module_utils.sglang_kit.redaction import redact, words_of


@pytest.mark.parametrize(
    "line, expected",
    [
        (
            "ServerArgs(api_key='s3', admin_api_key=\"s4\", x='y')",
            "ServerArgs(api_key='***', admin_api_key=\"***\", x='y')",
        ),
        ("{'api_key': None, 'b': 'c'}", "{'api_key': None, 'b': 'c'}"),
        ("['--api-key', 's3', '--port', '1']", "['--api-key', '***', '--port', '1']"),
        ("python -m x --admin-api-key s3 --port 1", "python -m x --admin-api-key *** --port 1"),
        ("--api-key=s3 --tp 8", "--api-key=*** --tp 8"),
        ('{"ssl_keyfile_password": "s3"}', '{"ssl_keyfile_password": "***"}'),
        ("Authorization: Bearer s3-s3-s3-s3", "Authorization: Bearer ***"),
        ("the bearer of news", "the bearer of news"),
        ("HF_TOKEN=s3\nHF_HOME=/x", "HF_TOKEN=***\nHF_HOME=/x"),
        ("got hf_AbcdefghijklmnopqrstuvwxY!", "got ***!"),
        ("api-key: s3\ntp-size: 8\n", "api-key: ***\ntp-size: 8\n"),
        ("max_total_num_tokens=4096, x", "max_total_num_tokens=4096, x"),
        (
            "https://user:s3@host/x and http://127.0.0.1:8470/a@b",
            "https://user:***@host/x and http://127.0.0.1:8470/a@b",
        ),
        ("-----BEGIN EC PRIVATE KEY-----\ns3\n-----END", "-----BEGIN EC PRIVATE KEY-----***-----END"),
    ],
)
def test_redact(line, expected):
    assert redact(line) == expected


def test_the_words_of_a_file_of_secrets_are_its_keys():
    line = '"~^(?i:bearer) +{}$" {};\n'
    text = line.format("a" * 32, "a_client_with_a_long_name") + line.format("b" * 40, "bob")
    assert words_of(text) == ["b" * 40, "a" * 32]
    assert redact("x" + "a" * 32 + "y bob", words_of(text)) == "x***y bob"
