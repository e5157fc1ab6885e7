"""Which recorded jobs outside of SageMaker may still read a set of shards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime

from sm_train.toolkit.base.errors import UsageError
from sm_train.toolkit.data_prep.lineage.follow import reads
from sm_train.toolkit.data_prep.lineage.recorded_runs import RecordedStage
from sm_train.toolkit.data_prep.packing.shard_set import ShardSet
from sm_train.toolkit.data_prep.removal.shard_users import RecordedJob

_OTHER_PLATFORMS = ("kubernetes", "slurm")


def recorded_jobs(
    shards: ShardSet, stages: Sequence[RecordedStage], ended: Collection[str]
) -> Iterator[RecordedJob]:
    """Yield the jobs on Kubernetes and Slurm that read ``shards`` and are not known to have ended.

    A stage with a final model has ended, and so have the runs in ``ended``.

    Raises:
        UsageError: a run in ``ended`` has no record.
    """
    unknown = sorted({*ended} - {stage.run for stage in stages})
    if unknown:
        raise UsageError(f"--ended: {unknown[0]}: no such run in the places of --runs")
    for stage in stages:
        record = stage.attempts[-1].record
        has_ended = stage.final or stage.run in ended
        if record.platform in _OTHER_PLATFORMS and not has_ended and reads(stage, shards):
            name = f"{stage.run} {stage.stage} ({record.platform})"
            yield RecordedJob(name, datetime.fromisoformat(record.started))
