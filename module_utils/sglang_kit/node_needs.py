# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What a release of SGLang asks of the driver."""

from __future__ import annotations

from ansible.module_utils.sglang_kit.releases_facts import DRIVERS, version_key

# The CUDA generation of the kernels, by the first release that has it.
_CUDA = (("0.5.7", 12), ("0.5.11", 13))


def needs_of(release):
    """Return ``{"cuda": int, "driver": int}`` of a release: generation and oldest driver branch.

    Raises VersionError for what is no release.
    """
    key = version_key(release)
    cuda = [generation for since, generation in _CUDA if version_key(since) <= key][-1:] or [_CUDA[0][1]]
    return {"cuda": cuda[0], "driver": DRIVERS[cuda[0]]}
