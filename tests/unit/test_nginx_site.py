# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""A site of nginx, with stand-ins for nginx and systemctl: all or nothing, and never an unfinished one."""

import json

import nginx_site
import pytest
from ansible.module_utils.testing import patch_module_args

FILES = {"clients.map": "alice k3y-alice;\n", "engine.conf": "Authorization KEY;\n"}


@pytest.fixture
def etc(tmp_path, monkeypatch):
    """The folder of nginx. nginx refuses what says `broken`; all calls are noted in tmp_path/calls."""
    folder = tmp_path / "nginx"
    (folder / "conf.d").mkdir(parents=True)
    (folder / "nginx.conf").write_text("")
    (tmp_path / "engine-key").write_text("k3y-engine\n")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nginx").write_text(
        f'#!/bin/sh\necho "nginx $@" >>{tmp_path}/calls\n'
        f"grep -qs broken {folder}/conf.d/* && echo 'nginx: [emerg] broken' >&2 && exit 1\nexit 0\n"
    )
    (tools / "systemctl").write_text(
        f'#!/bin/sh\necho "systemctl $@" >>{tmp_path}/calls\n[ ! -e {tmp_path}/deaf ]\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    return folder


@pytest.fixture
def site(etc, tmp_path, capsys):
    def run(check=False, **arguments):
        parameters = {
            "name": "sglang",
            "config": "server {}\n",
            "files": FILES,
            "substitute": {"KEY": str(tmp_path / "engine-key")},
            "folder": str(etc),
            **arguments,
            "_ansible_check_mode": check,
        }
        with patch_module_args(parameters), pytest.raises(SystemExit):
            nginx_site.main()
        return json.loads(capsys.readouterr().out)

    return run


def calls(tmp_path):
    path = tmp_path / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_a_site_is_written_tested_and_loaded_once(site, etc, tmp_path):
    assert site()["changed"]
    assert (etc / "conf.d/sglang.conf").read_text() == "server {}\n"
    assert (etc / "sglang/engine.conf").read_text() == "Authorization k3y-engine;\n"
    assert (etc / "sglang").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (etc / "sglang").iterdir()} == {0o600}
    assert calls(tmp_path) == [
        f"nginx -t -c {etc}/nginx.conf",
        "systemctl reload-or-restart nginx.service",
    ]
    again = site()
    assert (again["changed"], again["written"]) == (False, [])
    assert len(calls(tmp_path)) == 2


def test_check_mode_says_what_it_would_write_and_shows_no_secret(site, etc, tmp_path):
    said = site(check=True)
    assert said["changed"]
    assert "server {}" in str(said["diff"])
    assert "clients.map: differs, not shown" in str(said["diff"])
    assert "k3y" not in str(said)
    assert not (etc / "sglang").exists()
    assert calls(tmp_path) == []


def test_check_mode_goes_where_the_key_is_not_made_yet(site, tmp_path):
    (tmp_path / "engine-key").unlink()
    assert site(check=True)["changed"]
    refused = site()
    assert refused["failed"]
    assert refused["msg"] == f"not there, but expected: {tmp_path}/engine-key. Nothing was changed."


def test_what_nginx_refuses_is_put_back(site, etc, tmp_path):
    site()
    refused = site(config="broken\n", files={**FILES, "clients.map": "eve k3y-eve;\n", "new": "of no use\n"})
    assert refused["failed"]
    assert "it was put back as it was, and nginx runs on.\nnginx: [emerg] broken" in refused["msg"]
    assert "k3y" not in refused["msg"]
    assert (etc / "conf.d/sglang.conf").read_text() == "server {}\n"
    assert sorted(path.name for path in (etc / "sglang").iterdir()) == ["clients.map", "engine.conf"]
    assert "alice" in (etc / "sglang/clients.map").read_text()
    assert [call.split()[0] for call in calls(tmp_path)] == ["nginx", "systemctl", "nginx"]
    assert not site()["changed"]


def test_a_reload_that_was_missed_is_made_up_for(site, tmp_path):
    (tmp_path / "deaf").write_text("")
    assert "nginx did not take the new configuration" in site()["msg"]
    (tmp_path / "deaf").unlink()
    done = site()
    assert (done["changed"], done["written"]) == (True, [])
    assert calls(tmp_path)[-1] == "systemctl reload-or-restart nginx.service"
    assert not site()["changed"]


def test_a_file_that_others_can_read_is_closed(site, etc):
    site()
    (etc / "sglang/clients.map").chmod(0o644)
    assert site()["written"] == [str(etc / "sglang/clients.map")]
    assert (etc / "sglang/clients.map").stat().st_mode & 0o777 == 0o600
