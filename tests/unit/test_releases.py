# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What is known of releases: their order, needs, advisories, traps, and the flags read from their sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import sglang_release
import yaml
from ansible.module_utils.sglang_kit import releases_facts, releases_flags
from ansible.module_utils.testing import patch_module_args

from tools import fetch_release

OLD_FORM = """
KV = ["auto", "fp8_e4m3"]
GROWING = ["one"]
GROWING.append("two")

class DeprecatedAliasStoreAction: ...

class ServerArgs:
    model_path: str

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", type=str)
        parser.add_argument("--kv-cache-dtype", choices=KV)
        parser.add_argument("--growing", choices=GROWING)
        parser.add_argument("--pick", choices=["a", "b"])
        parser.add_argument("--new-name", type=int)
        parser.add_argument(
            "--old-name", action=DeprecatedAliasStoreAction, new_flag="--new-name", dest="new_name"
        )
        parser.add_argument(
            "--off", action=DeprecatedStoreTrueAction, help="Deprecated. Use --on=never instead."
        )
        parser.add_argument("--paths", action=PathsAction, nargs="*")
        parser.add_argument("--never", action=DeprecatedStoreConstAction, dest="on", const_value="never")
        parser.add_argument("--quick", action=DeprecatedStoreTrueAction, dest="fast")
        parser.add_argument("--choice", action=argparse.BooleanOptionalAction)
        parser.add_argument("--plain", "--alias", action="store_true")
"""
NEW_FORM = """
from sglang.srt.arg_groups.choices import KV

class Serving:
    model_path: A[str, Arg(help="Path.", aliases=["--model"])]
    kv_cache_dtype: A[str, Arg(help="Kind.", choices=KV)] = "auto"
    pick: A[Optional[Literal["a", "b"]], "Pick one."] = None
    tp_size: A[int, Arg(help="Size.", cli_name="--tensor-parallel-size", aliases=["--tp-size"])] = 1
    hidden: A[bool, Arg(help="", no_cli=True)] = False
    derived: A[int, Derived(doc="x")] = 0
    plain: int = 0
    old: A[bool, "(Deprecated: use --pick=a)"] = False
"""


def write_package(root, record, **files):
    filler = "".join(f'        parser.add_argument("--filler-{n}")\n' for n in range(120))
    files["srt/server_args.py"] = record + "\n    def more(parser):\n" + filler
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@pytest.fixture
def old_flags(tmp_path):
    return releases_flags.read_flags(write_package(tmp_path, OLD_FORM))


@pytest.fixture
def new_flags(tmp_path):
    return releases_flags.read_flags(
        write_package(
            tmp_path,
            "class ServerArgs:\n    pass",
            **{
                "srt/arg_groups/choices.py": 'KV = ["auto", "fp8_e4m3"]\n',
                "srt/arg_groups/fields/serving.py": NEW_FORM,
                "srt/utils/server_args_config_parser.py": "def _takes_one_value(action): ...\n",
            },
        )
    )


def test_flags_of_calls(old_flags):
    assert old_flags["model"]["canonical"] == "model-path"
    assert old_flags["kv-cache-dtype"]["choices"] == ["auto", "fp8_e4m3"]
    # A list that the program extends is not known from the sources.
    assert old_flags["growing"]["choices"] is None
    assert old_flags["old-name"]["deprecated"] and old_flags["old-name"]["successor"] == "--new-name"
    assert old_flags["off"]["successor"] == "--on=never"


