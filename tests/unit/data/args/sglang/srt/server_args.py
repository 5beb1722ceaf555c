# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the engine's arguments: one option of every sort that releases have."""

import argparse
import json
import logging
import os
import pathlib

# What importing an engine does besides: it talks, and it leaves files in the home directory.
print("importing")
pathlib.Path("~/.cache").expanduser().mkdir()
if os.environ.get("STAND_IN_DIES"):
    raise ImportError("libcudart.so.13: cannot open shared object file")
if os.environ.get("STAND_IN_SLEEPS"):
    __import__("time").sleep(60)


class DeprecatedAliasStoreAction(argparse.Action):
    def __init__(self, option_strings, dest, new_flag=None, **kwargs):
        self.new_flag = new_flag
        super().__init__(option_strings, dest, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None):
        logging.warning("\033[1;33m'%s' is deprecated\033[0m", option_string)
        setattr(namespace, self.dest, values)


class DeprecatedStoreConstAction(argparse.Action):
    def __init__(self, option_strings, dest, new_flag=None, **kwargs):
        self.new_flag = new_flag
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, "disabled")


class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        add = parser.add_argument
        add("--config")
        add("--model-path", "--model", required=True)
        add("--tp-size", "--tensor-parallel-size", type=int, default=1)
        add("--host", default="127.0.0.1")
        add("--api-key")
        add("--trust-remote-code", action="store_true")
        add("--mem-fraction-static", type=float)
        add("--max-running-requests", type=int)
        add("--kv-cache-dtype", default="auto", choices=["auto", "bf16", "fp8_e4m3"])
        add("--attention-backend", choices=["flashinfer", "trtllm_mla", "trtllm_mha"])
        add("--model-loader-extra-config", default="{}")
        add("--mm-process-config", type=json.loads)
        add("--prompts", nargs="+")
        add("--dynamic-chunking", action=argparse.BooleanOptionalAction)
        add("--cuda-graph-max-bs-decode", type=int)
        add("--cuda-graph-max-bs-prefill", type=int)
        add("--window", action=DeprecatedAliasStoreAction, new_flag="--draft-window", type=int)
        add("--draft-window", type=int)
        add("--graphs")
        add("--no-graphs", action=DeprecatedStoreConstAction, dest="graphs", new_flag="--graphs=disabled")
        add("--other-graphs", action="store_const", const="other", dest="graphs")
        add("--enable-dynamic-chunking", action="store_true")
        add("--smg-grpc-mode", action="store_true")
        add("--grpc-mode", action="store_true", help="(Deprecated, use --smg-grpc-mode) Selector.")
        add("--no-op", action="store_true", help="Note: --no-op is deprecated now.")
        add("--speculative-algorithm")
        add("--speculative-draft-model-path")
