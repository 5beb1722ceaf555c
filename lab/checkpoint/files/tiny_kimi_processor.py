# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The smallest processor that an engine accepts for Kimi-K2.5; it travels with the model."""

import math

import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ProcessorMixin

MEDIA = {
    "patch_size": 14,
    "merge_kernel_size": 2,
    "in_patch_limit": 1024,
    "patch_limit_on_one_side": 64,
    "fixed_output_tokens": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


class TinyKimiImageProcessor(BaseImageProcessor):
    """Cut images into patches, within a limit of patches per image."""

    model_input_names = ("pixel_values", "grid_thws")

    def __init__(self, media_proc_cfg=None, **kwargs):
        super().__init__(**kwargs)
        self.media_proc_cfg = {**MEDIA, **(media_proc_cfg or {})}

    @property
    def _merged(self):
        return self.media_proc_cfg["patch_size"] * self.media_proc_cfg["merge_kernel_size"]

    def _fit(self, image):
        """Return (width, height) in pixels: within the limit, in whole merged patches."""
        patch = self.media_proc_cfg["patch_size"]
        width, height = image.size
        patches = max(1, width // patch) * max(1, height // patch)
        scale = min(1.0, math.sqrt(self.media_proc_cfg["in_patch_limit"] / patches))
        return tuple(
            math.ceil(max(1, int(side * scale)) / self._merged) * self._merged for side in (width, height)
        )

    def media_tokens_calculator(self, media):
        """Return the number of tokens that the image takes in the prompt."""
        width, height = self._fit(media["image"])
        return (width // self._merged) * (height // self._merged)

    def preprocess(self, medias, return_tensors="pt", **kwargs):
        """Return pixel_values [patches, 3, patch, patch] and grid_thws [images, 3]."""
        patch = self.media_proc_cfg["patch_size"]
        mean, std = np.array(self.media_proc_cfg["image_mean"]), np.array(self.media_proc_cfg["image_std"])
        pixels, grids = [], []
        for media in medias:
            width, height = self._fit(media["image"])
            image = np.asarray(media["image"].convert("RGB").resize((width, height)), dtype=np.float32)
            image = torch.from_numpy(((image / 255 - mean) / std).astype(np.float32))
            rows, columns = height // patch, width // patch
            image = image.reshape(rows, patch, columns, patch, 3).permute(0, 2, 4, 1, 3)
            pixels.append(image.reshape(-1, 3, patch, patch))
            grids.append([1, rows, columns])
        return BatchFeature({"pixel_values": torch.cat(pixels), "grid_thws": torch.tensor(grids)})


class TinyKimiProcessor(ProcessorMixin):
    """Tokenizer and image processor in one, as the engine asks for them."""

    attributes = ("image_processor", "tokenizer")
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        # The base class would check the parts' types against the library's own.
        self.image_processor = image_processor or TinyKimiImageProcessor()
        self.media_processor = self.image_processor
        self.tokenizer = tokenizer
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)

    @classmethod
    def from_pretrained(cls, path, *args, **kwargs):
        return cls(tokenizer=AutoTokenizer.from_pretrained(path))

    def __call__(self, text=None, medias=None, return_tensors="pt", **kwargs):
        inputs = {}
        if medias:
            inputs.update(self.media_processor.preprocess(medias))
        texts = [text] if isinstance(text, str) else text
        inputs["input_ids"] = self.tokenizer(texts, return_tensors="pt")["input_ids"]
        return BatchFeature(inputs)

    def apply_chat_template(self, *args, **kwargs):
        return self.tokenizer.apply_chat_template(*args, **kwargs)
