"""Exponential moving average (EMA) of the weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class ExponentialMovingAverage:
    """EMA of ``parameters``, on their device, updated in a few fused kernels.

    During the first ``start`` updates the averages equal the weights. After that the decay rises
    with the number of updates n as min(decay, (1 + n) / (10 + n)), so that early weights are
    forgotten soon (as in diffusers' EMAModel, after TensorFlow's).
    """

    def __init__(self, parameters: Iterable[Tensor], decay: float, start: int = 0) -> None:
        self._weights = [parameter.detach() for parameter in parameters]
        self.averages = [weight.clone() for weight in self._weights]
        self.decay, self.start = decay, start
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the current weights."""
        self.updates += 1
        n = self.updates - self.start - 1
        decay = min(self.decay, (1 + n) / (10 + n)) if n > 0 else 0.0
        torch._foreach_lerp_(self.averages, self._weights, 1.0 - decay)
