#!/usr/bin/python
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: how long reading a model will take."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: weights_read
short_description: Tell how long reading a model will take, and bring it into memory beforehand
description:
  - Tells how much of a model's weights is in the page cache, and how fast the rest comes from the disk, by a
    short read of real files past the cache.
  - If asked, reads the weights into the page cache, so that the load that follows comes from memory.
options:
  path:
    description: Folder of the model, or a link to it. If it is not there, there is nothing to read.
    type: path
    required: true
  measure_mib:
    description: MiB that are read to measure, at most.
    type: int
    default: 512
  measure_seconds:
    description: Seconds that measuring may take.
    type: float
    default: 5
  warm:
    description: Read all of the weights into the page cache, if the memory is there.
    type: bool
    default: false
  reserve_gib:
    description:
      - GiB of memory that must be available beside the whole model for O(warm), before and all the while.
        Whoever serves meanwhile may need some.
    type: float
    default: 64
attributes:
  check_mode:
    support: full
    description: Measures as well, and warms nothing.
  diff_mode:
    support: none
    description: Changes nothing that lasts.
author:
  - the sglang-kit contributors
"""

EXAMPLES = r"""
- name: Measure how fast the weights come
  weights_read:
    path: /opt/sglang/releases/0.5.23-0123456789ab/model
  register: reading
"""

RETURN = r"""
files:
  description: Number of weight files.
  type: int
  returned: success
bytes:
  description: Their size together.
  type: int
  returned: success
cached_bytes:
  description: Bytes of them in the page cache, after O(warm).
  type: int
  returned: success
rate:
  description: Bytes a second from the disk; null where too little is to be read, or it cannot be measured.
  type: float
  returned: success
seconds:
  description: Seconds that reading what is not in the page cache takes at that rate, null like it.
  type: float
  returned: success
available_bytes:
  description: Memory that can be had without swapping, in bytes.
  type: int
  returned: success
warmed:
  description:
    - What became of O(warm). V(all) of the weights are in memory; V(stopped), as memory grew short;
      V(refused), as there was too little; V(no), as it was not asked, or there was nothing to do.
  type: str
  returned: success
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_kit import weights_read

# Less than this to read is not worth a word: it is there in a moment.
MUCH = 1 << 30


def run(params, check_mode):
    files = weights_read.files_of(params["path"])
    size = sum(entry[1] for entry in files)

    def cached():
        return sum(weights_read.cached_bytes(*entry) for entry in files)

    def room():
        # Page cache counts as available, so the model's own share of it does, too.
        return weights_read.available() >= size + params["reserve_gib"] * (1 << 30)

    there, warmed, rate = cached(), "no", None
    if size - there >= MUCH:
        rate = weights_read.direct_rate(files, params["measure_mib"] << 20, params["measure_seconds"])
    if params["warm"] and there < size and not check_mode:
        # Whoever serves comes first.
        os.nice(19)
        came, whole = weights_read.warm(files, room)
        warmed = "all" if whole else "stopped" if came else "refused"
        there = cached()
    return {
        "changed": False,
        "files": len(files),
        "bytes": size,
        "cached_bytes": there,
        "rate": rate,
        "seconds": round((size - there) / rate, 1) if rate else None,
        "available_bytes": weights_read.available(),
        "warmed": warmed,
    }


def main():
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "measure_mib": {"type": "int", "default": 512},
            "measure_seconds": {"type": "float", "default": 5},
            "warm": {"type": "bool", "default": False},
            "reserve_gib": {"type": "float", "default": 64},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**run(module.params, module.check_mode))
    except OSError as error:
        module.fail_json(
            msg=f"the weights in {module.params['path']} cannot be read: {error}. The load would fail, too: "
            "check the disk (dmesg), and the model with model_store_verify=full."
        )


if __name__ == "__main__":
    main()
