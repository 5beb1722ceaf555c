# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What the edge is given, judged before anything is written."""

import datetime
import importlib.util
import pathlib

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("edge_filters", ROOT / "plugins/filter/sglang_edge.py")
filters = importlib.util.module_from_spec(spec)
spec.loader.exec_module(filters)

ALICE = {"name": "alice", "key": "k3y-alice_" + "0" * 30}
BOB = {"name": "bob", "key": "k3y-bob_" + "0" * 32}
NOW = datetime.datetime(2026, 6, 1, tzinfo=datetime.timezone.utc)


def test_good_clients():
    assert filters.client_problems([ALICE, BOB]) == []


@pytest.mark.parametrize(
    "clients, problem",
    [
        ([{**ALICE, "name": "Alice"}], "client 'Alice': expected a name of small letters"),
        ([{**ALICE, "name": "a;}"}], "client 'a;}': expected a name of small letters"),
        ([{**ALICE, "key": "k3y"}], "client 'alice': its key has 3 characters; expected 32 to 128 of"),
        (
            [{**ALICE, "key": 'k3y"' + "0" * 40}],
            "client 'alice': its key has 44 characters; expected 32 to 128",
        ),
        ([ALICE, {**BOB, "name": "alice"}], "client 'alice': there are 2 of that name."),
        ([{**BOB, "key": ALICE["key"]}, ALICE], "client 'bob': shares its key with another client."),
    ],
)
def test_clients_that_cannot_be(clients, problem):
    found = filters.client_problems(clients)
    assert found[0].startswith(problem)
    assert "k3y" not in str(found)


def pem(key, phrase=None):
    protection = BestAvailableEncryption(phrase) if phrase else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection).decode()


@pytest.fixture(scope="module")
def pair():
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "edge")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(NOW - datetime.timedelta(days=30))
        .not_valid_after(NOW + datetime.timedelta(days=30))
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(Encoding.PEM).decode(), key


def test_a_good_certificate(pair):
    assert filters.certificate_problems(pair[0], pem(pair[1]), NOW) == []


def test_certificates_that_cannot_be(pair):
    chain, key = pair
    other = pem(ec.generate_private_key(ec.SECP256R1()))

    def found(*arguments):
        return filters.certificate_problems(*arguments)

    assert found("text", pem(key)) == ["sglang_edge_certificate: this is no certificate in PEM format."]
    assert found(chain, "text") == ["sglang_edge_private_key: this is no private key in PEM format."]
    assert found(chain, pem(key, b"x"))[0].startswith("sglang_edge_private_key: it has a pass phrase")
    assert found(chain, other, NOW) == [
        "sglang_edge_private_key: it is not the key of the (first) certificate."
    ]
    late = NOW + datetime.timedelta(days=31)
    assert found(chain, pem(key), late) == ["sglang_edge_certificate: it was valid until 2026-07-01."]


@pytest.mark.parametrize(
    "listen, address",
    [
        (["443"], "127.0.0.1:443"),
        ([8443], "127.0.0.1:8443"),
        (["443 default_server"], "127.0.0.1:443"),
        (["0.0.0.0:8443", "10.0.0.5:443"], "127.0.0.1:8443"),
        (["*:443"], "127.0.0.1:443"),
        (["[::]:443 ipv6only=on"], "[::1]:443"),
        (["10.0.0.5:443"], "10.0.0.5:443"),
        (["[fd00::5]:443"], "[fd00::5]:443"),
    ],
)
def test_where_a_host_reaches_its_own_edge(listen, address):
    assert filters.local(listen) == address


def test_a_file_that_is_not_there_is_named_with_its_variable():
    said = filters.lost_file({"key": "sglang_edge_certificate", "value": "/nope.pem"})
    assert said.startswith("sglang_edge_certificate: found no file '/nope.pem' on the controller")
