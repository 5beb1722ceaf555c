# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Judge on the controller what a router is given, and put it into its words. No finding holds a secret."""

from __future__ import annotations

import base64
import json
import re
from urllib.parse import urlsplit

from ansible.errors import AnsibleFilterError
from ansible.module_utils.compat.version import LooseVersion

RESPONSES = re.compile(
    r'(?m)^smg_http_responses_total\{path="([^"]+)",status_code="(\d+)"[^}]*\} ([0-9.eE+]+)$'
)
KEY = re.compile(r"[A-Za-z0-9_-]{32,128}")


def worker_url(node):
    """Return where routers reach a node (its hostvars): sglang_gateway_worker_url, or its edge."""
    given = node.get("sglang_gateway_worker_url")
    if not given:
        name = (node.get("sglang_edge_names") or [node["inventory_hostname"]])[0]
        port = re.search(r"(\d+)(?: |$)", str((node.get("sglang_edge_listen") or ["443"])[0]))
        given = f"https://{name}" + (f":{port.group(1)}" if port and port.group(1) != "443" else "")
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise AnsibleFilterError(
            f"{node['inventory_hostname']}: sglang_gateway_worker_url is {given!r}; "
            "expected something like https://node1.example.net"
        )
    return f"{parts.scheme}://{parts.netloc}"


def answering(nodes, hostvars, groups):
    """Return those of nodes (names) that answer clients: of hosts that are one server, rank 0 alone."""
    spans = {node: groups.get(hostvars[node].get("sglang_server_span") or "", [node]) for node in nodes}
    return [node for node in nodes if spans[node][:1] == [node]]


def routers(gateways, node, nodes):
    """Return the names of those gateways (a list of hostvars) that route to a node.

    nodes: all nodes, which a gateway routes to unless its sglang_gateway_nodes says otherwise.
    """
    return [
        item["inventory_hostname"] for item in gateways if node in item.get("sglang_gateway_nodes", nodes)
    ]


def words(flags):
    """Return a mapping of long flags as words of a command line.

    true is a flag alone; false and null are left out; a list is several words.
    """
    found = []
    for flag, value in flags.items():
        if value is None or value is False:
            continue
        found.append("--" + flag)
        if value is not True:
            found.extend(str(item) for item in (value if isinstance(value, list) else [value]))
    return found


def node_problems(nodes, worker_key, engines):
    """Return what keeps a router from using these nodes (a list of hostvars), as a list of sentences.

    engines: {"first": release, "below": release}, between which the router's release works.
    """
    problems = []
    if not nodes:
        problems.append("sglang_gateway_nodes: there is no node to send requests to.")
    if not KEY.fullmatch(worker_key):
        problems.append(
            f"sglang_gateway_worker_key: it has {len(worker_key)} characters; expected 32 to 128 of "
            "A-Z a-z 0-9 _ -, for example from `openssl rand -hex 32`."
        )
    for node in nodes:
        problems.extend(_problems_of(node, worker_key, engines))
    problems.extend(_shared(nodes))
    return problems


def _shared(nodes):
    by_url = {}
    for node in nodes:
        by_url.setdefault(worker_url(node), []).append(node["inventory_hostname"])
    for url, names in by_url.items():
        if len(names) > 1:
            yield (
                f"{', '.join(names)}: the router would reach all of them at {url}. Give each node a name of "
                "its own, the first of sglang_edge_names, or a sglang_gateway_worker_url."
            )


def _problems_of(node, worker_key, engines):
    name = node["inventory_hostname"]
    if node.get("sglang_edge_enabled") in (True, "true", "True", "yes"):
        clients = [item for item in node.get("sglang_edge_clients") or [] if item.get("key") == worker_key]
        if not clients:
            yield f"{name}: none of its sglang_edge_clients has the key sglang_gateway_worker_key."
        for client in clients:
            if int(client.get("requests_per_minute") or 0) or int(client.get("concurrent") or 0):
                yield (
                    f"{name}: client {client['name']!r} has a limit, which would count for all clients of "
                    "the router together. Give limits to sglang_gateway_clients."
                )
    elif not node.get("sglang_gateway_worker_url"):
        yield (
            f"{name}: it has no edge, and its engine listens on the node alone. Set sglang_edge_enabled "
            "there, or sglang_gateway_worker_url."
        )
    version = node.get("sglang_engine_version")
    if version and not _within(str(version), engines):
        yield (
            f"{name}: sglang_engine_version is {version}; this release of the router is for "
            f"{engines['first']} and later, below {engines['below']}."
        )


def _within(version, engines):
    key = LooseVersion(version.split(".post")[0].split("rc")[0])
    return LooseVersion(str(engines["first"])) <= key < LooseVersion(str(engines["below"]))


def knowing(lists, url):
    """Return the hosts whose list of workers names url, in or out on purpose.

    lists: results of slurp, looped over hosts.
    """
    found = []
    for item in lists:
        kept = json.loads(base64.b64decode(item["content"]))
        if url in kept["in"] + kept["out"]:
            found.append(item["item"])
    return found


def answered(readings):
    """Return how a router answered on /v1/ between two readings of its metrics.

    {"all": requests, "failed": those with 5xx}. A reading that is lower than the one before is of a router
    that was started in between.
    """
    counts = []
    for text in readings:
        by_status = {}
        for path, status, count in RESPONSES.findall(text):
            if path.startswith("/v1/"):
                by_status[status] = by_status.get(status, 0) + int(float(count))
        counts.append(by_status)
    first, last = counts
    since = {status: count - first.get(status, 0) for status, count in last.items()}
    if any(count < 0 for count in since.values()):
        since = last
    return {
        "all": sum(since.values()),
        "failed": sum(count for status, count in since.items() if status.startswith("5")),
    }


class FilterModule:
    def filters(self):
        return {
            "sglang_gateway_answered": answered,
            "sglang_gateway_answering": answering,
            "sglang_gateway_knowing": knowing,
            "sglang_gateway_worker_url": worker_url,
            "sglang_gateway_routers": routers,
            "sglang_gateway_words": words,
            "sglang_gateway_node_problems": node_problems,
        }
