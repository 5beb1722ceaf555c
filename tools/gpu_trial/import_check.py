# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Import what every start imports, and hold one compiled kernel of the bundle against torch."""

import importlib

import sgl_kernel
import sglang
import torch
import transformers
import triton

for name in (
    "entrypoints.http_server",
    "managers.scheduler",
    "models.kimi_k25",
    "models.llama_eagle3",
    "speculative.eagle_worker_v2",
):
    importlib.import_module("sglang.srt." + name)

values = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
weight = torch.ones(256, device="cuda", dtype=torch.bfloat16)
mine = sgl_kernel.rmsnorm(values, weight, 1e-5).float()
wanted = torch.nn.functional.rms_norm(values.float(), (256,), eps=1e-5)
error = ((mine - wanted).norm() / wanted.norm()).item()
assert error < 1e-2, error
print(
    f"SGLang {sglang.__version__}, kernels {sgl_kernel.__version__}, torch {torch.__version__}, "
    f"triton {triton.__version__}, transformers {transformers.__version__}, rmsnorm error {error:.1e}"
)
