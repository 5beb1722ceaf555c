# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What safetensors files say of themselves, read without their tensors and held against their index."""

from __future__ import annotations

import json
import os
import struct

INDEX = "model.safetensors.index.json"
# The format's own bound.
LONGEST_HEADER = 100_000_000
BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}


class Unreadable(Exception):
    """Says what is wrong with a file."""


def header(path):
    """Return ({tensor: {dtype, shape, data_offsets}}, bytes that follow the header); raise Unreadable."""
    with open(path, "rb") as content:
        size = os.fstat(content.fileno()).st_size
        length = content.read(8)
        if len(length) < 8:
            raise Unreadable(f"{size} bytes, too short for a header")
        (length,) = struct.unpack("<Q", length)
        if length > min(LONGEST_HEADER, size - 8):
            raise Unreadable(f"the header would be {length} bytes long, in a file of {size}")
        try:
            tensors = json.loads(content.read(length))
        except ValueError as error:
            raise Unreadable(f"the header is no JSON: {error}") from error
    if not isinstance(tensors, dict):
        raise Unreadable("the header is no JSON object")
    tensors.pop("__metadata__", None)
    return tensors, size - 8 - length


def gaps(tensors, size):
    """Return a sentence for each place where the tensors do not fill `size` bytes, each byte once."""
    found, end, before = [], 0, "the start"
    try:
        ordered = sorted((*entry["data_offsets"], name, entry) for name, entry in tensors.items())
        for start, stop, name, entry in ordered:
            if start != end:
                what = "overlaps" if start < end else f"is {start - end} bytes behind"
                found.append(f"{name} {what} {before}")
            bits = BITS.get(entry["dtype"])
            for length in entry["shape"]:
                bits = bits and bits * length
            if bits is not None and (bits + 7) // 8 != stop - start:
                found.append(f"{name} takes {stop - start} bytes, and its shape and type {(bits + 7) // 8}")
            end, before = stop, name
    except (KeyError, TypeError, ValueError) as error:
        return [f"an entry of the header is malformed: {error!r}"]
    if end != size:
        found.append(f"the tensors end at byte {end} of {size}")
    return found


def problems(folder):
    """Return (a sentence for each problem, {tensors, files, bytes}) of the folder's weights.

    Files that the index does not name are not read, as engines leave them out.
    """
    there = {name for name in os.listdir(folder) if name.endswith(".safetensors")}
    if not there:
        return [f"{folder} has no safetensors file, expected the weights there"], None
    found, index = [], None
    if os.path.exists(os.path.join(folder, INDEX)):
        try:
            index = _index(os.path.join(folder, INDEX))
            there &= set(index.values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            found.append(f"{INDEX} cannot be used: {error!r}")
    elif len(there) > 1:
        found.append(f"{len(there)} weight files, and no {INDEX} that says which is where")
    place, total = {}, 0
    for name in sorted(there):
        try:
            tensors, size = header(os.path.join(folder, name))
        except Unreadable as error:
            found.append(f"{name}: {error}")
            continue
        total += size
        found += [f"{name}: {text}" for text in gaps(tensors, size)]
        found += [f"{tensor} is in {place[tensor]} and in {name}" for tensor in tensors if tensor in place]
        place.update(dict.fromkeys(tensors, name))
    wrong = [(tensor, name) for tensor, name in (index or {}).items() if place.get(tensor) != name]
    if wrong:
        tensor, name = wrong[0]
        found.append(
            f"{len(wrong)} of {len(index)} tensors of {INDEX} are not where it says, first {tensor}: it says "
            f"{name}, found in {place.get(tensor, 'no file')}"
        )
    return found, {"tensors": len(place), "files": len(there), "bytes": total}


def _index(path):
    """Return {tensor: file}; raises an error of one of several kinds if it is malformed."""
    with open(path, encoding="utf-8") as content:
        index = json.load(content)["weight_map"]
    return {str(tensor): str(name) for tensor, name in index.items()}
