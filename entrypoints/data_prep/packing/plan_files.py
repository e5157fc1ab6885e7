"""The files of a plan: a small header, and all inputs in partitions of equal length.

The inputs are sorted as they are packed, so a shard's inputs lie in one partition or a few
neighbouring ones. Whoever builds a shard reads only those, a row group at a time: memory does not
depend on the number of inputs. The files lie in a local folder or, for SageMaker Processing, below
an S3 prefix.

Texts are stored as UTF-8 with lone surrogates, which stand for bytes of a file name that are not
UTF-8. An address that is the header's ``root`` followed by the source is null, and so is that of
a caption next to its image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from sm_train.entrypoints.data_prep.packing.plan import PackInput, next_to
from sm_train.entrypoints.data_prep.work.plan_documents import PlanError, one_line
from sm_train.entrypoints.shards.shard_index import RejectedInput
from sm_train.entrypoints.storage.storage import read_uri
from sm_train.entrypoints.storage.store import S3Access

HEADER_FILE = "plan.json"

INPUTS, REJECTED, STREAMED = "inputs", "rejected", "streamed"
"""The kinds of partitions: of a plan the first two, of a part of a streaming pack the last."""

PARTITION_ROWS = 2**16
"""Inputs of a partition: a few megabytes, which is one request to S3."""

_GROUP_ROWS = 2**13
"""Inputs of a row group, which are decoded at once."""

INPUT_SCHEMA = pa.schema(
    [
        pa.field("source", pa.binary()),
        pa.field("address", pa.binary()),
        pa.field("bytes", pa.int64()),
        pa.field("caption", pa.binary()),
        pa.field("caption_address", pa.binary()),
        pa.field("packed_bytes", pa.int64()),
        pa.field("table_fields", pa.binary()),
    ]
)
"""Columns of a partition: the fields of :class:`PackInput` but its number, which is its position;
and the sample's size in a shard. Plans of earlier versions lack the last column."""

REJECTED_SCHEMA = pa.schema(
    [pa.field(name, pa.binary()) for name in ("source", "reason", "detail")]
)

STREAMED_SCHEMA = pa.schema([pa.field(name, pa.binary()) for name in ("source", "key")])
"""Images of a streaming pack, sorted by their addresses, and the keys of their samples. A rejected
image has none."""


