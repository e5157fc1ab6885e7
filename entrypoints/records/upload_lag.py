"""When saved checkpoints count as not reaching storage, by the job and by the laptop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_LAG_SECONDS = 900.0
"""How long storage may be behind: uploads of large checkpoints take minutes."""


@dataclass(frozen=True)
class StorageLag:
    """Storage has ``stored`` (None: nothing) as its newest step; ``saved`` is the job's newest.

    ``seconds`` is how long ago the job saved the first checkpoint that storage should have by now.
    """

    saved: int
    stored: int | None
    seconds: float

    @property
    def is_too_long(self) -> bool:
        return self.seconds >= MAX_LAG_SECONDS

    def describe(self) -> str:
        """Return one line."""
        held = "no checkpoint" if self.stored is None else f"step {self.stored:,}"
        return (
            f"storage holds {held} while the job saved step {self.saved:,}, for "
            f"{self.seconds / 60:.0f} min; check that the job's role may write to the bucket"
        )


def is_behind(saved: int, stored: int | None, interval: int) -> bool:
    """Return whether storage lacks more than the newest checkpoint.

    ``saved`` and ``stored`` are the newest steps saved and stored (None: nothing is), ``interval``
    is the number of steps between two checkpoints.
    """
    return saved - (stored or 0) > interval


def storage_lag(
    saved: Sequence[tuple[float, int]], stored: int | None, now: float, every_steps: int = 0
) -> StorageLag | None:
    """Return how far storage is behind ``saved``, times and steps; None if it is not, or unknown.

    The interval is ``every_steps``, or the largest between two of ``saved``: a script of the user's
    own may save less often.
    """
    steps = sorted({step for _, step in saved})
    interval = max((every_steps, *(later - earlier for earlier, later in pairwise(steps))))
    if not interval:
        return None
    behind = [(time, step) for time, step in saved if is_behind(step, stored, interval)]
    if not behind:
        return None
    return StorageLag(max(step for _, step in behind), stored, now - min(behind)[0])
