# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""How fast a model can be read, how much of it is in memory already, and bringing in the rest."""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import mmap
import os
import threading
import time

PAGE = mmap.PAGESIZE
BLOCK = 1 << 22
READERS = 8
# What comes in less than this says nothing of a disk, in bytes.
LEAST = 64 << 20
# Bytes of a file between two looks at the memory.
ASK_EVERY = 64 * BLOCK

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_MAP_FAILED = ctypes.c_void_p(-1).value


def files_of(folder):
    """Return [(path, bytes)] of the weight files in a folder, the largest first; none if it is not there."""
    try:
        with os.scandir(folder) as entries:
            found = [(e.path, e.stat().st_size) for e in entries if e.name.endswith(".safetensors")]
    except OSError:
        return []
    return sorted(found, key=lambda entry: (-entry[1], entry[0]))


def cached_bytes(path, size):
    """Return how many bytes of a file are in the page cache; raises OSError."""
    if not size:
        return 0
    handle = os.open(path, os.O_RDONLY)
    try:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
    finally:
        os.close(handle)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap", path)
    try:
        pages = ctypes.create_string_buffer(-(-size // PAGE))
        if _libc.mincore(address, size, pages):
            raise OSError(ctypes.get_errno(), "mincore", path)
    finally:
        _libc.munmap(address, size)
    # Only the lowest bit of each byte is defined.
    resident = sum(pages.raw.count(value) for value in range(1, 256, 2))
    return min(size, resident * PAGE)


def direct_rate(files, budget, seconds):
    """Return the bytes a second that come from the disk past the page cache, by READERS at once.

    files: what files_of returned; reads at most `budget` bytes and for about so many seconds. None where the
    file system knows no direct reads, or too little is there to tell.
    """
    files = files[:READERS]
    # In each of the largest files, or in several sections of few of them.
    sections = -(-READERS // max(1, len(files)))
    places = [
        (path, part * (size // sections) // BLOCK * BLOCK, min(budget // READERS, size // sections))
        for part in range(sections)
        for path, size in files
    ][:READERS]
    since = time.monotonic()

    def read(place):
        path, offset, length = place
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
        came = 0
        try:
            # Anonymous memory begins at a page, which direct reads ask for.
            with mmap.mmap(-1, BLOCK) as block:
                while came + BLOCK <= length and time.monotonic() - since < seconds:
                    came += os.preadv(handle, [block], offset + came)
        finally:
            os.close(handle)
        return came

    try:
        with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
            total = sum(pool.map(read, places))
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise
    return total / max(time.monotonic() - since, 1e-6) if total >= LEAST else None


def available(meminfo="/proc/meminfo"):
    """Return the bytes of memory that can be had without swapping; page cache counts as such."""
    with open(meminfo, encoding="ascii") as content:
        for line in content:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


def warm(files, room):
    """Read files into the page cache; return the bytes read, and whether all were.

    room: function that says whether there is memory for it still; asked again and again, since the server
    beside it must never have to do without.
    """
    stop = threading.Event()

    def read(entry):
        came = 0
        with open(entry[0], "rb", buffering=0) as content:
            block = memoryview(bytearray(BLOCK))
            while not stop.is_set():
                size = content.readinto(block)
                if not size:
                    break
                came += size
                if came % ASK_EVERY == 0 and not room():
                    stop.set()
        return came

    if not room():
        return 0, False
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        total = sum(pool.map(read, files))
    return total, not stop.is_set()
