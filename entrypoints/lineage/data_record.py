"""What a job trained on: its shards, their index and removals, and from where it read on.

Each attempt writes ``data-records/TIME.json`` into the stage's checkpoint folder, from which it is
uploaded with the checkpoints, and once for each data set the names and sizes of all shards. With
these the order of the samples can be computed again after the shards have changed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.entrypoints.base.rng import Ints
from sm_train.entrypoints.base.stored_fields import (
    amount,
    list_of,
    mapping_of,
    optional,
    positive,
    record_of,
    size,
    text,
)

FOLDER = "data-records"
"""Folder in a stage's checkpoint folder."""

VERSION = 2


class RecordError(ValueError):
    """A record cannot be read; the message is one line."""


@dataclass(frozen=True)
class ChannelRecord:
    """A channel of shards as a job read it.

    ``index`` is the path or URI of the index, None without one. ``digest`` identifies what
    ``covers`` says. ``samples`` are those that the job could read, None if it is unknown; ``where``
    is their condition. ``weight`` is that in a mixture.
    """

    channel: str
    index: str | None
    digest: str
    covers: str
    samples: int | None
    where: str | None = None
    weight: float | None = None


@dataclass(frozen=True)
class Anchor:
    """A moment of an attempt: after ``batches`` batches of each rank it had taken ``step`` steps.

    There is one at the start, one after the first step and at each beginning of an ``epoch``, and
    one after each rollback, whose ``step`` is lower than before. ``removed`` is the number of
    removed samples that the epoch skips of each channel; None if its list could not be read.
    Times are UTC, in ISO 8601.
    """

    batches: int
    step: int
    epoch: int
    time: str
    removed: dict[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class DataRecord:
    """The data of one attempt of a stage.

    ``accumulation`` is the number of batches of an optimizer step; None if the steps are those of a
    user's own loop, which are unknown. ``state`` is the sampler's at the start, None if samples are
    drawn at random.
    ``shards`` is the file with the shards of all channels, and ``platform`` is what ran the job.
    """

    run: str
    stage: str
    job: str | None
    reader: str
    digest: str
    channels: tuple[ChannelRecord, ...]
    accumulation: int | None
    anchors: tuple[Anchor, ...]
    shards: str
    state: bytes | None = None
    platform: str | None = None

    @property
    def started(self) -> str:
        """When the attempt started."""
        return self.anchors[0].time

    def encode(self) -> bytes:
        """Return the record as JSON."""
        document = asdict(self)
        document["state"] = None if self.state is None else base64.b64encode(self.state).decode()
        return json.dumps({"version": VERSION, **document}, indent=1).encode()


_FIELDS = record_of(
    {
        **dict.fromkeys(("run", "stage", "reader", "digest", "shards"), text),
        **dict.fromkeys(("job", "state", "platform"), optional(text)),
        "accumulation": optional(positive),
        "channels": list_of(
            record_of(
                {
                    **dict.fromkeys(("channel", "digest", "covers"), text),
                    **dict.fromkeys(("index", "where"), optional(text)),
                    "samples": optional(size),
                    "weight": optional(amount),
                }
            )
        ),
        "anchors": list_of(
            record_of(
                {
                    **dict.fromkeys(("batches", "step", "epoch"), size),
                    "time": text,
                    "removed": mapping_of(optional(size)),
                }
            )
        ),
    }
)


def decode_record(content: bytes, address: str) -> DataRecord:
    """Parse what :meth:`DataRecord.encode` returned.

    Raises:
        RecordError: it is damaged, or of another version.
    """
    try:
        document = json.loads(content)
        if document.pop("version") != VERSION:
            raise RecordError(f"{address}: a record of another version of sm-train")
        fields = _FIELDS(document)
        state = fields.pop("state")
        fields["state"] = None if state is None else base64.b64decode(state)
        fields["channels"] = tuple(ChannelRecord(**found) for found in fields["channels"])
        fields["anchors"] = tuple(Anchor(**found) for found in fields["anchors"])
        if not fields["anchors"]:
            raise ValueError("it has no start")
        return DataRecord(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"{address}: not a record of a job's data: {error}") from None


@dataclass(frozen=True, eq=False)
class ShardTable:
    """The shards of a channel by number: their names, and their samples, int64 (num_shards,).

    ``sizes`` are None for a reader that does not know them.
    """

    names: list[str]
    sizes: Ints | None


def encode_shards(tables: Mapping[str, ShardTable]) -> bytes:
    """Return the shards of all channels as a Parquet file."""
    parts = [
        pa.table(
            {
                "channel": pa.array([channel] * len(table.names), pa.string()).dictionary_encode(),
                "name": pa.array([_unicode(name) for name in table.names], pa.string()),
                "samples": pa.array(
                    [None] * len(table.names) if table.sizes is None else table.sizes.tolist(),
                    pa.int64(),
                ),
            }
        )
        for channel, table in tables.items()
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.concat_tables(parts).unify_dictionaries(), sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


def decode_shards(content: bytes, channels: Sequence[str]) -> dict[str, ShardTable]:
    """Parse what :func:`encode_shards` returned, in the order of ``channels``.

    Raises:
        RecordError: it is damaged.
    """
    try:
        table = pq.read_table(pa.BufferReader(content))
        of_row = np.array(table["channel"].to_pylist(), dtype=object)
        names = np.array(table["name"].to_pylist(), dtype=object)
        sizes = table["samples"]
    except (pa.ArrowException, OSError, KeyError) as error:
        raise RecordError(f"not the shards of a record: {error}") from None
    found = {}
    for channel in channels:
        here = np.flatnonzero(of_row == channel)
        counts = sizes.take(pa.array(here))
        known = None if counts.null_count else counts.to_numpy().astype(np.int64)
        found[channel] = ShardTable(names[here].tolist(), known)
    return found


def _unicode(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()


class RecordWriter:
    """Writes an attempt's record to the checkpoint folder; one process of a job uses it."""

    def __init__(
        self, checkpoints: Path, name: str, record: DataRecord, tables: Mapping[str, ShardTable]
    ) -> None:
        """Write the record that the attempt starts with."""
        self._folder, self._name, self._record = checkpoints / FOLDER, name, record
        self._folder.mkdir(parents=True, exist_ok=True)
        if not (self._folder / record.shards).exists():
            write_atomic(self._folder / record.shards, encode_shards(tables))
        self._is_written = False
        self.write()

    def file(self, suffix: str) -> Path:
        """Return another file of the attempt, next to the record."""
        return self._folder / f"{self._name}{suffix}"

    @property
    def record(self) -> DataRecord:
        """The record as written."""
        return self._record

    def add(self, anchor: Anchor) -> None:
        """Add an anchor, to be written."""
        self._record = replace(self._record, anchors=(*self._record.anchors, anchor))
        self._is_written = False

    def write(self) -> None:
        """Write the record if it has changed.

        Raises:
            OSError: it cannot be written.
        """
        if not self._is_written:
            write_atomic(self.file(".json"), self._record.encode())
            self._is_written = True
