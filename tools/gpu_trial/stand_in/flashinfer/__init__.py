# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Stand-in for FlashInfer: the names that SGLang imports without asking whether FlashInfer is there.

Any other name is an ImportError, as where FlashInfer is missing, so that what asks goes its other way.
"""

import sys
import types

NAMES = {
    "flashinfer": (
        "bmm_fp8",
        "scaled_fp4_grouped_quantize",
        "silu_and_mul_scaled_nvfp4_experts_quantize",
    ),
    "flashinfer.sampling": (
        "min_p_sampling_from_probs",
        "top_k_renorm_prob",
        "top_k_top_p_sampling_from_probs",
        "top_p_renorm_prob",
    ),
    "flashinfer.prefill": ("cudnn_batch_prefill_with_kv_cache",),
    "flashinfer.cute_dsl": (),
    "flashinfer.cute_dsl.blockscaled_gemm": ("grouped_gemm_nt_masked",),
}


def absent(name):
    """Return a function that says that it is not here."""

    def call(*args, **kwargs):
        raise NotImplementedError(f"{name} is not in this bundle; choose a backend that does without")

    return call


for _module, _names in NAMES.items():
    _target = sys.modules.setdefault(_module, types.ModuleType(_module))
    _target.__path__ = []
    for _name in _names:
        setattr(_target, _name, absent(f"{_module}.{_name}"))
