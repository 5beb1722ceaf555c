# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the engine's reader of the YAML file, with the quirks that the releases share."""

import argparse
import json
import pathlib

import yaml

HANDS_ON_JSON = True


class ConfigArgumentMerger:
    def __init__(self, parser):
        self.flags = [a.dest for a in parser._actions if isinstance(a, argparse._StoreTrueAction)]
        self.unsupported_actions = {
            a.dest: a for a in parser._actions if a.nargs == 0 and a.dest not in self.flags
        }
        del self.unsupported_actions["help"]

    def merge_config_with_args(self, words):
        config = yaml.safe_load(pathlib.Path(words[words.index("--config") + 1]).read_text()) or {}
        merged = []
        for key, value in config.items():
            name = key.replace("-", "_")
            if name in self.unsupported_actions:
                raise ValueError(f"Unsupported config option '{name}'")
            if isinstance(value, bool) and name in self.flags:
                merged += [f"--{key}"] * value
            elif isinstance(value, list):
                merged += [f"--{key}", *map(str, value)] if value else []
            elif isinstance(value, dict):
                merged += [f"--{key}", json.dumps(value) if HANDS_ON_JSON else str(value)]
            else:
                merged += [f"--{key}", str(value).lower() if isinstance(value, bool) else str(value)]
        return merged
