"""What was skipped, counted by reason, and when it is too much."""

from __future__ import annotations

from collections import Counter

from sm_train.entrypoints.data.batches import Batch
from sm_train.entrypoints.data.shard_catalog import DataError
from sm_train.entrypoints.data.shard_reader import BadSample

MIN_BAD_SAMPLES = 10
"""So few bad samples never stop a job, whatever their share."""

_NAMED = 5


class BadSampleTracker:
    """The bad samples of one process; ``most`` is the share that is borne."""

    def __init__(self, most: float) -> None:
        self.max_fraction = most
        self.num_seen = 0
        self.reasons: Counter[str] = Counter()
        self._shards: Counter[str] = Counter()
        self._fresh: list[BadSample] = []

    @property
    def num_bad(self) -> int:
        return self.reasons.total()

    def add(self, batch: Batch) -> None:
        """Count a batch.

        Raises:
            DataError: more than the share ``most`` (and more than 10) of the samples were bad.
        """
        self.num_seen += len(batch.captions)
        self.reasons.update(bad.reason for bad in batch.bad_samples)
        self._shards.update(bad.shard for bad in batch.bad_samples)
        self._fresh += batch.bad_samples
        if self.num_bad > MIN_BAD_SAMPLES and self.num_bad > self.max_fraction * self.num_seen:
            names = ", ".join(name for name, _ in self._shards.most_common(_NAMED))
            raise DataError(
                f"{self.num_bad} of {self.num_seen} samples cannot be used "
                f"({_counted(self.reasons)}), in "
                f"{names}; pack these shards again, or raise data.max_bad_fraction above "
                f"{self.max_fraction}"
            )

    def report(self) -> tuple[str, dict[str, int]] | None:
        """What was skipped since the last report, for a person, and all reasons so far."""
        if not self._fresh:
            return None
        reasons = Counter(bad.reason for bad in self._fresh)
        named = "; ".join(
            f"{bad.shard} {bad.key}: {bad.detail}".replace(" :", ":")
            for bad in self._fresh[:_NAMED]
        )
        more = "; …" if len(self._fresh) > _NAMED else ""
        message = (
            f"skipped {len(self._fresh)} samples ({_counted(reasons)}): {named}{more}; "
            f"{self.num_bad} of {self.num_seen} so far"
        )
        self._fresh.clear()
        return message, dict(self.reasons)


def _counted(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
