"""Counts skipped samples by reason and stops the job if there are too many."""

from __future__ import annotations

from collections import Counter

from sm_train.entrypoints.data.batches import Batch
from sm_train.entrypoints.data.shard_catalog import DataError
from sm_train.entrypoints.data.shard_reader import BadSample

MIN_BAD_SAMPLES = 10
"""Up to this many bad samples never stop a job, whatever fraction they are."""

_MAX_NAMED = 5
"""Shards or samples that a message names."""


class BadSampleTracker:
    """Counts the bad samples of one rank; ``max_fraction`` of all samples are tolerated."""

    def __init__(self, max_fraction: float) -> None:
        self.max_fraction = max_fraction
        self.num_seen = 0
        self.reasons: Counter[str] = Counter()
        self._shards: Counter[str] = Counter()
        self._unreported: list[BadSample] = []

    @property
    def num_bad(self) -> int:
        """Bad samples so far."""
        return self.reasons.total()

    def add(self, batch: Batch) -> None:
        """Count a batch.

        Raises:
            DataError: more than 10 samples, and more than ``max_fraction`` of all, were bad.
        """
        self.num_seen += len(batch.captions)
        self.reasons.update(bad.reason for bad in batch.bad_samples)
        self._shards.update(bad.shard for bad in batch.bad_samples)
        self._unreported += batch.bad_samples
        if self.num_bad > MIN_BAD_SAMPLES and self.num_bad > self.max_fraction * self.num_seen:
            names = ", ".join(name for name, _ in self._shards.most_common(_MAX_NAMED))
            raise DataError(
                f"{self.num_bad} of {self.num_seen} samples cannot be used "
                f"({_format_reasons(self.reasons)}), in {names}; pack these shards again, or raise "
                f"data.max_bad_fraction above {self.max_fraction}"
            )

    def report(self) -> tuple[str, dict[str, int]] | None:
        """Return a message about the samples skipped since the last report, and all counts.

        None if no sample was skipped since.
        """
        if not self._unreported:
            return None
        reasons = Counter(bad.reason for bad in self._unreported)
        samples = "; ".join(
            f"{bad.shard} {bad.key}: {bad.detail}".replace(" :", ":")
            for bad in self._unreported[:_MAX_NAMED]
        )
        more = "; …" if len(self._unreported) > _MAX_NAMED else ""
        message = (
            f"skipped {len(self._unreported)} samples ({_format_reasons(reasons)}): {samples}"
            f"{more}; {self.num_bad} of {self.num_seen} so far"
        )
        self._unreported.clear()
        return message, dict(self.reasons)


def _format_reasons(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
