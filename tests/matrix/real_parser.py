# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What a release's own reader of the YAML file and its own parser make of each of its flags.

Usage: real_parser.py FOLDER, where FOLDER holds the package `sglang`. Prints JSON: flag without dashes: null
if a file may set it, else what is said against it. Only the modules that declare the flags are real. All else
(torch first of all) is stood in for by names that do nothing; so types and choices are not looked at.
"""

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import pathlib
import sys
import tempfile
import types

import msgspec  # noqa: F401  (real, before the stand-ins: since 0.5.20 the flags are fields of its records)
import yaml

ROOT = pathlib.Path(sys.argv[1])
REAL = ("sglang.srt.server_args", "sglang.srt.arg_groups")
READERS = ("srt/utils/server_args_config_parser.py", "srt/server_args_config_parser.py")


class AnythingMeta(type):
    """A class that stands for any value."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, key):
        return cls

    def __iter__(cls):
        return iter(())

    def __contains__(cls, item):
        return False

    def __or__(cls, other):
        return other

    __ror__ = __add__ = __radd__ = __or__


class Anything(metaclass=AnythingMeta):
    def __new__(cls, *args, **kwargs):
        # As a decorator it hands back what it decorates.
        if len(args) == 1 and not kwargs and isinstance(args[0], (type, types.FunctionType)):
            return args[0]
        return cls

    def __init_subclass__(cls, **kwargs):
        pass


class StandIn(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names or top in ("msgspec", "yaml"):
            return None
        if name.startswith(REAL):
            base = ROOT.joinpath(*name.split("."))
            if base.with_suffix(".py").is_file():
                return importlib.util.spec_from_file_location(name, base.with_suffix(".py"))
            if (base / "__init__.py").is_file():
                return importlib.util.spec_from_file_location(
                    name, base / "__init__.py", submodule_search_locations=[str(base)]
                )
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


class Refused(Exception):
    pass


def refuse(message):
    raise Refused(message)


def load():
    """Return the release's parser and its reader of the file, made for it."""
    sys.meta_path.insert(0, Finder())
    parser = argparse.ArgumentParser()
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    parser.error = refuse
    for action in parser._actions:
        action.type = action.choices = None
        action.required = False
    (path,) = [ROOT / "sglang" / name for name in READERS if (ROOT / "sglang" / name).is_file()]
    spec = importlib.util.spec_from_file_location("reader", path)
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    return parser, reader.ConfigArgumentMerger(parser)


def objection(parser, reader, file, option, action):
    """Return what is said against this option in a file (str), or None."""
    said = None
    for value in [True] if action.nargs == 0 else ["7", ["7"]]:
        file.write_text(yaml.safe_dump({option[2:]: value}))
        try:
            parser.parse_args(reader.merge_config_with_args(["--config", str(file)]))
            return None
        except (Refused, ValueError) as error:
            said = str(error)
    return said


def main():
    answer, sys.stdout = sys.stdout, sys.stderr
    parser, reader = load()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "server.yaml")
        told = {
            option[2:]: objection(parser, reader, file, option, action)
            for option, action in parser._option_string_actions.items()
            if option.startswith("--") and option not in ("--help", "--config")
        }
    json.dump(told, answer)


if __name__ == "__main__":
    main()
