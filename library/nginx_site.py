#!/usr/bin/python
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: nginx_site
short_description: Lay down one site of nginx, test it with all the others, and reload
description:
  - Writes a drop-in and the files that it includes, asks C(nginx -t), and reloads nginx without a restart,
    so that requests in flight go on. Touches no other site.
  - Where nginx refuses, everything is put back as it was, and what nginx said is the error.
  - A run that was interrupted before its reload is finished by the next one.
author: sglang-kit contributors
options:
  name:
    description: Name of the site. Below O(folder) its drop-in is C(conf.d/NAME.conf), its own folder C(NAME).
    type: str
    required: true
  config:
    description: Content of the drop-in, which everybody may read.
    type: str
    required: true
  files:
    description:
      - Content of each file of the site's own folder, by name. Only root may read them; no diff shows them.
      - A file of the folder that is not named here is left alone.
    type: dict
    default: {}
  substitute:
    description: Texts in O(files), each with the file on the node whose stripped content takes its place.
    type: dict
    default: {}
  folder:
    description: The configuration of nginx.
    type: path
    default: /etc/nginx
attributes:
  check_mode:
    description: Says what it would write; nginx is then not asked.
    support: full
  diff_mode:
    description: Shows the drop-in. Of the files only the names of those that differ.
    support: full
"""

EXAMPLES = r"""
- name: Publish the server
  nginx_site:
    name: sglang
    config: "{{ lookup('ansible.builtin.template', 'edge.conf.j2') }}"
    files:
      engine.conf: 'proxy_set_header Authorization "Bearer ENGINE_KEY";'
    substitute:
      ENGINE_KEY: /etc/sglang/credentials/engine-key
"""

RETURN = r"""
written:
  description: Files that were written, or would be.
  returned: success
  type: list
"""

import os
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

UNIT = "nginx.service"


def content_of(path):
    """Return the text of a file, or None if there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def fill_in(files, substitute):
    """Return the files with each placeholder replaced by the content of its file; and what is missing."""
    missing = []
    for placeholder, path in substitute.items():
        value = content_of(path)
        if value is None:
            missing.append(path)
        else:
            files = {name: text.replace(placeholder, value.strip()) for name, text in files.items()}
    return files, missing


def replace(path, text, mode):
    """Write a file at once, or remove it where text is None."""
    if text is None:
        Path(path).unlink(missing_ok=True)
        return
    descriptor, part = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".")
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        os.fchmod(descriptor, mode)
        stream.write(text)
    os.replace(part, path)


def is_private(path):
    """True if the file is root's (or ours, in a test) and nobody else can read it."""
    found = os.stat(path)
    return found.st_uid == os.geteuid() and found.st_mode & 0o777 == 0o600


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "config": {"type": "str", "required": True},
            "files": {"type": "dict", "default": {}, "no_log": True},
            "substitute": {"type": "dict", "default": {}},
            "folder": {"type": "path", "default": "/etc/nginx"},
        },
        supports_check_mode=True,
    )
    params = module.params
    own = os.path.join(params["folder"], params["name"])
    drop_in = os.path.join(params["folder"], "conf.d", params["name"] + ".conf")
    # There from the first write to the reload: nginx does not run what lies on the disk.
    pending = os.path.join(own, ".pending")
    files, missing = fill_in(params["files"], params["substitute"])
    if missing and not module.check_mode:
        module.fail_json(msg="not there, but expected: {}. Nothing was changed.".format(", ".join(missing)))
    wanted = {os.path.join(own, name): (text, 0o600) for name, text in sorted(files.items())}
    wanted[drop_in] = (params["config"], 0o644)
    before = {path: content_of(path) for path in wanted}
    written = [
        path
        for path, (text, mode) in wanted.items()
        if before[path] != text or (mode == 0o600 and not is_private(path))
    ]
    result = {"changed": bool(written) or os.path.exists(pending), "written": written}
    if written:
        secret = [path for path in written if path != drop_in]
        result["diff"] = [
            {
                "before_header": drop_in,
                "after_header": drop_in,
                "before": before[drop_in] or "",
                "after": params["config"],
            },
            *({"prepared": f"{path}: differs, not shown\n"} for path in secret),
        ]
    if not result["changed"] or module.check_mode:
        module.exit_json(**result)

    os.makedirs(own, mode=0o700, exist_ok=True)
    os.chmod(own, 0o700)
    replace(pending, "", 0o600)
    for path in written:
        replace(path, *wanted[path])
    rc, _out, said = module.run_command(
        [module.get_bin_path("nginx", required=True), "-t", "-c", params["folder"] + "/nginx.conf"]
    )
    if rc != 0:
        for path in written:
            replace(path, before[path], wanted[path][1])
        Path(pending).unlink()
        module.fail_json(
            msg="nginx refuses the configuration; it was put back as it was, and nginx runs on.\n"
            + said.strip()
        )
    systemctl = module.get_bin_path("systemctl", required=True)
    rc, _out, said = module.run_command([systemctl, "reload-or-restart", UNIT])
    if rc != 0:
        module.fail_json(
            msg=f"nginx did not take the new configuration: {said.strip()}. See: journalctl -u {UNIT}"
        )
    Path(pending).unlink()
    module.exit_json(**result)


if __name__ == "__main__":
    main()
