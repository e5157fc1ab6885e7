"""From a batch to what the network is trained on: on the device, without waiting for it."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from typing import Any

import torch
from sm_train.entrypoints.batches import Batch
from sm_train.entrypoints.diffusion import encode
from sm_train.entrypoints.models import Parts, longest_caption
from torch import Tensor


class Inputs:
    """Prepares batches for ``parts`` on ``device``; a share ``dropout`` of captions is left out.

    ``generator`` draws the latents from the autoencoder's moments, on its device.
    """

    def __init__(
        self, parts: Parts, device: torch.device, generator: torch.Generator, dropout: float
    ) -> None:
        self._parts, self._device, self._generator = parts, device, generator
        self._dropout = dropout
        self._no_caption: Tensor | None = None

    def prepare(
        self, batch: Batch, key: str, autocast: AbstractContextManager[Any]
    ) -> tuple[Tensor, Tensor]:
        """Pixels or latents in about -1 to 1, and token ids or hidden states.

        ``key`` decides which captions are left out.
        """
        # Drawn on the host: a draw on the device would have to be waited for.
        rng = random.Random(key)
        dropped = [rng.random() < self._dropout for _ in batch.captions]
        with torch.no_grad(), autocast:
            if batch.moments is not None and batch.text is not None:
                return self._latents(batch.moments), self._states(batch.text, dropped)
            captions = self._captions(batch.captions, dropped)
            return self._images(batch.pixels), captions

    def _images(self, pixels: Tensor) -> Tensor:
        on_device = pixels.to(self._device, non_blocking=True).permute(0, 3, 1, 2)
        images = on_device.float() / 127.5 - 1.0
        if self._parts.vae is None:
            return images
        vae: Any = self._parts.vae
        return self._scaled(vae.encode(images).latent_dist.sample(self._generator))

    def _latents(self, moments: Tensor) -> Tensor:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        on_device = moments.to(self._device, non_blocking=True).float()
        return self._scaled(DiagonalGaussianDistribution(on_device).sample(self._generator))

    def _scaled(self, latents: Tensor) -> Tensor:
        vae: Any = self._parts.vae
        return latents.float() * float(vae.config.scaling_factor)

    def _captions(self, captions: list[str], dropped: list[bool]) -> Tensor:
        texts = ["" if drop else text for drop, text in zip(dropped, captions, strict=True)]
        tokens = self._tokens(texts)
        if self._parts.train_text_encoder:
            return tokens
        return encode(self._parts.text_encoder, tokens)

    def _states(self, states: Tensor, dropped: list[bool]) -> Tensor:
        """Precomputed hidden states, those of no caption where it is left out."""
        if self._no_caption is None:
            self._no_caption = encode(self._parts.text_encoder, self._tokens([""])).float()
        mask = torch.tensor(dropped).to(self._device, non_blocking=True)[:, None, None]
        return torch.where(
            mask, self._no_caption, states.to(self._device, non_blocking=True).float()
        )

    def _tokens(self, texts: list[str]) -> Tensor:
        ids: Tensor = self._parts.tokenizer(
            texts,
            padding="max_length",
            truncation=True,
            max_length=longest_caption(self._parts.text_encoder, self._parts.tokenizer),
            return_tensors="pt",
        ).input_ids
        return ids.to(self._device, non_blocking=True)
