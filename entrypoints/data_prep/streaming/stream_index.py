"""Writes the index of a streaming pack: adds the shards that were sealed, and what was rejected.

One process at a time writes it, which holds a lease, and the index is replaced only if it is the
one that was read: `sm-train pack --append`, `remove` and `index` may write it, too. The present
index is copied, a row group at a time, into an upload in parts. So memory holds the records of a
batch of shards, and the local disk one copy of the index: 6 bytes for each sample.

The images of a batch are listed next to those of packs
(:mod:`~sm_train.entrypoints.data_prep.packing.stored_plan`), so that `pack --append` does not pack
them again, and `remove` and `lineage` find them by name.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa
from sm_train.entrypoints.data_prep.packing.build_pack import merge_rejected, rejected_order
from sm_train.entrypoints.data_prep.packing.plan import DEFAULT_OPTIONS
from sm_train.entrypoints.data_prep.packing.plan_files import (
    STREAMED,
    STREAMED_SCHEMA,
    PartitionWriter,
)
from sm_train.entrypoints.data_prep.packing.shard_builder import open_index, read_index
from sm_train.entrypoints.data_prep.packing.stored_plan import store_streamed, streamed_fingerprint
from sm_train.entrypoints.data_prep.streaming.arrivals import is_image
from sm_train.entrypoints.data_prep.streaming.stream_state import (
    LEASES,
    REJECTED,
    RESTORE,
    S3_REQUESTS,
    SEEN,
    read_numbers,
    read_rejected,
    record_name,
)
from sm_train.entrypoints.data_prep.work.plan_documents import PlanError, one_line
from sm_train.entrypoints.job_interface.index_location import (
    INDEX_NAME,
    replaced_index,
    streamed_shard,
)
from sm_train.entrypoints.sample_metadata.column_types import (
    SOURCE,
    ColumnType,
    ColumnTypes,
    arrow_type,
    common_type,
)
from sm_train.entrypoints.shards.shard_format import Shard, ShardError
from sm_train.entrypoints.shards.shard_index import (
    IndexHeader,
    IndexWriter,
    RejectedInput,
    ShardIndex,
    rows_with_types,
)
from sm_train.entrypoints.storage.lease import Holder, Lease, LeaseHeldError, Renewal
from sm_train.entrypoints.storage.storage import S3Prefix

BATCH_SAMPLES = 4_000_000
"""Samples that are added in one pass over the index. Their records and names take 350 bytes each:
1.4 GB, of the 3 GB that the function has."""

BATCH_REJECTED = 100_000
"""Rejected inputs that are added in one pass: small objects in S3, about 1 KB each in memory."""


@dataclass(frozen=True)
class _Batch:
    """The sealed shards, by their numbers, and rejected inputs, by their IDs, of one pass."""

    records: dict[int, bytes]
    rejected: dict[str, RejectedInput]

    @property
    def fingerprint(self) -> str:
        """A digest of what it consists of."""
        content = json.dumps([sorted(self.records), sorted(self.rejected)])
        return streamed_fingerprint(hashlib.sha256(content.encode()).hexdigest())


@dataclass(frozen=True)
class StreamIndexer:
    """Writes the index of the streaming pack in ``destination``.

    ``target_bytes`` is the size of its shards, which the first index records.
    """

    destination: S3Prefix
    target_bytes: int

    def update(self, may_continue: Callable[[], bool] = lambda: True) -> int:
        """Add all that was sealed or rejected; return the number of added shards.

        ``may_continue`` is called before each pass. Nothing is done while another process is at it.

        Raises:
            PlanError: a stored object is damaged. All others are added before.
        """
        added = 0
        damaged: dict[str, PlanError] = {}
        holder = Holder.of_this_process()
        name = f"{LEASES}/index.json"
        lease = Lease(self.destination.lease_files, name, holder)
        try:
            lease.acquire()
        except LeaseHeldError:
            holder.close()
            return 0
        try:
            with Renewal() as renewal:
                renewal.add(name, lease)
                while may_continue() and (batch := self._next_batch(damaged)) is not None:
                    added += self._add(batch)
                renewal.discard(name)
        finally:
            lease.release()
            holder.close()
        for problem in damaged.values():
            raise problem
        return added

    def _next_batch(self, damaged: dict[str, PlanError]) -> _Batch | None:
        """Return what is to be added next; None if there is nothing. Add what is ``damaged``."""
        read = self.destination.read
        sealed = read_numbers(self.destination).sealed
        numbers = [number for number in sealed if record_name(number) not in damaged]
        listed = sorted(self.destination.list_sizes(REJECTED))
        names = [name for name in listed if f"{REJECTED}/{name}" not in damaged][:BATCH_REJECTED]
        records: dict[int, bytes] = {}
        samples = 0
        with ThreadPoolExecutor(S3_REQUESTS) as pool:
            for first in range(0, len(numbers), S3_REQUESTS):
                if samples >= BATCH_SAMPLES:
                    break
                group = numbers[first : first + S3_REQUESTS]
                contents = pool.map(lambda number: read(record_name(number)), group)
                for number, content in zip(group, contents, strict=True):
                    try:
                        samples += self._open(number, content).header.samples
                    except ShardError as error:
                        problem = f"{one_line(error)}; {RESTORE}"
                        damaged[record_name(number)] = PlanError(problem)
                        continue
                    records[number] = content
            items = pool.map(self._read_rejected, names)
            rejected = {}
            for name, item in zip(names, items, strict=True):
                if isinstance(item, PlanError):
                    damaged[f"{REJECTED}/{name}"] = item
                elif item is not None:
                    rejected[name] = item
        if not records and self.destination.version(INDEX_NAME) is None:
            return None  # an index without shards would be no pack
        return _Batch(records, rejected) if records or rejected else None

    def _read_rejected(self, name: str) -> RejectedInput | PlanError | None:
        try:
            return read_rejected(self.destination, name)
        except PlanError as error:
            return error

    def _open(self, number: int, content: bytes) -> ShardIndex:
        """Return the record of a sealed shard.

        Raises:
            ShardError: it is damaged.
        """
        return open_index(content, self.destination.address(record_name(number)))

    def _add(self, batch: _Batch) -> int:
        """Add a batch to the index; return the number of shards that it did not have."""
        self._store_names(batch)
        while True:
            version = self.destination.version(INDEX_NAME)
            added = self._write(batch, version)
            if added is not None:
                break
        with ThreadPoolExecutor(S3_REQUESTS) as pool:
            list(pool.map(self._forget_rejected, batch.rejected))
            list(pool.map(self._forget_record, batch.records))
        return added

    def _forget_rejected(self, name: str) -> None:
        self.destination.create_if_absent(f"{SEEN}/{name}", b"")
        self.destination.remove(f"{REJECTED}/{name}")

    def _forget_record(self, number: int) -> None:
        self.destination.remove(record_name(number))

    def _store_names(self, batch: _Batch) -> None:
        """Store the names of the batch's images with their keys, sorted by name.

        Those of rejected images have no key.
        """
        rejected = [item.source for item in batch.rejected.values() if is_image(item.source)]
        names = pa.array(rejected, pa.string()).cast(pa.binary())
        tables = [pa.table([names, pa.nulls(len(names), pa.binary())], schema=STREAMED_SCHEMA)]
        for number, content in batch.records.items():
            shard = self._open(number, content).shard(0)
            if SOURCE not in shard.columns:  # a record of an earlier version
                continue
            names = pa.array(shard.columns[SOURCE], pa.string()).cast(pa.binary())
            keys = pa.array(shard.keys, pa.string()).cast(pa.binary())
            tables.append(pa.table([names, keys], schema=STREAMED_SCHEMA))
        table = pa.concat_tables(tables).sort_by("source")
        with tempfile.TemporaryDirectory() as folder:
            with PartitionWriter(Path(folder), STREAMED, STREAMED_SCHEMA) as writer:
                for part in table.combine_chunks().to_batches():
                    writer.write(part)
            numbers = sorted(batch.records)
            store_streamed(self.destination, batch.fingerprint, Path(folder), len(table), numbers)

    def _write(self, batch: _Batch, version: str | None) -> int | None:
        """Write the index over its ``version``; None if another process was faster.

        Return the number of shards that it did not have.
        """
        with self._downloaded(version) as (current, known):
            added = [
                number for number in sorted(batch.records) if streamed_shard(number) not in known
            ]
            new = sorted(set(batch.rejected.values()), key=rejected_order)
            if current is not None:
                present = set(new).intersection(current.rejected())
                new = [item for item in new if item not in present]
                if not added and not new and _has_names(current, batch):
                    return 0  # an earlier process ended after it had written the index
            # Each is opened again where it is needed: an open one keeps what was read of it.
            opened = (self._open(number, batch.records[number]) for number in added)
            columns = _columns(current, (record.header for record in opened))
            with (
                self.destination.writer_if(INDEX_NAME, version) as file,
                self._writer(cast("BinaryIO", file), current, batch.fingerprint, columns) as writer,
            ):
                for rows in current.shard_rows() if current is not None else ():
                    writer.add_rows(rows_with_types(rows, columns))
                packed_now: set[str] = set()
                for number in added:
                    record = self._open(number, batch.records[number])
                    shard = record.shard(0)
                    writer.add(_with_types(shard, record.header.columns, columns))
                    packed_now.update(shard.columns.get(SOURCE, ()))
                of_current = (
                    item
                    for item in (() if current is None else current.rejected())
                    if item.source not in packed_now
                )
                for item in merge_rejected(of_current, new):
                    writer.reject(item)
            return None if file.etag is None else len(added)

    @contextmanager
    def _downloaded(self, version: str | None) -> Iterator[tuple[ShardIndex | None, set[str]]]:
        """Open the present index on the local disk, and the names of shards that are not new.

        Those are its shards, and those that `sm-train remove` has replaced.
        """
        known: set[str] = set()
        if self.destination.size(replaced_index(INDEX_NAME)) is not None:
            known |= {*read_index(self.destination, replaced_index(INDEX_NAME)).names}
        if version is None:
            yield None, known
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / INDEX_NAME
            self.destination.download(INDEX_NAME, path)
            index = ShardIndex(path)
            yield index, known | {*index.names}

    def _writer(
        self, file: BinaryIO, current: ShardIndex | None, fingerprint: str, columns: ColumnTypes
    ) -> IndexWriter:
        """Return the writer of the new index."""
        header = IndexHeader() if current is None else current.header
        options = DEFAULT_OPTIONS.non_defaults() if current is None else header.options
        named = list(dict.fromkeys([*options.get(_INDEX_COLUMNS, ()), *columns]))
        options = options | ({_INDEX_COLUMNS: named} if named else {})
        if current is None:
            return IndexWriter(
                file,
                target_bytes=self.target_bytes,
                inputs=fingerprint,
                options=options,
                columns=columns,
            )
        # Without inputs the names of its images are not known.
        appended = [] if header.inputs is None else [fingerprint]
        return current.rewriter(file, appended, options, columns)


_INDEX_COLUMNS = "index_columns"
"""Option of an index: the names of its columns, which `sm-train pack --append` compares."""


def _columns(current: ShardIndex | None, records: Iterable[IndexHeader]) -> dict[str, ColumnType]:
    """Return the columns of the index with records, in types that hold the values of all.

    Images that arrived before a column was declared have no value of it. SQL does not tell names
    apart that differ in case, so they are one column.
    """
    types = {} if current is None else dict(current.header.columns)
    without = {SOURCE} - {*types}
    for record in records:
        for name, kind in record.columns.items():
            if name not in without:
                known = _same_name(name, types)
                types[known] = common_type(types.get(known), kind) or kind
    return types


def _same_name(name: str, columns: Iterable[str]) -> str:
    """Return the column that SQL takes for the one of this name; itself if there is none."""
    return next((column for column in columns if column.lower() == name.lower()), name)


def _with_types(shard: Shard, present: ColumnTypes, columns: ColumnTypes) -> Shard:
    """Return a shard, whose columns have the types ``present``, with the columns of the index."""
    values = {}
    for name, kind in present.items():
        known = _same_name(name, columns)
        if known in columns:
            cells = pa.array(shard.columns[name], arrow_type(kind))
            values[known] = tuple(cells.cast(arrow_type(columns[known]), safe=False).to_pylist())
    return replace(shard, columns=values).with_columns(columns)


def _has_names(index: ShardIndex, batch: _Batch) -> bool:
    """Return whether an index lists the names of a batch's images, or those of no image."""
    header = index.header
    return header.inputs is None or batch.fingerprint in header.fingerprints
