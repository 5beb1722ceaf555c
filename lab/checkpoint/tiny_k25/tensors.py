# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Tensors without a deep-learning library: bfloat16 by rounding, safetensors files."""

import numpy as np
import safetensors


class Source:
    """Draws weights of standard deviation 1/sqrt(fan-in), reproducibly.

    numpy promises that the stream of RandomState never changes; its newer generators may.
    """

    def __init__(self, seed):
        self.random = np.random.RandomState(seed)

    def normal(self, *shape, std=None):
        if std is None:
            std = shape[-1] ** -0.5
        return bfloat16((self.random.standard_normal(shape) * std).astype(np.float32))


def bfloat16(values):
    """Round float32 values to the nearest bfloat16 (ties to even), still held as float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def stored(tensor):
    """Return (dtype name, array) as it is stored: float32 as bfloat16, float64 as float32."""
    if tensor.dtype == np.float32:
        return "bfloat16", (bfloat16(tensor).view(np.uint32) >> 16).astype("<u2")
    if tensor.dtype == np.float64:
        return "float32", tensor.astype("<f4")
    return tensor.dtype.name, np.ascontiguousarray(tensor)


def save(tensors, path):
    """Write {name: array} as one safetensors file; return the bytes of its tensors."""
    arrays = {name: stored(tensor) for name, tensor in tensors.items()}
    # numpy has no bfloat16, so the library gets plain memory; `arrays` keeps it alive.
    specs = {
        name: safetensors.TensorSpec(
            dtype=dtype, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, (dtype, array) in arrays.items()
    }
    # serialize_file would leave the file readable by its owner alone.
    path.write_bytes(safetensors.serialize(specs, {"format": "pt"}))
    return sum(array.nbytes for _, array in arrays.values())
