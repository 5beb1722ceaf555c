"""For ansible-lint: its rule `args` imports the project's modules, and those their module_utils."""

import pathlib

import ansible.module_utils

ansible.module_utils.__path__.append(str(pathlib.Path(__file__).resolve().parents[2] / "module_utils"))
