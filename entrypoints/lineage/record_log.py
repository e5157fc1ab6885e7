"""Writes down what a job trains on while it trains."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sm_train.entrypoints.common.job_config import JobConfig
from sm_train.entrypoints.data.loader import Loader
from sm_train.entrypoints.data.shard_catalog import ListedShards, ShardCatalog
from sm_train.entrypoints.data.webdataset_reader import ShardStream
from sm_train.entrypoints.lineage.data_record import (
    Anchor,
    ChannelRecord,
    DataRecord,
    RecordWriter,
    ShardTable,
)


@dataclass
class RecordLog:
    """An attempt's record: its start, and an anchor for each epoch and each rollback.

    ``accumulation`` is the number of batches of an optimizer step.
    """

    writer: RecordWriter
    loader: Loader
    accumulation: int
    batches: int = 0

    def stepped(self, step: int) -> None:
        """Count an optimizer step; note the first one, and the beginning of an epoch."""
        self.batches += self.accumulation
        is_first = self.batches == self.accumulation  # from then on, removals are known
        if is_first or self.loader.epoch != self.writer.record.anchors[-1].epoch:
            self.writer.add(self._anchor(step))

    def rolled_back(self, step: int) -> None:
        """Note that training continues at an earlier step, with the next samples."""
        self.writer.add(self._anchor(step))

    def _anchor(self, step: int) -> Anchor:
        loader = self.loader
        read = {
            channel: notice.read
            for channel, notice in loader.removals.items()
            if notice.problem is None
        }
        return Anchor(self.batches, step, loader.epoch, _now(), loader.removed_samples(), read)


def open_record(
    checkpoints: Path,
    config: JobConfig,
    shards: ShardCatalog | ShardStream,
    loader: Loader,
    *,
    step: int,
    accumulation: int | None,
) -> RecordWriter:
    """Write the record of an attempt that starts after ``step``."""
    tables = {
        listed.channel: ShardTable(
            listed.names if isinstance(listed.names, list) else listed.names.to_pylist(),
            listed.sizes,
        )
        for listed in shards.listed
    }
    data = config.data
    weights = {source.channel: source.weight for source in data.sources}
    channels = tuple(_channel(listed, weights.get(listed.channel)) for listed in shards.listed)
    exact = isinstance(shards, ShardCatalog)
    record = DataRecord(
        config.run,
        config.stage.name,
        os.environ.get("TRAINING_JOB_NAME"),
        data.reader,
        shards.digest,
        channels,
        accumulation,
        (Anchor(0, step, loader.epoch, _now()),),
        f"shards-{_digest(channels)}.parquet",
        loader.state_bytes() if exact else None,
    )
    return RecordWriter(checkpoints, f"{time.time_ns():020d}", record, tables)


def _channel(listed: ListedShards, weight: float | None) -> ChannelRecord:
    return ChannelRecord(
        listed.channel,
        listed.index,
        listed.digest,
        listed.covers,
        None if listed.sizes is None else int(listed.sizes.sum()),
        listed.where,
        weight,
    )


def _digest(channels: tuple[ChannelRecord, ...]) -> str:
    """Identify the shards of all channels, which the attempts of a stage usually share."""
    return hashlib.sha256(repr(channels).encode()).hexdigest()[:16]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
