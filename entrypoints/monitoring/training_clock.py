"""The speed of a job: one definition for every log, screen and estimate.

Speed = optimizer steps ÷ seconds, over the logging intervals since the process started. The first
interval is left out, because it includes compilation and the first batches; so are checkpoints and
evaluation, which an estimate prices by themselves. Stalls count. The share of time spent waiting
for data is that of the same seconds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TrainingClock:
    """The sums over a process's logging intervals that every ``step`` event carries.

    ``timed_seconds`` is the duration of ``timed_steps``, and ``waited_seconds`` the part of it in
    which the process waited for data, None if that is unknown. All are 0 after the first interval.
    """

    timed_steps: int = 0
    timed_seconds: float = 0.0
    waited_seconds: float | None = 0.0
    _is_warm: bool = False

    def add(self, steps: int, seconds: float, waited_seconds: float | None) -> dict[str, object]:
        """Add an interval without checkpoints and evaluation; return the fields of its event."""
        if self._is_warm:
            self.timed_steps += steps
            self.timed_seconds += seconds
            if waited_seconds is None or self.waited_seconds is None:
                self.waited_seconds = None
            else:
                self.waited_seconds += waited_seconds
        self._is_warm = True
        return {
            "timed_steps": self.timed_steps,
            "timed_seconds": self.timed_seconds,
            "waited_seconds": self.waited_seconds,
        }

    @property
    def steps_per_second(self) -> float | None:
        """The speed; None after the first interval."""
        return self.timed_steps / self.timed_seconds if self.timed_seconds > 0 else None
