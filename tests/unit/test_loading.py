# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""How a release is told to read the weights, as Ansible renders it from the role's own variables."""

import pathlib

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

ROLE = pathlib.Path(__file__).resolve().parents[2] / "roles/sglang_server"
THREADS = {"model-loader-extra-config": {"enable_multithread_load": True, "num_threads": 8}}
ONE = {"model-loader-extra-config": {"enable_multithread_load": False}}
PREFETCH = {"weight-loader-prefetch-checkpoints": True}


def trusted(value):
    if isinstance(value, dict):
        return {key: trusted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [trusted(item) for item in value]
    return trust_as_template(value) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def role():
    files = [ROLE / "defaults/main.yml", *sorted((ROLE / "vars/main").glob("*.yml"))]
    return {
        name: trusted(value) for file in files for name, value in yaml.safe_load(file.read_text()).items()
    }


@pytest.fixture
def arguments(role):
    """Return the arguments that the role gives a release beside those that it would have anyway."""

    def ask(version, disk, **variables):
        given = {
            "model_store_target_path": "/srv/models/o/n/c",
            "model_store_drafter_path": "/srv/models/o/d/c",
            "sglang_engine_tree": f"/opt/sglang/engines/{version}-0123456789ab",
            "sglang_server_profile": "sm100",
            "__sglang_server_node": {"facts": {"disks": {"/srv/models/o/n/c": disk}}},
            **variables,
        }
        templar = Templar(loader=DataLoader(), variables={**role, **given})
        found = templar.template(trust_as_template("{{ __sglang_server_effective_arguments }}"))
        return {name: found[name] for name in found if "loader" in name}

    return ask


NVME = {"kind": "xfs", "rotational": False}
TURNS = {"kind": "ext4", "rotational": True}
NFS = {"kind": "nfs4", "rotational": None}


@pytest.mark.parametrize(
    "version, disk, expected",
    [
        ("0.5.9", NVME, THREADS),
        ("0.5.10.post1", NVME, {}),
        ("0.5.23", NVME, {}),
        ("0.5.23+g0123456789ab", NVME, {}),
        ("0.5.9", TURNS, {}),
        ("0.5.10", TURNS, ONE),
        ("0.5.23", TURNS, ONE),
        ("0.5.9", NFS, THREADS),
        ("0.5.10", NFS, {}),
        ("0.5.11", NFS, {**PREFETCH, **ONE}),
        ("0.5.15.post1", NFS, {**PREFETCH, **ONE}),
        ("0.5.16", NFS, PREFETCH),
        ("0.5.23", {"kind": "lustre", "rotational": None}, PREFETCH),
        # What the kernel says nothing of is taken for a disk that does not turn.
        ("0.5.23", {"kind": "overlay", "rotational": None}, {}),
        ("0.5.23", {}, {}),
    ],
)
def test_settings_follow_the_release_and_the_disk(arguments, version, disk, expected):
    assert arguments(version, disk) == expected


def test_the_users_own_settings_win(arguments):
    own = {"weight-loader-prefetch-checkpoints": False, "model-loader-extra-config": {"num_threads": 32}}
    assert arguments("0.5.23", NFS, sglang_server_arguments=own) == own


def test_another_load_format_gets_no_settings_that_it_refuses(arguments):
    assert arguments("0.5.11", NFS, sglang_server_arguments={"load-format": "runai_streamer"}) == {}


def test_the_lab_reads_as_the_engine_does(arguments):
    assert arguments("0.5.9", NFS, sglang_server_profile="cpu") == {}
