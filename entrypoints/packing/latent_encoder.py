"""Encodes images and captions once, when packing, instead of in every epoch of training."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import numpy as np
import torch
from sm_train.entrypoints.data.decoder_pool import Decoders
from sm_train.entrypoints.data.image_decoder import DecodeSpec, decode_with
from sm_train.entrypoints.data.shard_format import MOMENTS, POOLED, SIZES, TEXT
from sm_train.entrypoints.models.builder import load_autoencoder, load_text_encoders
from torch import Tensor


class LatentEncoder:
    """The autoencoder and text encoders of a diffusers folder, on the GPU if there is one.

    Images are center-cropped and scaled to ``resolution`` × ``resolution``, as the data loader
    does. They are encoded one at a time, so a sample's arrays do not depend on other samples.
    """

    def __init__(self, folder: Path, resolution: int) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        vae = load_autoencoder(folder / "vae")
        text = load_text_encoders(folder)
        assert text is not None
        self._vae = vae.eval().to(self._device)
        self._text = text
        for encoder in text.encoders:
            encoder.eval().to(self._device)
        self._decode_spec = DecodeSpec(resolution, resolution)
        self._gpu_lock = threading.Lock()

    def encode(
        self, image: bytes | memoryview, caption: str, decoders: Decoders
    ) -> dict[str, bytes]:
        """Return a sample's arrays as ``.npy`` by their extensions (data/precomputed_latents.py).

        Text encoders with a projection add their pooled projections.

        Raises:
            DecodeError: the image is corrupt.
        """
        shape = (self._decode_spec.height, self._decode_spec.width, 3)
        pixels = torch.empty(shape, dtype=torch.uint8)
        decode_with(decoders, self._decode_spec, image, pixels)
        tokens = self._text.tokenize([caption])
        with self._gpu_lock, torch.inference_mode():
            images = pixels.to(self._device).permute(2, 0, 1)[None].float() / 127.5 - 1.0
            moments = self._vae.encode(images).latent_dist.parameters[0]
            text = self._text.encode([ids.to(self._device) for ids in tokens])
        arrays = {
            MOMENTS: _to_npy(moments.half()),
            TEXT: _to_npy(text.states[0].half()),
            SIZES: _to_npy(torch.tensor(self._decode_spec.sizes(image), dtype=torch.int32)),
        }
        if text.pooled is not None:
            arrays[POOLED] = _to_npy(text.pooled[0].half())
        return arrays


def _to_npy(tensor: Tensor) -> bytes:
    content = io.BytesIO()
    np.save(content, tensor.cpu().numpy(), allow_pickle=False)
    return content.getvalue()
