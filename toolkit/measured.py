"""What a run's event lines say of its speed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from sm_train.toolkit.errors import UserError
from sm_train.toolkit.event_log import read_events


@dataclass(frozen=True)
class Measured:
    """A measured speed and the place it belongs to."""

    stage: str
    resolution: int
    world_size: int
    backend: str
    effective_batch_size: int
    iterations_per_second: float
    lines: int

    def describe(self) -> str:
        """The measurement in words, for an assumption."""
        return (
            f"{self.iterations_per_second:.3g} it/s was measured on stage {self.stage} "
            f"({self.resolution} px, batch {self.effective_batch_size}, {self.world_size} "
            f"processes, {self.backend}; median of {self.lines} intervals)"
        )


def read_measured(path: Path) -> Measured:
    """The steady speed in the event lines of ``path``, a log or a local run's folder.

    The first interval pays for start-up and is left out where there are others.

    Raises:
        UserError: no such file, or no step in it.
    """
    try:
        events = list(read_events(path))
    except FileNotFoundError:
        raise UserError(f"--measured: {path}: no event lines there") from None
    starts = [event for event in events if event["kind"] == "start"]
    speeds = [
        float(event["iterations_per_second"])
        for event in events
        if event["kind"] == "step" and event["iterations_per_second"]
    ]
    if not starts or not speeds:
        raise UserError(
            f"--measured: {path}: holds no start and step events; give a job's log or the folder "
            "of a local run's stage"
        )
    start, steady = starts[-1], speeds[1:] or speeds
    return Measured(
        stage=start["stage"],
        resolution=start["resolution"],
        world_size=start["world_size"],
        backend=start["backend"],
        effective_batch_size=start["effective_batch_size"],
        iterations_per_second=median(steady),
        lines=len(steady),
    )
