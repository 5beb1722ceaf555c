#!/usr/bin/python
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: make a Python class hand named methods to one of its attributes."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: python_delegate
short_description: Make a Python class hand named methods to one of its attributes
description:
  - Ensures that a class in a Python file offers the methods named, each handed on to an attribute of its
    instances. Methods that the class, or a base of the same package, has already are left alone.
  - The file is read, never imported. What is there is told from the syntax tree; the text is edited, compiled
    and read again, and written only if it proves to hold exactly those methods more and nothing else changed.
  - Each method is written with the signature that the class behind the attribute has for it, and raises
    AttributeError with a plain message where the attribute is C(None) or lacks the method.
  - What is written stands between marks, which carry a digest. Only text that is exactly as it was written is
    ever replaced or removed.
  - Line ends, indentation, byte order mark, encoding, a missing final newline, owner, mode and extended
    attributes stay as they are. A symbolic link stays a link; a file with hard links gets a copy of its own.
  - Bytecode cached for the file is removed when the file changes.
options:
  path:
    description:
      - The Python file that defines the class. A symbolic link is followed.
    type: path
    required: true
  class_name:
    description:
      - The class, defined once and at module level.
    type: str
    required: true
  delegate:
    description:
      - The attribute of an instance that the methods are handed on to.
    type: str
    required: true
  methods:
    description:
      - The methods to hand on, as the whole set for this O(delegate). One that was written by an earlier run
        and is no longer named is removed.
      - With O(state=absent) they only say what to report on; all that was written for O(delegate) is removed.
    type: list
    elements: str
    required: true
  source:
    description:
      - The class behind O(delegate), whose signatures are taken. Required with O(state=present).
    type: dict
    suboptions:
      path:
        description:
          - The Python file that defines it.
        type: path
        required: true
      class_name:
        description:
          - Its name. A method may come from a base of it in the same package.
        type: str
        required: true
  state:
    description:
      - Whether the methods are handed on, or nothing that this module wrote is in the class.
    type: str
    choices: [present, absent]
    default: present
  backup:
    description:
      - Keep a dated copy of the file beside it when it changes.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Can run in check mode and says what it would change, without changing anything.
  diff_mode:
    support: full
    description: Shows the lines that change.
notes:
  - The file is parsed with the grammar of the Python that runs the module. Run the task with the interpreter
    that will import the file, by C(ansible_python_interpreter).
author:
  - the sglang-kit contributors
"""

EXAMPLES = r"""
- name: Let Kimi-K2.5 hand the EAGLE-3 methods to its language model
  python_delegate:
    path: "{{ models }}/kimi_k25.py"
    class_name: KimiK25ForConditionalGeneration
    delegate: language_model
    methods:
      - set_eagle3_layers_to_capture
      - get_embed_and_head
      - set_embed_and_head
    source:
      path: "{{ models }}/deepseek_v2.py"
      class_name: DeepseekV3ForCausalLM
  vars:
    ansible_python_interpreter: "{{ sglang_engine_python }}"
    models: "{{ sglang_engine_tree }}/lib/python3.12/site-packages/sglang/srt/models"

- name: Take them out again
  python_delegate:
    path: /srv/app/wrapper.py
    class_name: Wrapper
    delegate: inner
    methods: [encode]
    state: absent
"""

RETURN = r"""
path:
  description: The file looked at, links resolved.
  returned: success
  type: str
methods:
  description: What was found or done for each method. With a conflict it is returned on failure too.
  returned: success
  type: dict
  sample:
    get_embed_and_head:
      outcome: added
      file: /opt/engine/kimi_k25.py
      class: KimiK25ForConditionalGeneration
      line: 785
      end_line: 790
      detail: as DeepseekV2ForCausalLM.get_embed_and_head, line 2944 of /opt/engine/deepseek_v2.py
  contains:
    outcome:
      description:
        - V(added) is written by this run, V(ours) by an earlier one, V(removed) taken out by this run.
        - V(upstream) is the class's own or a base's. V(absent) is not there, with O(state=absent).
        - V(conflict) is a thing of that name that does not use the delegate; the run fails.
      type: str
    file:
      description: The file that holds it.
      type: str
    class:
      description: The class that holds it. Not for V(removed) and V(absent).
      type: str
    line:
      description: Line of its C(def) as the run leaves the file; for V(removed) as it was. Not for V(absent).
      type: int
    end_line:
      description: Its last line.
      type: int
    detail:
      description: A phrase for a reader.
      type: str
delegate_lines:
  description: Lines at which the class, or a base, assigns the delegate.
  returned: success
  type: list
  elements: int
summary:
  description: One line for a reader.
  returned: success
  type: str
  sample: added 3 at lines 776, 785, 794
checksum:
  description: SHA-256 of the file as the run leaves it, or would leave it in check mode.
  returned: success
  type: str
pristine_checksum:
  description: SHA-256 of the file without anything that this module wrote.
  returned: success
  type: str
backup_file:
  description: The copy made.
  returned: changed and O(backup=true)
  type: str
"""

import contextlib
import errno
import fcntl
import gc
import hashlib
import os
import re
import stat
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit.delegate import plan_absent, plan_present
from ansible.module_utils.sglang_kit.delegate_source import Refusal

# A run edits one file and takes a fraction of this.
LOCK_SECONDS = 30
WORDS = {
    "added": "added",
    "removed": "removed",
    "ours": "delegated already:",
    "upstream": "upstream has",
    "absent": "not there:",
}


@contextlib.contextmanager
def locked(folder):
    """Let one run at a time edit files of a folder; raises Refusal if another holds it for LOCK_SECONDS."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _lock(descriptor):
            if time.monotonic() > deadline:
                raise Refusal(
                    f"Another process has held the lock on {folder} for {LOCK_SECONDS} s. Expected one run "
                    "at a time. Wait for it to end, or end it."
                )
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor):
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno == errno.EWOULDBLOCK:
            return False
        # A file system without such locks: the comparison before the rename still guards against lost edits.
    return True