class PartitionWriter:
    """Writes rows of ``schema`` to partitions in ``folder``; a context manager.

    Memory holds one row group.
    """

    def __init__(self, folder: Path, kind: str, schema: pa.Schema) -> None:
        self._folder, self._kind, self._schema = folder, kind, schema
        self._writer: pq.ParquetWriter | None = None
        self.rows = 0

    def __enter__(self) -> PartitionWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def write(self, batch: pa.RecordBatch) -> None:
        """Write the next rows."""
        first = 0
        while first < batch.num_rows:
            if self.rows % PARTITION_ROWS == 0:
                self._close()
                self._writer = self._open(self.rows // PARTITION_ROWS)
            assert self._writer is not None
            part = batch.slice(first, PARTITION_ROWS - self.rows % PARTITION_ROWS)
            self._writer.write_batch(part, row_group_size=_GROUP_ROWS)
            first += part.num_rows
            self.rows += part.num_rows

    def _open(self, number: int) -> pq.ParquetWriter:
        return pq.ParquetWriter(
            self._folder / partition_name(self._kind, number),
            self._schema,
            compression="zstd",
            use_dictionary=False,
            # Neighbouring sources share their beginnings.
            column_encoding={"source": "DELTA_BYTE_ARRAY"},
            write_statistics=False,
            store_schema=False,
        )

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def partition_name(kind: str, number: int) -> str:
    """Return the file name of a partition of inputs or of rejected inputs."""
    return f"{kind}-{number:06d}.parquet"


def partition_names(kind: str, rows: int) -> list[str]:
    """Return the file names of all partitions of ``rows`` rows."""
    return [partition_name(kind, number) for number in range(-(-rows // PARTITION_ROWS))]


REBUILD = "pack the images again, to another destination"
"""How to do without a plan."""


@dataclass(frozen=True)
class PlanFiles:
    """The folder or the S3 prefix of a plan's files, and how it is reached; can be pickled."""

    location: str
    access: S3Access = field(default_factory=S3Access)

    def read(
        self, kind: str, columns: Sequence[str], first: int, count: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows from ``first`` to ``first + count``, a row group at a time.

        Raises:
            OSError: a partition cannot be read.
            PlanError: one is damaged, or has fewer rows than the plan's header says.
        """
        stop = first + count
        while first < stop:
            number, row = divmod(first, PARTITION_ROWS)
            address = f"{self.location}/{partition_name(kind, number)}"
            begin, content = first, read_uri(address, self.access)
            try:
                for batch in _partition_rows(content, columns, row, stop - first):
                    first += batch.num_rows
                    yield batch
            except pa.ArrowException as error:
                raise PlanError(f"{address}: damaged: {one_line(error)}; {REBUILD}") from None
            if first == begin:
                raise PlanError(f"{address}: damaged: it has no row {row}; {REBUILD}")


def _partition_rows(
    content: bytes, columns: Sequence[str], first: int, count: int
) -> Iterator[pa.RecordBatch]:
    """Yield at most ``count`` rows of a partition from row ``first`` on."""
    with pq.ParquetFile(pa.BufferReader(content)) as file:
        start = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            begin, end = max(first - start, 0), min(first + count - start, rows)
            if begin < end:
                table = file.read_row_group(group, columns=list(columns), use_threads=False)
                for name in columns:
                    if name not in table.column_names:
                        table = table.append_column(name, pa.nulls(rows, pa.binary()))
                yield from table.slice(begin, end - begin).select(columns).to_batches()
            start += rows


@dataclass(frozen=True)
class PlannedInputs:
    """The inputs in the rows from ``first`` to ``first + count`` of a plan.

    They are numbered by their rows, from ``offset`` on, and read on each iteration.
    """

    files: PlanFiles
    root: str
    first: int
    count: int
    offset: int = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[PackInput]:
        number = self.offset + self.first
        columns = ("source", "address", "bytes", "caption", "caption_address", "table_fields")
        for batch in self.files.read(INPUTS, columns, self.first, self.count):
            cells = (batch.column(name).to_pylist() for name in columns)
            for source, address, size, caption, caption_address, fields in zip(*cells, strict=True):
                name = decode(source)
                path = self.root + name if address is None else decode(address)
                text = None
                if caption is None:
                    text = decode(caption_address) if caption_address else next_to(path)
                yield PackInput(
                    number,
                    name,
                    path,
                    size,
                    None if caption is None else decode(caption),
                    text,
                    None if fields is None else decode(fields),
                )
                number += 1


@dataclass(frozen=True)
class PlannedRejections:
    """The ``count`` inputs that a plan rejects, sorted; they are read on each iteration."""

    files: PlanFiles
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[RejectedInput]:
        columns = REJECTED_SCHEMA.names
        for batch in self.files.read(REJECTED, columns, 0, self.count):
            for row in batch_rows(batch.select(columns)):
                yield RejectedInput(*map(decode, row))


def record_batch(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    """Return rows as columns; there must be at least one."""
    columns = [
        pa.array(cells, field.type)
        for cells, field in zip(zip(*rows, strict=True), schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def batch_rows(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a batch."""
    yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def encode(text: str) -> bytes:
    """Encode a text that may contain lone surrogates; the order of texts is that of the bytes."""
    return text.encode("utf-8", "surrogatepass")


def decode(content: bytes) -> str:
    """Return the text that :func:`encode` encoded."""
    return content.decode("utf-8", "surrogatepass")
