"""What the scenarios of an engine's sources share."""

import subprocess

from tests.lab_hosts import ROOT


def copy(node, source, target):
    """Copy a folder to a host, with modes and with whole times, which the manifest of a model holds."""
    node.sh(f"mkdir -p {target}")
    command = f"tar --format=posix -C {source} -c . | ssh -F {ROOT}/.lab/ssh/config {node.name}"
    command += f" sudo tar -x --no-same-owner -C {target}"
    subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True, timeout=120)


def said(run):
    """Return all that the failed tasks of a run said."""
    return "\n".join(f"{one.get('msg')}\n{one.get('stderr', '')}" for one in run.failures)