def test_flags_of_fields(new_flags):
    assert {"model-path", "model", "kv-cache-dtype", "pick", "tensor-parallel-size", "tp-size", "old"} <= set(
        new_flags
    )
    assert not {"hidden", "derived", "plain"} & set(new_flags)
    assert new_flags["kv-cache-dtype"]["choices"] == ["auto", "fp8_e4m3"]
    assert new_flags["pick"]["choices"] == ["a", "b"]
    assert new_flags["old"]["successor"] == "--pick=a"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({"model-path": "x", "kv-cache-dtype": "fp8_e4m3"}, []),
        ({"gone": 1}, [("gone", "unknown", "use --here")]),
        ({"lost": 1}, [("lost", "unknown", "take it out, or find its successor in the output of --help")]),
        ({"lost": False}, []),
        ({"kv-cache-dtype": "int3"}, [("kv-cache-dtype", "value", "int3 is none of auto, fp8_e4m3")]),
        ({"growing": "three"}, []),
        # The file's reader knows a flag by where it is stored, so the old name passes and the new one fails.
        ({"new-name": 1}, [("new-name", "not in a file", "use --old-name")]),
        (
            {"old-name": 1},
            [("old-name", "deprecated", "keep it for now: in this release a file cannot set --new-name")],
        ),
        ({"off": True}, [("off", "not in a file", "use --on=never")]),
        ({"paths": ["x"]}, [("paths", "not in a file", "this release takes it on the command line only")]),
    ],
)
def test_todays_arguments_in_a_release(old_flags, arguments, expected):
    found = releases_flags.compare(old_flags, arguments, {"gone": "--here"})
    assert [(f["flag"], f["problem"], f["remedy"]) for f in found] == expected


def test_a_newer_reader_of_the_file_takes_both_names(tmp_path):
    reader = {"srt/utils/server_args_config_parser.py": "def _takes_one_value(action): ...\n"}
    flags = releases_flags.read_flags(write_package(tmp_path, OLD_FORM, **reader))
    assert flags["new-name"]["in_file"] and flags["old-name"]["in_file"]
    assert not flags["off"]["in_file"] and not flags["paths"]["in_file"]


def test_an_older_reader_hands_true_on_with_a_flag_that_is_stored_under_another_name(old_flags):
    # "off" and its like would get the argument "true", which the parser refuses.
    for name in ("never", "quick", "no-choice", "alias"):
        assert not old_flags[name]["in_file"], name
    assert old_flags["plain"]["in_file"]


def test_flags_of_an_unknown_form_are_refused(tmp_path):
    (tmp_path / "srt").mkdir()
    (tmp_path / "srt" / "server_args.py").write_text("class ServerArgs:\n    pass\n")
    with pytest.raises(
        releases_flags.FlagsError, match=r"only 0 flags were found in .* a form that is not known"
    ):
        releases_flags.read_flags(str(tmp_path))


def test_no_server_arguments_at_all(tmp_path):
    with pytest.raises(
        releases_flags.FlagsError, match=r"has no srt/server_args\.py; expected the package folder"
    ):
        releases_flags.read_flags(str(tmp_path))


def test_versions_in_order():
    order = ["0.5.9", "0.5.10rc0", "0.5.10", "0.5.10.post1", "0.5.10.post2", "0.5.11", "0.6.0", "0.10.0"]
    assert sorted([*order[4:], *order[:4]], key=releases_facts.version_key) == order


@pytest.mark.parametrize(
    "text", ["", "latest", "0.5.x", "v0.5.23", "0.5.23; true", "23", "0.5.9.post", "0.5.9\n"]
)
def test_what_is_no_version(text):
    with pytest.raises(
        releases_facts.VersionError, match=r"is not a version of SGLang\. Give an exact release"
    ):
        releases_facts.version_key(text)


@pytest.mark.parametrize(
    "version, expected", [("1.1", "ab"), ("1.2", "abc"), ("1.3", "ac"), ("1.0", "a"), ("1.4", "a")]
)
def test_what_is_known_for_a_version(version, expected):
    entries = [
        {"id": "a", "since": None, "until": None},
        {"id": "b", "since": "1.1", "until": "1.2.post1"},
        {"id": "c", "since": "1.2", "until": "1.3"},
    ]
    assert "".join(entry["id"] for entry in releases_facts.known_for(entries, version)) == expected


@pytest.mark.parametrize("entries", [releases_facts.ADVISORIES, releases_facts.TRAPS])
def test_the_bounds_of_what_is_known_are_versions(entries):
    for entry in entries:
        bounds = [releases_facts.version_key(entry[key]) for key in ("since", "until") if entry.get(key)]
        assert bounds == sorted(bounds)