def require_writable(path):
    """Raise Refusal unless files can be made and replaced in the folder of `path`."""
    folder = os.path.dirname(path)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Refusal(
            f"The folder {folder} cannot be written by this user, and {path} has to be replaced in it. "
            "Expected a writable folder. Run the task as the owner of the tree, or mount it writable."
        )


def remove_bytecode(*paths):
    """Remove what any interpreter has cached for source files, by whichever path it imported them."""
    for path in set(paths):
        stem = os.path.splitext(os.path.basename(path))[0]
        cache = os.path.join(os.path.dirname(path), "__pycache__")
        mine = re.compile(re.escape(stem) + r"\.[^.]+(\.opt-[^.]+)?\.pyc$")
        for name in os.listdir(cache) if os.path.isdir(cache) else ():
            if mine.match(name):
                os.unlink(os.path.join(cache, name))


def replace(module, plan, given_path, accessed):
    """Write the new bytes beside the file and rename them over it; `accessed` is its atime in ns."""
    path = plan.path
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.python_delegate")
    with contextlib.suppress(FileNotFoundError):
        # Left by a run that was killed; it cannot be in use, as this run holds the lock.
        os.unlink(temporary)
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            # atomic_move leaves the mode as it is where it may not give the file to its old owner.
            os.fchmod(out.fileno(), stat.S_IMODE(os.stat(path).st_mode))
            out.write(plan.after)
            out.flush()
            os.fsync(out.fileno())
        with open(path, "rb") as now:
            if now.read() != plan.before:
                raise Refusal(
                    f"{path} was changed by another process while it was read. Expected it to stay as it "
                    "was. See who edits it, and run the task again."
                )
        # Before the rename, so that a kill leaves no bytecode that is taken for the new file's; after it, for
        # what a process that imported the old file has written meanwhile.
        remove_bytecode(path, given_path)
        module.atomic_move(temporary, path)
        remove_bytecode(path, given_path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    with contextlib.suppress(PermissionError):
        # atomic_move sets both times to now.
        os.utime(path, ns=(accessed, os.stat(path).st_mtime_ns))


def make_plan(params):
    """Return the Plan for the module's parameters."""
    where = (params["path"], params["class_name"], params["delegate"], params["methods"])
    if params["state"] == "absent":
        return plan_absent(*where)
    if not params["source"]:
        # required_if takes an explicit null for a value.
        raise Refusal("source is empty. Expected the file and the class behind the delegate. Name them.")
    return plan_present(*where, params["source"]["path"], params["source"]["class_name"])


def summarise(plan):
    """Return one line on what was found and done."""
    parts = []
    for outcome, words in WORDS.items():
        lines = [str(found.get("line", "")) for found in plan.methods.values() if found["outcome"] == outcome]
        if not lines:
            continue
        count = (
            f"all {len(lines)}" if outcome == "upstream" and len(lines) == len(plan.methods) else len(lines)
        )
        at = f" at line{'s'[: len(lines) - 1]} {', '.join(lines)}" if outcome in ("added", "ours") else ""
        parts.append(f"{words} {count}{at}")
    return "; ".join(parts) + ("" if plan.before != plan.after else ", file untouched")


def run(module):
    """Plan, and unless in check mode write; return the result for exit_json."""
    params = module.params
    folder = os.path.dirname(os.path.realpath(params["path"]))
    with contextlib.ExitStack() as stack:
        if not module.check_mode and os.path.isdir(folder):
            stack.enter_context(locked(folder))
        # Before the first look, which is an access.
        accessed = os.stat(params["path"]).st_atime_ns if os.path.exists(params["path"]) else None
        plan = make_plan(params)
        changed = plan.before != plan.after
        result = {"changed": changed}
        if changed:
            require_writable(plan.path)
        if changed and not module.check_mode:
            if params["backup"]:
                result["backup_file"] = module.backup_local(plan.path)
            replace(module, plan, params["path"], accessed)
    result.update(
        path=plan.path,
        methods=plan.methods,
        delegate_lines=plan.delegate_lines,
        summary=summarise(plan),
        checksum=hashlib.sha256(plan.after).hexdigest(),
        pristine_checksum=hashlib.sha256(plan.pristine).hexdigest(),
    )
    if module._diff and changed:
        result["diff"] = {
            "before": plan.before.decode("utf-8", "backslashreplace"),
            "after": plan.after.decode("utf-8", "backslashreplace"),
            "before_header": plan.path,
            "after_header": plan.path,
        }
    return result


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "class_name": {"type": "str", "required": True},
            "delegate": {"type": "str", "required": True},
            "methods": {"type": "list", "elements": "str", "required": True},
            "source": {
                "type": "dict",
                "options": {
                    "path": {"type": "path", "required": True},
                    "class_name": {"type": "str", "required": True},
                },
            },
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "backup": {"type": "bool", "default": False},
        },
        required_if=[("state", "present", ["source"])],
        supports_check_mode=True,
    )
    # The process is short, and the collector would walk the syntax trees in vain: a quarter of its time.
    gc.disable()
    try:
        result = run(module)
    except Refusal as exc:
        module.fail_json(msg=str(exc), **({"methods": exc.methods} if hasattr(exc, "methods") else {}))
    except Exception as exc:
        # atomic_move raises a bare Exception; whatever it was, the rename is the last step that can fail.
        module.fail_json(
            msg=f"{module.params['path']} was not edited: {exc}. Expected to write a new file beside it and "
            "to rename it. See that the file system has room and allows it, and run the task again.",
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
