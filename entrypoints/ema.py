"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class ExponentialMovingAverage:
    """Averages in fp32, updated in a few fused kernels.

    For the first ``start`` updates they are the weights themselves. Then the decay rises with the
    number of updates n as min(decay, (1 + n) / (10 + n)), so that what was before is forgotten
    soon (as in diffusers' EMAModel, after TensorFlow's).
    """

    def __init__(self, parameters: Iterable[Tensor], decay: float, start: int = 0) -> None:
        self.averages = [parameter.detach().clone().float() for parameter in parameters]
        self.decay, self.start = decay, start
        self.updates = 0

    @torch.no_grad()
    def update(self, parameters: Iterable[Tensor]) -> None:
        """Move the averages towards ``parameters``, given in the order of the constructor."""
        self.updates += 1
        n = self.updates - self.start - 1
        decay = min(self.decay, (1 + n) / (10 + n)) if n > 0 else 0.0
        weights = [parameter.detach().float() for parameter in parameters]
        torch._foreach_lerp_(self.averages, weights, 1.0 - decay)
