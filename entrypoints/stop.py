"""A stop that was asked for: SIGTERM at a stop, a spot interruption or the longest run time."""

from __future__ import annotations

import signal
from types import FrameType

import torch
from torch import Tensor


class StopRequest:
    """Remembers SIGTERM; a second one changes nothing, so it cannot cut a checkpoint short."""

    def __init__(self) -> None:
        self._asked = False
        signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def flag(self, device: torch.device) -> Tensor:
        """1.0 if this process was asked to stop, to be summed over all processes."""
        return torch.tensor(float(self._asked), device=device)
