# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The archive of a report: all that is there, nothing secret, and a word for what is missing."""

import json
import pathlib
import tarfile

import pytest
import sglang_report
import yaml
from ansible.module_utils.testing import patch_module_args

KEY = "k3y" * 12


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    """Gather a report on a node whose journal and files hold the key; returns (result, {name: text})."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "timeout").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    (tools / "systemctl").write_text("#!/bin/sh\necho unit says $2; exit 0\n")
    (tools / "journalctl").write_text(f"#!/bin/sh\nprintf 'says {KEY} \\377'\n")
    (tools / "ps").write_text("#!/bin/sh\necho 'cannot look' >&2; exit 3\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(sglang_report, "AnsibleModule", at_home(sglang_report.AnsibleModule, tools))
    (tmp_path / "release").mkdir()
    (tmp_path / "release/server.yaml").write_text("api-key: short\ntp-size: 8\n")
    (tmp_path / "engine-key").write_text(KEY + "\n")

    def gather(**arguments):
        parameters = {
            "dest": str(tmp_path / "report.tar.gz"),
            "release": str(tmp_path / "release"),
            "secrets": [str(tmp_path / "engine-key"), str(tmp_path / "none")],
            "documents": {"probe.json": {"said": "x " + KEY}},
            **arguments,
        }
        with patch_module_args(parameters), pytest.raises(SystemExit):
            sglang_report.main()
        result = json.loads(capsys.readouterr().out)
        if not (tmp_path / "report.tar.gz").exists():
            return result, {}
        with tarfile.open(tmp_path / "report.tar.gz") as archive:
            return result, {
                entry.name.partition("/")[2]: archive.extractfile(entry).read().decode() for entry in archive
            }

    return gather


def at_home(module, tools):
    """The module class, which finds no tools but these."""

    class AtHome(module):
        def get_bin_path(self, name, required=False):
            return str(tools / name) if (tools / name).exists() else None

    return AtHome


def test_a_report_holds_what_there_is_and_no_secret(report, tmp_path):
    result, texts = report()
    assert result["changed"]
    assert texts["unit.txt"] == "unit says sglang.service\n"
    assert texts["journal.txt"] == "says *** ?"
    assert json.loads(texts["probe.json"]) == {"said": "x ***"}
    assert texts[f"files{tmp_path}/release/server.yaml"] == "api-key: ***\ntp-size: 8\n"
    # What the caller gave is the caller's.
    assert KEY not in str({**result, "invocation": None}) + str(texts)
    assert (tmp_path / "report.tar.gz").stat().st_mode & 0o777 == 0o600


def test_what_is_missing_is_named(report, tmp_path):
    result, texts = report()
    assert "nvidia-smi.txt: nvidia-smi is not installed" in result["missing"]
    assert "processes.txt: ps ended with 3" in result["missing"]
    assert f"{tmp_path}/release/gate.json: No such file or directory" in result["missing"]
    assert texts["missing.txt"] == "\n".join(result["missing"]) + "\n"


def test_check_mode_gathers_nothing(report):
    result, texts = report(_ansible_check_mode=True)
    assert (result["changed"], result["skipped"], texts) == (False, True, {})


def test_keys_are_looked_for_where_the_roles_put_them():
    roles = pathlib.Path(__file__).resolve().parents[2] / "roles"
    text = (roles / "sglang_gateway/vars/main.yml").read_text(encoding="utf-8")
    gateway = yaml.safe_load(text)
    folder = gateway["__sglang_gateway_folder"]
    edge = yaml.safe_load((roles / "sglang_edge/vars/main.yml").read_text(encoding="utf-8"))[
        "__sglang_edge_folder"
    ]
    wanted = {
        gateway[name].replace("{{ __sglang_gateway_folder }}", folder)
        for name in ("__sglang_gateway_control_key", "__sglang_gateway_worker_key")
    }
    wanted |= {
        edge.replace("{{ sglang_edge_site }}", site) + "/clients.map" for site in ("sglang", "sglang_gateway")
    }
    assert wanted <= set(sglang_report.SECRET_FILES)
