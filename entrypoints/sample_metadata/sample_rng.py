"""All randomness of a sample in an epoch, as a pure function of seed, epoch and sample.

The same sample is trained with the same noise on whichever rank and in whichever micro-batch it
is. Checkpoints need no random state, and the loader can generate noise ahead of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from sm_train.entrypoints.base.rng import UInt64s, hash64
from torch import Tensor


class Purpose(IntEnum):
    """What a random number is for; each purpose has its own stream of numbers.

    The first two also index the noises of :meth:`SampleRng.shape`. The values are part of the
    random stream: changing one changes what a resumed run generates.
    """

    NOISE = 0
    LATENT = 1
    TIMESTEP = 2
    CAPTION_DROPOUT = 3
    CAPTION = 4
    FLIP = 5
    OFFSET = 6


@dataclass(frozen=True)
class SampleRng:
    """Generates the random numbers that a model needs for each image.

    ``num_noises`` noises: first :attr:`Purpose.NOISE`, then :attr:`Purpose.LATENT`. Each has
    ``channels``; its sides are those of the image divided by ``scale``. ``offset_noise`` is the
    strength of a normal number per channel that is added to :attr:`Purpose.NOISE`, so that a model
    learns to change the mean brightness (Guttenberg, Diffusion With Offset Noise, 2023).
    """

    seed: int
    num_noises: int = 0
    channels: int = 0
    scale: int = 1
    offset_noise: float = 0.0

    def shape(self, batch: int, height: int, width: int) -> tuple[int, ...]:
        """Return the shape (num_noises, B, C, h, w) of the noise for a batch of images."""
        return self.num_noises, batch, self.channels, height // self.scale, width // self.scale

    def fill_normal(self, noise: Tensor, epoch: int, shard: int, sample: int) -> None:
        """Fill one sample's ``noise`` (num_noises, C, h, w) with standard normal numbers."""
        for purpose, target in enumerate(noise):
            bits = int(hash64(self.seed, epoch, purpose, shard, sample))
            # manual_seed takes a signed 64-bit number.
            target.normal_(generator=torch.Generator().manual_seed(bits - 2**63))
        if self.offset_noise and len(noise):
            bits = int(hash64(self.seed, epoch, Purpose.OFFSET, shard, sample))
            generator = torch.Generator().manual_seed(bits - 2**63)
            offset = torch.randn(self.channels, 1, 1, generator=generator)
            noise[Purpose.NOISE].add_(offset, alpha=self.offset_noise)

    def uniform(
        self, purpose: Purpose, epoch: int, samples: Sequence[tuple[int, int]]
    ) -> NDArray[np.float64]:
        """Return a number in (0, 1) for each sample, given as (shard, index in the shard)."""
        shards, indices = np.array(samples, dtype=np.uint64).T
        bits: UInt64s = hash64(self.seed, epoch, purpose, shards, indices)
        # 52 random bits, and a half that excludes 0 and 1: together a double's 53 bits.
        whole = (bits >> np.uint64(12)).astype(np.float64)
        return (whole + 0.5) / 2.0**52  # type: ignore[no-any-return, unused-ignore]
