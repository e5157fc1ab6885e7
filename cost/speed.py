"""The speed of a stage, with its range and its basis."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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
"""The basis of an it/s, from the most to the least reliable.

stated: the run file or an option gives it for this very stage. measured: event lines of this
stage. scaling fit / scaled: measured at two or more / one other cluster size. other resolution,
other hardware: measured there, and carried by the ratio of the speed model's predictions.
predicted: by the speed model alone. illustration: measured on this machine's CPU.
"""

FIRM: tuple[Basis, ...] = ("stated", "measured")
"""Bases that were measured on the stage itself."""

STEADY = (0.90, 1.05)
"""P10 and P90 of a stage's mean it/s relative to a steady measurement (assumed)."""

MOST_STEPS_PER_SECOND = 1000.0
"""A higher figure is images per second by mistake."""


@dataclass(frozen=True)
class Speed:
    """Optimizer steps per second: median with P10 (``low``) and P90 (``high``).

    ``why`` states its source in one sentence.

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
                f"steps_per_second: {value} must be a positive number of optimizer steps per second"
            )
        if not 0 < self.low <= value <= self.high < math.inf:
            raise ValueError(f"steps_per_second: {value} is not between {self.low} and {self.high}")

    @property
    def on_this_hardware(self) -> bool:
        """Whether the figure applies to the stage's own hardware."""
        return self.basis != "illustration"

    def scaled(self, factor: float) -> Speed:
        """Return the speed with its range, ``factor`` times as fast."""
        return replace(
            self,
            steps_per_second=self.steps_per_second * factor,
            low=self.low * factor,
            high=self.high * factor,
        )


def stated_speed(steps_per_second: float, why: str) -> Speed:
    """Return the speed that the user states for this stage.

    Raises:
        ValueError: it is not positive, or more than any training loop reaches.
    """
    if steps_per_second > MOST_STEPS_PER_SECOND:
        raise ValueError(
            f"steps_per_second: {steps_per_second:g} is more than the "
            f"{MOST_STEPS_PER_SECOND:,.0f} steps per second of the fastest training loop; give "
            "optimizer steps per second, not images"
        )
    return Speed(
        steps_per_second,
        steps_per_second * STEADY[0],
        steps_per_second * STEADY[1],
        "stated",
        why,
    )
