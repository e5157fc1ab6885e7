"""A stop that was asked for: SIGTERM at a stop, a spot interruption or the longest run time."""

from __future__ import annotations

import signal
from types import FrameType


class StopSignal:
    """Remembers SIGTERM; a second one changes nothing, so it cannot cut a checkpoint short."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