METADATA = """\
Name: sglang
Requires-Python: >=3.11
Requires-Dist: torch==2.14.1
Requires-Dist: torchvision
Requires-Dist: cuda-python>=13.0
Requires-Dist: flashinfer_python[cu13]==0.7.2
Requires-Dist: sglang-kernel==0.4.10
Requires-Dist: transformers==5.19.0; extra == "x"
"""


def test_needs_of_a_release():
    assert releases_facts.read_needs(METADATA, "Tag: cp312-cp312-manylinux_2_34_x86_64\n") == {
        "python": ">=3.11",
        "glibc": "2.34",
        "torch": "2.14.1",
        "cuda": 13,
        "driver": 580,
        "kernels": "sglang-kernel==0.4.10",
        "flashinfer": "0.7.2",
        "transformers": "5.19.0",
    }
    assert set(releases_facts.read_needs("").values()) == {None}


# --- the module


@pytest.mark.parametrize("text", ["DOCUMENTATION", "EXAMPLES", "RETURN"])
def test_module_documents_itself(text):
    assert yaml.safe_load(getattr(sglang_release, text))


def run_module(capsys, **params):
    with patch_module_args(params), pytest.raises(SystemExit) as ended:
        sglang_release.main()
    return ended.value.code, json.loads(capsys.readouterr().out)


@pytest.fixture
def release(tmp_path):
    write_package(
        tmp_path / "sglang", OLD_FORM, **{"srt/models/d.py": "class XEagle3: ...\n\nEntryClass = XEagle3\n"}
    )
    (tmp_path / "sglang-0.5.23.dist-info").mkdir()
    (tmp_path / "sglang-0.5.23.dist-info" / "METADATA").write_text("Version: 0.5.23\n" + METADATA)
    return str(tmp_path)


@pytest.mark.parametrize("check", [False, True])
def test_module_reads_a_release(capsys, release, check):
    code, result = run_module(
        capsys, version="0.5.23", path=release, arguments={"pick": "c"}, _ansible_check_mode=check
    )
    assert code == 0 and not result["changed"]
    assert (result["needs"]["torch"], result["drafters"]) == ("2.14.1", ["XEagle3"])
    assert [flag["problem"] for flag in result["flags"]] == ["value"]


def test_module_without_sources(capsys):
    code, result = run_module(capsys, version="0.5.9")
    assert code == 0 and "needs" not in result
    assert "CVE-2026-3059" in [advisory["id"] for advisory in result["advisories"]]


@pytest.mark.parametrize(
    "version, message",
    [
        ("0.5.9", "holds SGLang 0.5.23, not 0.5.9. Give the folder"),
        ("newest", "'newest' is not a version of SGLang"),
    ],
)
def test_module_refuses(capsys, release, version, message):
    code, result = run_module(capsys, version=version, path=release)
    assert code == 1 and message in result["msg"]


# --- fetching: without a registry only the cache can answer


@pytest.fixture
def no_registry(monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


def test_fetch_says_that_the_registry_is_silent(no_registry, tmp_path):
    with pytest.raises(
        fetch_release.FetchError, match=r"the package registry could not be asked .* Check that `pip"
    ):
        fetch_release.fetch("0.5.23", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_fetch_does_not_ask_for_what_it_has(no_registry, tmp_path):
    (tmp_path / "0.5.23" / "sglang-0.5.23.dist-info").mkdir(parents=True)
    (tmp_path / "0.5.23" / "sglang-0.5.23.dist-info" / "METADATA").write_text("")
    found = fetch_release.fetch("0.5.23", tmp_path)
    assert (found["fetched"], found["tree"]) == (False, str(tmp_path / "0.5.23" / "sglang"))


def test_fetch_refuses_nonsense_on_the_command_line():
    command = [sys.executable, fetch_release.__file__, "latest"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("'latest' is not a version of SGLang")
