"""Records what a job trains on while it trains."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from sm_train.entrypoints.data_loading.batches import Batch
from sm_train.entrypoints.data_loading.loader import Loader
from sm_train.entrypoints.data_loading.shard_catalog import ListedShards, ShardCatalog
from sm_train.entrypoints.data_loading.webdataset_reader import ShardStream
from sm_train.entrypoints.distributed.object_exchange import gather
from sm_train.entrypoints.job_interface.job_config import JobConfig
from sm_train.entrypoints.job_interface.node_description import current_platform
from sm_train.entrypoints.lineage.data_record import (
    Anchor,
    ChannelRecord,
    DataRecord,
    RecordWriter,
    ShardTable,
)
from sm_train.entrypoints.lineage.replacements import SUFFIX, ReplacementNotes, ReplacementsFile


@dataclass
class RecordLog:
    """What one rank contributes to an attempt's record; the first rank writes it.

    The record has its start, an anchor for each epoch and each rollback, and the replaced samples.
    ``writer`` is None on other ranks. A full disk must not end the training: what cannot be written
    is written later, and ``warn`` is called once, with a code and a message.
    """

    writer: RecordWriter | None
    loader: Loader
    warn: Callable[[str, str], None]
    _notes: ReplacementNotes = field(default_factory=ReplacementNotes)
    _replaced: ReplacementsFile | None = None
    _has_warned: bool = False

    def __post_init__(self) -> None:
        if self.writer is not None:
            self._replaced = ReplacementsFile(self.writer.file(SUFFIX))

    def read(self, batch: Batch) -> None:
        """Note what the next batch has."""
        self._notes.add(batch)

    def stepped(self, step: int) -> None:
        """Note an optimizer step if it is the first one, or begins an epoch."""
        if self.writer is None:
            return
        last = self.writer.record.anchors[-1]
        # From the first step on, the removed samples are known.
        if not last.batches or self.loader.epoch != last.epoch:
            self._add_anchor(step)

    def rolled_back(self, step: int) -> None:
        """Note that training continues at an earlier step, with the next samples."""
        if self.writer is not None:
            self._add_anchor(step)

    def save_replacements(self, step: int) -> None:
        """Write which samples all ranks have replaced up to ``step``: all ranks call it."""
        gathered = gather(self._notes.take())
        if gathered is None or self.writer is None or self._replaced is None:
            return
        rows = chain.from_iterable(gathered)
        with self._tolerated():
            self._replaced.append(step, self._notes.batches, rows)
            self.writer.write()

    def _add_anchor(self, step: int) -> None:
        assert self.writer is not None
        loader = self.loader
        removed = loader.removed_samples()
        self.writer.add(Anchor(self._notes.batches, step, loader.epoch, _now(), removed))
        with self._tolerated():
            self.writer.write()

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                self.warn(
                    "data-record-failed", f"the record of the data: {error}; it is tried again"
                )


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
        current_platform(),
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
