"""From a batch to what the network is trained on: on the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from sm_train.entrypoints.common.sample_rng import LATENT, NOISE
from sm_train.entrypoints.data.batches import Batch
from sm_train.entrypoints.models.builder import ModelComponents
from sm_train.entrypoints.models.objectives import DiffusionTarget
from sm_train.entrypoints.models.pipeline import Text
from sm_train.entrypoints.planning.autoencoder import images_at_once
from torch import Tensor


class ModelInputs:
    """Prepares batches for ``parts`` on ``device``; a share ``dropout`` of captions is left out."""

    def __init__(self, parts: ModelComponents, device: torch.device, dropout: float) -> None:
        self._parts, self._device, self._dropout = parts, device, dropout
        self._nothing = [ids.numpy() for ids in parts.text.tokenize([""])]
        self._no_caption: Text | None = None

    @torch.no_grad()
    def prepare(self, batch: Batch) -> tuple[DiffusionTarget, Text]:
        """What the network is asked, and the captions it is told; called under autocast."""
        # Chosen on the host: a choice on the device would have to be waited for.
        dropped = batch.dropout_uniform < self._dropout
        noise = batch.noise.to(self._device, non_blocking=True)
        if batch.moments is not None:
            images, text = self._drawn(batch.moments, noise), self._states(batch, dropped)
        else:
            images = self._images(batch.pixels, noise)
            text = self._captions(batch.tokens, dropped)
        return self._parts.objective.task(images, noise[NOISE], batch.timestep_uniform), text

    def no_text(self) -> Text:
        """One caption that says nothing."""
        with torch.no_grad():
            return self._captions(self._nothing, np.array([False]))

    def _images(self, pixels: Tensor, noise: Tensor) -> Tensor:
        on_device = pixels.to(self._device, non_blocking=True).permute(0, 3, 1, 2)
        images = torch.sub(on_device, 127.5).div_(127.5)
        vae = self._parts.vae
        if vae is None:
            return images
        some = torch.split(images, images_at_once(images.shape[2] * images.shape[3]))
        moments = [vae.encode(one).latent_dist.parameters for one in some]
        return self._drawn(torch.cat(moments), noise)

    def _drawn(self, moments: Tensor, noise: Tensor) -> Tensor:
        """Latents of the autoencoder's distribution, scaled as the network has them."""
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        on_device = moments.to(self._device, non_blocking=True).float()
        distribution = DiagonalGaussianDistribution(on_device)
        latents: Tensor = distribution.mean + distribution.std * noise[LATENT]
        config = self._parts.vae.config
        return (latents - (config.shift_factor or 0.0)) * float(config.scaling_factor)

    def _captions(self, tokens: Sequence[NDArray[np.int64]], dropped: NDArray[np.bool_]) -> Text:
        if dropped.any():
            tokens = [
                np.where(dropped[:, None], nothing, ids)
                for nothing, ids in zip(self._nothing, tokens, strict=True)
            ]
        on_device = [torch.from_numpy(ids).to(self._device, non_blocking=True) for ids in tokens]
        if self._parts.train_text_encoder:
            return Text(on_device[0])
        return self._parts.text.encode(on_device)

    def _states(self, batch: Batch, dropped: NDArray[np.bool_]) -> Text:
        """Precomputed hidden states, those of no caption where it is left out."""
        if self._no_caption is None:
            states, pooled = self.no_text()
            self._no_caption = Text(states.float(), None if pooled is None else pooled.float())
        mask = torch.from_numpy(dropped).to(self._device, non_blocking=True)
        nothing = self._no_caption
        assert batch.text is not None
        states = self._either(mask[:, None, None], nothing.states, batch.text)
        if batch.pooled is None or nothing.pooled is None:
            return Text(states)
        return Text(states, self._either(mask[:, None], nothing.pooled, batch.pooled))

    def _either(self, mask: Tensor, nothing: Tensor, stored: Tensor) -> Tensor:
        return torch.where(mask, nothing, stored.to(self._device, non_blocking=True).float())
