"""Turns a batch into the network's inputs and target on the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from sm_train.entrypoints.data_loading.batches import Batch
from sm_train.entrypoints.models.builder import ModelComponents
from sm_train.entrypoints.models.device_copy import copy_to_device
from sm_train.entrypoints.models.objectives import DiffusionTarget
from sm_train.entrypoints.models.pipeline import Text
from sm_train.entrypoints.planning.memory import images_at_once
from sm_train.entrypoints.sample_metadata.sample_rng import Purpose
from torch import Tensor


class ModelInputs:
    """Prepares batches on ``device``; drops a fraction ``caption_dropout`` of the captions.

    The autoencoder encodes in fp32 or bf16, whatever the caller's autocast is.
    """

    def __init__(
        self,
        components: ModelComponents,
        device: torch.device,
        caption_dropout: float,
        *,
        vae_fp32: bool = True,
    ) -> None:
        self._components, self._device = components, device
        self._caption_dropout = caption_dropout
        self._vae_fp32 = vae_fp32
        # One row of token ids (1, L) per tokenizer.
        self._empty_tokens = [ids.numpy() for ids in components.text_encoders.tokenize([""])]
        self._empty_text: Text | None = None

    @torch.no_grad()
    def prepare(self, batch: Batch) -> tuple[DiffusionTarget, Text]:
        """Return the network's noisy input with its target, and the captions.

        Call it under autocast.
        """
        # Compared on the CPU: a decision on the device would block until its value is copied.
        dropped = batch.dropout_uniform < self._caption_dropout
        noise = copy_to_device(batch.noise, self._device)
        if batch.moments is not None:
            images = self._sample_latents(batch.moments, noise)
            text = self._precomputed_text(batch, dropped)
        else:
            images = self._images(batch.pixels, noise)
            text = self._captions(batch.tokens, dropped)
        if self._components.is_conditioned_on_sizes:
            sizes = copy_to_device(batch.sizes, self._device).float()
            text = text._replace(sizes=sizes)
        return self._components.objective.make_target(
            images, noise[Purpose.NOISE], batch.timestep_uniform
        ), text

    def no_text(self) -> Text:
        """Return a single empty caption."""
        with torch.no_grad():
            return self._captions(self._empty_tokens, np.array([False]))

    def _images(self, pixels: Tensor, noise: Tensor) -> Tensor:
        """Return ``pixels`` (B, H, W, 3) as (B, 3, H, W) in -1 … 1, or their latents."""
        on_device = copy_to_device(pixels, self._device).permute(0, 3, 1, 2)
        images = torch.sub(on_device, 127.5).div_(127.5)
        vae = self._components.vae
        if vae is None:
            return images
        # In slices: a whole batch's activations in the autoencoder may not fit in memory.
        slices = torch.split(images, images_at_once(images.shape[2] * images.shape[3]))
        with torch.autocast(self._device.type, torch.bfloat16, enabled=not self._vae_fp32):
            moments = [vae.encode(some).latent_dist.parameters for some in slices]
        return self._sample_latents(torch.cat(moments), noise)

    def _sample_latents(self, moments: Tensor, noise: Tensor) -> Tensor:
        """Sample latents (B, C, h, w) from ``moments`` (B, 2C, h, w), scaled for the network."""
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        on_device = copy_to_device(moments, self._device).float()
        distribution = DiagonalGaussianDistribution(on_device)
        latents: Tensor = distribution.mean + distribution.std * noise[Purpose.LATENT]
        config = self._components.vae.config
        return (latents - (config.shift_factor or 0.0)) * float(config.scaling_factor)

    def _captions(self, tokens: Sequence[NDArray[np.int64]], dropped: NDArray[np.bool_]) -> Text:
        """Return ``tokens``, encoded unless the text encoder is trained with the network."""
        if dropped.any():
            tokens = [
                np.where(dropped[:, None], empty, ids)
                for empty, ids in zip(self._empty_tokens, tokens, strict=True)
            ]
        on_device = [copy_to_device(torch.from_numpy(ids), self._device) for ids in tokens]
        if self._components.train_text_encoder:
            return Text(on_device[0])
        return self._components.text_encoders.encode(on_device)

    def _precomputed_text(self, batch: Batch, dropped: NDArray[np.bool_]) -> Text:
        """Return precomputed hidden states, those of the empty caption where it is dropped."""
        if self._empty_text is None:
            empty_text = self.no_text()
            pooled = empty_text.pooled
            self._empty_text = Text(
                empty_text.states.float(), None if pooled is None else pooled.float()
            )
        mask = copy_to_device(torch.from_numpy(dropped), self._device)
        empty = self._empty_text
        assert batch.text is not None
        states = self._replace_dropped(mask[:, None, None], empty.states, batch.text)
        if batch.pooled is None or empty.pooled is None:
            return Text(states)
        return Text(states, self._replace_dropped(mask[:, None], empty.pooled, batch.pooled))

    def _replace_dropped(self, mask: Tensor, empty: Tensor, stored: Tensor) -> Tensor:
        return torch.where(mask, empty, copy_to_device(stored, self._device).float())
