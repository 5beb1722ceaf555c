# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The part of a file that has come so far, in a form that a later process can trust.

Beside the bytes lies a list of the checksums of their blocks. Whoever goes on reads the blocks again
and cuts off at the first that is not as it was written: after a kill, or a loss of power.
"""

from __future__ import annotations

import os
import zlib

from .snapshot_store import make_folders

# A killed process loses at most so many bytes of each file that it was at.
BLOCK = 1 << 24


class Part:
    """An open part; `size` is the number of its bytes, `dropped` of those that a resume cut off."""

    def __init__(self, path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.path = path
        self._blocks = path + ".blocks"
        self._file = open(path, "ab+", buffering=0)  # noqa: SIM115
        self._list = open(self._blocks, "a+", encoding="ascii")  # noqa: SIM115
        found = os.fstat(self._file.fileno()).st_size
        self.size = self._good()
        self.dropped = found - self.size
        self._file.truncate(self.size)
        self._list.truncate(self.size // BLOCK * 9)
        # Checksum of the block that is not full yet.
        self._checksum = 0

    def _good(self):
        """Return the bytes at the start whose blocks are as the list says."""
        self._list.seek(0)
        self._file.seek(0)
        good = 0
        for line in self._list:
            block = self._file.read(BLOCK)
            if len(block) != BLOCK or line != _line(zlib.crc32(block)):
                break
            good += BLOCK
        return good

    def append(self, data):
        """Add bytes; raises OSError if the disk does not take them."""
        data = memoryview(data)
        while data:
            piece = data[: BLOCK - self.size % BLOCK]
            written = self._file.write(piece)
            self._checksum = zlib.crc32(piece[:written], self._checksum)
            self.size += written
            data = data[written:]
            if self.size % BLOCK == 0:
                self._list.write(_line(self._checksum))
                self._list.flush()
                self._checksum = 0

    def truncate(self):
        """Start anew."""
        self._file.truncate(0)
        self._list.truncate(0)
        self.size = self._checksum = 0

    def close(self):
        self._file.close()
        self._list.close()

    def finish(self, target):
        """Give the bytes, now whole, the name `target`."""
        self.close()
        make_folders(os.path.dirname(target))
        os.rename(self.path, target)
        os.unlink(self._blocks)


def _line(checksum):
    return f"{checksum:08x}\n"
