"""Everything random about a sample in a step: a pure function of seed, step and sample.

So the same sample learns from the same noise whichever process has it, in whichever micro-batch;
and nothing random needs to be kept in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from sm_train.entrypoints.order import Words, mix
from torch import Tensor

PURPOSES = NOISE, TIMESTEP, CAPTION, LATENT = range(4)
"""What a draw is for; each has numbers of its own."""


class Draws:
    """For one micro-batch: the samples ``origins`` (shard, place in it) in ``step``.

    Noise is drawn on the device of ``generator``, whose own state does not matter.
    """

    def __init__(
        self, seed: int, step: int, origins: Sequence[tuple[int, int]], generator: torch.Generator
    ) -> None:
        shards, samples = np.array(origins, dtype=np.uint64).T
        # For all purposes at once: on so few numbers most of the time goes into the calls.
        purposes = np.array(PURPOSES, dtype=np.uint64)[:, None]
        self._bits: Words = mix(seed, step, purposes, shards, samples)
        self._generator = generator

    def uniform(self, purpose: int) -> NDArray[np.float64]:
        """A number in (0, 1) for each sample."""
        # 52 bits: the half, which keeps 0 and 1 out, is a double's last.
        bits = (self._bits[purpose] >> np.uint64(12)).astype(np.float64)
        return (bits + 0.5) / 2.0**52  # type: ignore[no-any-return, unused-ignore]

    def normal(self, purpose: int, shape: Sequence[int]) -> Tensor:
        """Standard normal numbers (B, …), ``shape`` for each sample."""
        seeds = self._bits[purpose].tolist()
        out = torch.empty((len(seeds), *shape), device=self._generator.device)
        for row, seed in zip(out, seeds, strict=True):
            # A generator takes signed numbers of 64 bits.
            row.normal_(generator=self._generator.manual_seed(seed - 2**63))
        return out
