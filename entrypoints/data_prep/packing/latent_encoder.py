"""Encodes images and captions once, when packing, instead of in every epoch of training."""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sm_train.entrypoints.images.decoder_pool import Decoders
from sm_train.entrypoints.images.image_decoder import DecodeSpec, decode_with
from sm_train.entrypoints.job_interface.job_config import ColorPolicy
from sm_train.entrypoints.models.builder import load_autoencoder, load_text_encoders
from sm_train.entrypoints.shards.shard_format import MOMENTS, POOLED, SIZES, TEXT
from torch import Tensor

_MAX_BATCH, _BATCH_PIXELS = 8, 2**21
"""Largest batch on a GPU, in images and in pixels: larger ones are no faster."""


@dataclass(eq=False)
class _Request:
    """A sample that waits to be encoded: pixels (H, W, 3) and token ids (1, L) per tokenizer."""

    pixels: Tensor
    tokens: Sequence[Tensor]
    arrays: dict[str, bytes] | None = None
    error: BaseException | None = None


class LatentEncoder:
    """The autoencoder and text encoders of a diffusers folder, on the GPU if there is one.

    Images are center-cropped and scaled to ``resolution`` × ``resolution``, and their colors
    converted by a policy, as the data loader does. Everything is encoded in fp32. On a CPU samples
    are encoded one at a time. On a GPU those that threads have ready are encoded together; a batch
    always has ``batch_size`` rows, of which the last ones may be empty. So kernels are the same for
    every batch, and a sample's arrays do not depend on other samples.
    """

    def __init__(
        self, folder: Path, resolution: int, color: ColorPolicy, batch_size: int | None = None
    ) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        vae = load_autoencoder(folder / "vae")
        text = load_text_encoders(folder)
        assert text is not None
        self._vae = vae.eval().to(self._device)
        self._text = text
        for encoder in text.encoders:
            encoder.eval().to(self._device)
        self._decode_spec = DecodeSpec(resolution, resolution, color=color)
        if batch_size is None:
            on_gpu = self._device.type == "cuda"
            batch_size = max(1, min(_MAX_BATCH, _BATCH_PIXELS // resolution**2)) if on_gpu else 1
        self._batch_size = batch_size
        self._gpu_lock = threading.Lock()
        self._waiting: deque[_Request] = deque()

    def encode(
        self, image: bytes | memoryview, caption: str, decoders: Decoders
    ) -> dict[str, bytes]:
        """Return a sample's arrays as ``.npy`` by their extensions.

        data_loading/precomputed_latents.py reads them. Text encoders with a projection add their
        pooled projections.

        Raises:
            DecodeError: the image is corrupt.
        """
        shape = (self._decode_spec.height, self._decode_spec.width, 3)
        pixels = torch.empty(shape, dtype=torch.uint8)
        decode_with(decoders, self._decode_spec, image, pixels)
        request = _Request(pixels, self._text.tokenize([caption]))
        self._waiting.append(request)
        # While one thread encodes, the others queue their samples, which the next one encodes.
        with self._gpu_lock:
            while request.arrays is None and request.error is None:
                self._encode_waiting()
        if request.error is not None:
            raise request.error
        assert request.arrays is not None
        sizes = torch.tensor(self._decode_spec.sizes(image), dtype=torch.int32)
        return request.arrays | {SIZES: _to_npy(sizes)}

    def _encode_waiting(self) -> None:
        """Encode the next samples that wait; at most a batch."""
        count = min(len(self._waiting), self._batch_size)
        requests = [self._waiting.popleft() for _ in range(count)]
        try:
            encoded = self._encode_batch(requests)
        except Exception as error:
            for request in requests:
                request.error = error
            return
        for request, arrays in zip(requests, encoded, strict=True):
            request.arrays = arrays

    @torch.inference_mode()
    def _encode_batch(self, requests: Sequence[_Request]) -> list[dict[str, bytes]]:
        # Copies of the first sample fill the batch.
        rows = [*requests, *[requests[0]] * (self._batch_size - len(requests))]
        pixels = torch.stack([row.pixels for row in rows]).to(self._device)
        images = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1.0
        tokens = [
            torch.cat(ids).to(self._device)
            for ids in zip(*(row.tokens for row in rows), strict=True)
        ]
        moments = self._vae.encode(images).latent_dist.parameters.half()
        text = self._text.encode(tokens)
        encoded = []
        for row in range(len(requests)):
            arrays = {MOMENTS: _to_npy(moments[row]), TEXT: _to_npy(text.states[row].half())}
            if text.pooled is not None:
                arrays[POOLED] = _to_npy(text.pooled[row].half())
            encoded.append(arrays)
        return encoded


def _to_npy(tensor: Tensor) -> bytes:
    content = io.BytesIO()
    np.save(content, tensor.cpu().numpy(), allow_pickle=False)
    return content.getvalue()
