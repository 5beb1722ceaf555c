"""Let plain pytest import the project's modules, module_utils and plugins as Ansible does."""

import pathlib

import ansible.module_utils
import ansible.plugins.action

ROOT = pathlib.Path(__file__).resolve().parent.parent

ansible.module_utils.__path__.append(str(ROOT / "module_utils"))
ansible.plugins.action.__path__.append(str(ROOT / "plugins" / "action"))
