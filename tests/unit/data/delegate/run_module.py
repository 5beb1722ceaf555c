"""Run the module in a process of its own: run_module.py ARGUMENTS-AS-JSON [FAULT]; prints its result."""

import json
import os
import pathlib
import resource
import signal
import sys

import ansible.module_utils

ROOT = pathlib.Path(__file__).resolve().parents[4]
ansible.module_utils.__path__.append(str(ROOT / "module_utils"))
sys.path.insert(0, str(ROOT / "library"))

import python_delegate
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args


def kill(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


fault = sys.argv[2] if len(sys.argv) > 2 else ""
if fault == "kill_before_write":
    os.fchmod = kill
elif fault == "kill_before_rename":
    AnsibleModule.atomic_move = kill
elif fault == "kill_after_rename":
    move = AnsibleModule.atomic_move
    AnsibleModule.atomic_move = lambda *args: (move(*args), kill())
elif fault == "no_room":
    # The kernel refuses the write, as it does on a full disk.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
elif fault == "nobody":
    os.setgid(65534)
    os.setuid(65534)

with patch_module_args(json.loads(sys.argv[1])):
    python_delegate.main()
