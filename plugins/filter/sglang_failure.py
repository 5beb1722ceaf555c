# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What a task that failed has to say for itself."""

from __future__ import annotations

SILENT = "failed without a word"


def failures(result):
    """Return the messages (list of str) of a failed task's result, as in ansible_failed_result.

    A loop says of itself only that an item failed; what failed is said by the items.
    """
    items = [item for item in result.get("results") or [] if item.get("failed") or item.get("unreachable")]
    said = [str(item.get("msg") or SILENT).strip() for item in items or [result]]
    return list(dict.fromkeys(said))


class FilterModule:
    def filters(self):
        return {"sglang_failures": failures}
