"""Everything random about a sample in an epoch: a pure function of seed, epoch and sample.

So the same sample learns from the same noise whichever process has it, in whichever micro-batch;
nothing random needs to be kept in a checkpoint; and the loader draws ahead of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sm_train.entrypoints.common.rng import Words, hash64
from torch import Tensor

NOISE, LATENT, TIMESTEP, CAPTION = range(4)
"""What a draw is for; each has numbers of its own."""


@dataclass(frozen=True)
class SampleRng:
    """What a model draws for each image.

    ``kinds`` of noise, the first :data:`NOISE` and :data:`LATENT`, each of ``channels`` at 1 /
    ``scale`` of the image's sides.
    """

    seed: int
    kinds: int = 0
    channels: int = 0
    scale: int = 1

    def shape(self, batch: int, height: int, width: int) -> tuple[int, ...]:
        """Of the noise of a batch of images."""
        return self.kinds, batch, self.channels, height // self.scale, width // self.scale

    def fill_normal(self, noise: Tensor, epoch: int, shard: int, sample: int) -> None:
        """Draw one sample's standard normal ``noise`` (kinds, C, h, w), in place."""
        for purpose, each in enumerate(noise):
            bits = int(hash64(self.seed, epoch, purpose, shard, sample))
            # A generator takes signed numbers of 64 bits.
            each.normal_(generator=torch.Generator().manual_seed(bits - 2**63))

    def uniform(
        self, purpose: int, epoch: int, origins: Sequence[tuple[int, int]]
    ) -> NDArray[np.float64]:
        """A number in (0, 1) for each sample: shard, and place in it."""
        shards, samples = np.array(origins, dtype=np.uint64).T
        bits: Words = hash64(self.seed, epoch, purpose, shards, samples)
        # 52 bits: the half, which keeps 0 and 1 out, is a double's last.
        whole = (bits >> np.uint64(12)).astype(np.float64)
        return (whole + 0.5) / 2.0**52  # type: ignore[no-any-return, unused-ignore]
