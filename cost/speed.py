"""How fast a stage runs, and where that figure is from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Basis = Literal[
    "stated",
    "measured",
    "scaling fit",
    "scaled",
    "other resolution",
    "other hardware",
    "predicted",
    "illustration",
]
"""What an it/s rests on, from the firmest to the loosest.

stated: the run file or an option gives it for this very stage. measured: event lines of this
stage. scaling fit / scaled: measured at two or more / one other cluster size. other resolution,
other hardware: carried over by FLOPs. predicted: FLOPs and a published utilization. illustration:
measured on this machine's CPU.
"""

FIRM: tuple[Basis, ...] = ("stated", "measured")
"""What was measured on the very stage."""


@dataclass(frozen=True)
class Speed:
    """Optimizer steps a second: the median, and the bounds that hold it in 8 cases of 10.

    ``low`` is its P10 and ``high`` its P90. ``why`` says in one sentence where it is from.

    Raises:
        ValueError: a figure is not positive and finite, or they are out of order.
    """

    steps_per_second: float
    low: float
    high: float
    basis: Basis
    why: str

    def __post_init__(self) -> None:
        value = self.steps_per_second
        if not (0 < value < math.inf):
            raise ValueError(
                f"steps_per_second: {value} must be a positive number of optimizer steps a second"
            )
        if not 0 < self.low <= value <= self.high < math.inf:
            raise ValueError(
                f"steps_per_second: {value} does not lie from {self.low} to {self.high}"
            )

    @property
    def on_this_hardware(self) -> bool:
        """Whether the figure claims to be of the stage's own machines."""
        return self.basis != "illustration"
