# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Judge on the controller what the edge is given, before anything is written. No finding holds a secret."""

from __future__ import annotations

import datetime
import re

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
# What needs no escape in any place of nginx's configuration, and is too long to be guessed.
KEY = re.compile(r"[A-Za-z0-9_-]{32,128}")


def client_problems(clients):
    """Return what is wrong with a list of clients ({name, key, ...}), as a list of sentences."""
    problems = []
    names = [str(client["name"]) for client in clients]
    keys = [str(client["key"]) for client in clients]
    for name, key in zip(names, keys):
        if not NAME.fullmatch(name):
            problems.append(
                f"client {name!r}: expected a name of small letters, digits and underscores, at most 31."
            )
        if not KEY.fullmatch(key):
            problems.append(
                f"client {name!r}: its key has {len(key)} characters; expected 32 to 128 of A-Z a-z 0-9 _ -, "
                "for example from `openssl rand -hex 32`."
            )
        if names.count(name) > 1:
            problems.append(f"client {name!r}: there are {names.count(name)} of that name.")
        if keys.count(key) > 1:
            problems.append(f"client {name!r}: shares its key with another client.")
    return list(dict.fromkeys(problems))


def certificate_problems(chain, private_key, now=None):
    """Return what is wrong with a PEM certificate (chain) and its PEM key, as a list of sentences."""
    try:
        certificate = x509.load_pem_x509_certificates(chain.encode())[0]
    except ValueError:
        return ["sglang_edge_certificate: this is no certificate in PEM format."]
    try:
        key = load_pem_private_key(private_key.encode(), password=None)
    except TypeError:
        return [
            "sglang_edge_private_key: it has a pass phrase; give a key without, in a file of ansible-vault."
        ]
    except ValueError:
        return ["sglang_edge_private_key: this is no private key in PEM format."]
    problems = []
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
        problems.append("sglang_edge_private_key: it is not the key of the (first) certificate.")
    end = certificate.not_valid_after_utc
    if end <= (now or datetime.datetime.now(datetime.timezone.utc)):
        problems.append(f"sglang_edge_certificate: it was valid until {end:%Y-%m-%d}.")
    return problems


def local(listen):
    """Return where the host itself reaches an edge that listens there (nginx's own `listen`, list of str)."""
    first = str(listen[0]).split()[0]
    # nginx takes [::] for IPv6 alone.
    first = re.sub(r"^\[::\](?=:)", "[::1]", first)
    return re.sub(r"^(?:(?:0\.0\.0\.0|\*):)?(?=\d+$)", "127.0.0.1:", first)


def lost_file(item):
    """Say that a file of the controller is not there; item: the variable as `key`, its path as `value`."""
    return f"{item['key']}: found no file {item['value']!r} on the controller; expected one in PEM format."


class FilterModule:
    def filters(self):
        return {
            "sglang_edge_client_problems": client_problems,
            "sglang_edge_certificate_problems": certificate_problems,
            "sglang_edge_local": local,
            "sglang_edge_lost_file": lost_file,
        }
