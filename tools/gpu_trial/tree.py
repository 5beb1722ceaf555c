# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Make the engine tree on the machine, and run the project's modules on it as Ansible would."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

HERE = pathlib.Path(__file__).resolve().parent
KIT = HERE / "kit"
WRAPPER = "srt/models/kimi_k25.py"
CLASS = "KimiK25ForConditionalGeneration"


class TrialError(Exception):
    """The trial cannot go on; the message says why."""


def make_tree(site, tree):
    """Make a virtual environment that holds `site` and sees the packages of this interpreter behind it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tree)], check=True)
    packages = site_packages(tree)
    shutil.copytree(site, packages, dirs_exist_ok=True)
    # No start compiles them again. Templates that are no Python are passed over, hence no check.
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-q", "-j", "0", str(packages)], check=False)
    # A path file's folders come after the tree's own, so the bundle's releases win.
    (packages / "machine.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")


def copy_tree(source, tree):
    """Make a second tree like the first."""
    make_tree(site_packages(source), tree)


def site_packages(tree):
    """Return the folder of a tree's packages."""
    return next((tree / "lib").glob("python3.*")) / "site-packages"


def run_module(name, arguments, python=sys.executable, timeout=300):
    """Run one of the project's modules in a process of its own; return its result (dict)."""
    answer = subprocess.run(
        [str(python), str(KIT / "library" / (name + ".py"))],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}),
        env=dict(os.environ, PYTHONPATH=str(KIT), PYTHONDONTWRITEBYTECODE="1"),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    try:
        return json.loads(answer.stdout)
    except ValueError:
        raise TrialError(f"{name} returned no result: {answer.stderr.strip()[-500:]}") from None


def take_out(path, class_name, methods):
    """Delete methods of a class from a source file; return the names that were there."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    tree = ast.parse("".join(lines))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name in methods]
    for node in reversed(found):
        first = min([node.lineno] + [decorator.lineno for decorator in node.decorator_list])
        del lines[first - 1 : node.end_lineno]
    path.write_text("".join(lines), encoding="utf-8")
    return sorted(node.name for node in found)


class Patch:
    """What the role sglang_patch does, with its own defaults (a dict), on a tree."""

    def __init__(self, tree, defaults):
        self.tree = tree
        self.python = tree / "bin" / "python"
        self.package = site_packages(tree) / "sglang"
        self.methods = defaults["sglang_patch_methods"]
        self._arguments = {
            "path": str(self.package / defaults["sglang_patch_file"]),
            "class_name": defaults["sglang_patch_class"],
            "delegate": defaults["sglang_patch_delegate"],
            "methods": self.methods,
            "source": {
                "path": str(self.package / defaults["sglang_patch_source"]),
                "class_name": defaults["sglang_patch_source_class"],
            },
        }

    def apply(self):
        """Run python_delegate; return {"changed", "outcomes": {method: outcome}} or its "msg"."""
        result = run_module("python_delegate", self._arguments, self.python)
        outcomes = {name: found["outcome"] for name, found in result.get("methods", {}).items()}
        return {"changed": result.get("changed"), "outcomes": outcomes, "msg": result.get("msg")}

    def audit(self, drafter=None, target=None):
        """Run sglang_contract; return {"verdict", "missing": [name], "findings": [severity: id]}."""
        arguments = {"path": str(self.tree), "class_name": CLASS, "enforce": False}
        if drafter:
            arguments.update(
                drafter_config=str(drafter / "config.json"), target_config=str(target / "config.json")
            )
        result = run_module("sglang_contract", arguments, self.python)
        return {
            "verdict": result.get("verdict"),
            "missing": sorted({entry["name"] for entry in result.get("missing", [])}),
            "findings": ["{severity}: {id}".format(**entry) for entry in result.get("findings", [])],
            "msg": result.get("msg"),
        }

    def prove_import(self, env):
        """Run the role's proof of import; return (exit status, its last line)."""
        program = KIT / "roles" / "sglang_patch" / "files" / "prove_import.py"
        words = [self._arguments["path"], "sglang." + WRAPPER[:-3].replace("/", "."), CLASS]
        answer = subprocess.run(
            [str(self.python), "-B", str(program), *words, ",".join(self.methods)],
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return answer.returncode, (answer.stdout.strip().splitlines() or answer.stderr.strip().splitlines())[
            -1
        ]


def prove_patch(patch):
    """Audit and patch the release as it is, take the methods out, audit again; return the steps (dict)."""
    wrapper = patch.package / WRAPPER
    released = wrapper.read_bytes()
    steps = {"released": patch.audit(), "released_patch": patch.apply()}
    steps["untouched"] = wrapper.read_bytes() == released
    steps["taken_out"] = take_out(wrapper, CLASS, patch.methods)
    steps["without"] = patch.audit()
    return steps


def patch_again(patch, steps):
    """Patch the tree whose methods were taken out, twice, and audit it; adds to the steps."""
    steps["patch"] = patch.apply()
    steps["again"] = patch.apply()
    steps["patched"] = patch.audit()


def patch_problems(patch, steps):
    """Return what of the steps, the import among them, is not as it must be (list of str)."""
    methods = sorted(patch.methods)
    wanted = [
        ("the release's own methods satisfy the audit", steps["released"]["verdict"] == "satisfied"),
        ("the module leaves the release as it is", steps["untouched"]),
        ("the methods were there to be taken out", steps["taken_out"] == methods),
        ("without them the audit says so", steps["without"]["verdict"] == "missing"),
        ("the module adds them", set(steps["patch"]["outcomes"].values()) == {"added"}),
        ("a second run changes nothing", steps["again"]["changed"] is False),
        ("the patched tree satisfies the audit", steps["patched"]["verdict"] == "satisfied"),
        ("the patched file is imported", steps["import"][0] == 0),
    ]
    return ["not so: " + what for what, holds in wanted if not holds]
