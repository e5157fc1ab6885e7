"""Computes at packing what training would compute at every epoch: latents and text states."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sm_train.entrypoints.data.image_decoder import DecodeSpec
from sm_train.entrypoints.models.builder import load_text_encoders
from torch import Tensor


class LatentEncoder:
    """The autoencoder and the text encoder of a folder in diffusers' layout, on the GPU if any.

    Images are cut from their middle and scaled to ``resolution`` squared, as the loader does, and
    encoded one by one: so a sample's arrays do not depend on its neighbours.
    """

    def __init__(self, folder: Path, resolution: int) -> None:
        from diffusers import AutoencoderKL

        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        vae: Any = AutoencoderKL.from_pretrained(folder / "vae", local_files_only=True)
        text = load_text_encoders(folder)
        assert text is not None
        self._vae = vae.float().eval().to(self._device)
        self._text = text
        for encoder in text.encoders:
            encoder.eval().to(self._device)
        self._target = DecodeSpec(resolution, resolution)
        self._lock = threading.Lock()

    def arrays(self, image: bytes | memoryview, caption: str) -> tuple[bytes, ...]:
        """The moments (2 × channels, h, w) and the text states (tokens, width), as ``.npy``.

        Where text encoders project, the projections (width,) too.

        Raises:
            DecodeError: the image is damaged.
        """
        pixels = torch.empty((self._target.height, self._target.width, 3), dtype=torch.uint8)
        self._target.decode(image, pixels)
        tokens = self._text.tokenize([caption])
        with self._lock, torch.inference_mode():
            images = pixels.to(self._device).permute(2, 0, 1)[None].float() / 127.5 - 1.0
            moments = self._vae.encode(images).latent_dist.parameters[0]
            text = self._text.encode([ids.to(self._device) for ids in tokens])
        arrays = _npy(moments), _npy(text.states[0])
        return arrays if text.pooled is None else (*arrays, _npy(text.pooled[0]))


def _npy(tensor: Tensor) -> bytes:
    content = io.BytesIO()
    np.save(content, tensor.to(torch.float16).cpu().numpy(), allow_pickle=False)
    return content.getvalue()
