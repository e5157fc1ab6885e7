"""The index of a set of shards: one small file that saves every reader from scanning them.

:mod:`sm_train.entrypoints.job_interface.index_location` defines where it lies.

It is a single Parquet file, because planning needs a few small columns of all shards, and reading
needs two large columns of a few shards: each is fetched alone. A row is a shard
(:class:`~sm_train.entrypoints.shards.shard_format.Shard`) or a rejected input
(:class:`RejectedInput`), whose ``name`` is null; the shards come first. The header
(:class:`IndexHeader`) is JSON in the file's metadata. A truncated file has no footer, so truncation
is detected; pages carry checksums.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, lru_cache
from io import RawIOBase
from operator import index
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from sm_train.entrypoints.base.atomic_write import errors_of
from sm_train.entrypoints.job_interface.index_location import SHARDS_FOLDER
from sm_train.entrypoints.sample_metadata.column_types import ColumnType, ColumnTypes, arrow_type
from sm_train.entrypoints.shards.shard_format import Shard, ShardError

FORMAT = "sm-train-index"
VERSION = 6

GROUP_SAMPLES, GROUP_ROWS = 2**16, 2**12
"""Samples or rows at which a row group is closed; looking up one shard decodes a whole group."""

_SCHEMA = pa.schema(
    [
        pa.field("name", pa.string()),
        pa.field("bytes", pa.int64()),
        pa.field("samples", pa.int64()),
        pa.field("blake3", pa.binary(32)),
        pa.field("offsets", pa.list_(pa.int64())),
        pa.field("keys", pa.list_(pa.string())),
        pa.field("widths", pa.list_(pa.int32())),
        pa.field("heights", pa.list_(pa.int32())),
        pa.field("colors", pa.list_(pa.string())),
        pa.field("source", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
    ]
)
_ENCODINGS = {
    # Neighbouring values differ little: deltas take a tenth of the bytes of the plain encoding.
    "offsets.list.element": "DELTA_BINARY_PACKED",
    "keys.list.element": "DELTA_BYTE_ARRAY",
}
_COLUMN_PREFIX = "column "
"""Begins the name of a column of samples, so that it differs from all others."""

_File = IO[bytes]
"""In a class with a member ``bytes`` this type has no other name."""

_HEADER_KEY = b"sm-train"
"""Key of the header in the file's metadata."""


@dataclass(frozen=True)
class RejectedInput:
    """An input that was not packed.

    ``source`` is its path in the input folder, its row in the input table, or a shard's name.
    ``reason`` is a fixed code such as ``image-corrupt``; ``detail`` explains it to the user.
    """

    source: str
    reason: str
    detail: str


@dataclass(frozen=True)
class IndexHeader:
    """Totals of a set of shards, and how they were packed.

    ``rejected`` counts the rejected inputs. ``target_bytes`` is the requested shard size,
    ``inputs`` a digest of the names and sizes of all inputs, and ``options`` everything else that
    determines the result. The first two are None for shards that sm-train did not pack.
    ``appended`` are the digests of the inputs that were added since, in order. ``prefix`` is the
    name of the folder or prefix that holds the shards. ``columns`` are the types of the columns of
    samples. ``colors`` counts the images by what they state about their colors, as far as that is
    known (:attr:`StoredColor.code`).
    """

    shards: int = 0
    samples: int = 0
    bytes: int = 0
    rejected: int = 0
    target_bytes: int | None = None
    inputs: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    appended: list[str] = field(default_factory=list)
    prefix: str = SHARDS_FOLDER
    columns: dict[str, ColumnType] = field(default_factory=dict)
    colors: dict[str, int] = field(default_factory=dict)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The digests of all inputs, in the order in which they were packed."""
        return () if self.inputs is None else (self.inputs, *self.appended)


@dataclass(frozen=True, eq=False)
class SampleGroup:
    """The samples of consecutive shards of an index, from the one in row ``first`` on.

    ``counts`` are their numbers in each shard, int64 (num_shards,), ``bytes`` their sizes, int64
    (num_samples,), and ``columns`` has a row for each of them. ``keys`` are theirs, on request.
    """

    first: int
    counts: NDArray[np.int64]
    bytes: NDArray[np.int64]
    columns: pa.Table
    keys: pa.Array | None = None


class IndexWriter:
    """Writes an index shard by shard; memory is bounded by one row group.

    The same rows give the same bytes. A context manager: after an error ``file`` has no footer
    with a header, so it cannot be read as an index.
    """

    def __init__(
        self,
        file: IO[bytes],
        *,
        target_bytes: int | None = None,
        inputs: str | None = None,
        options: dict[str, Any] | None = None,
        appended: Sequence[str] = (),
        prefix: str = SHARDS_FOLDER,
        columns: ColumnTypes | None = None,
    ) -> None:
        """Open an index whose shards have ``columns`` of samples."""
        self.columns = dict(columns or {})
        self._schema = _schema(self.columns)
        self._parameters = {
            "columns": self.columns,
            "prefix": prefix,
            "target_bytes": target_bytes,
            "inputs": inputs,
            "options": options or {},
            "appended": list(appended),
        }
        self._totals = dict.fromkeys(("shards", "samples", "bytes", "rejected"), 0)
        self._colors = Counter[str]()
        self._shards: list[Shard] = []
        self._rejected: list[RejectedInput] = []
        self._pending_samples = 0
        self._writer = pq.ParquetWriter(
            file,
            self._schema,
            compression="zstd",
            # Many samples have the same contributor, license or date.
            use_dictionary=[
                f"{name}.list.element"
                for name in ("colors", *(_COLUMN_PREFIX + column for column in self.columns))
            ],
            column_encoding=_ENCODINGS,
            write_statistics=False,
            write_page_checksum=True,
            store_schema=False,
        )

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
                header = {"format": FORMAT, "version": VERSION, **self._totals, **self._parameters}
                header["colors"] = dict(sorted(self._colors.items()))
                self._writer.add_key_value_metadata(
                    {_HEADER_KEY: json.dumps(header, sort_keys=True)}
                )
        finally:
            self._writer.close()

    def add(self, shard: Shard) -> None:
        """Write the next shard; all shards come before the rejected inputs.

        Raises:
            ShardError: its name is not UTF-8.
        """
        if _unicode(shard.name) != shard.name:
            raise ShardError(f"{_unicode(shard.name)}: the name is not UTF-8; rename the shard")
        self._shards.append(shard)
        self._totals["shards"] += 1
        self._totals["samples"] += shard.samples
        self._totals["bytes"] += shard.bytes
        self._colors.update(color for color in shard.colors if color is not None)
        self._pending_samples += shard.samples
        if self._pending_samples >= GROUP_SAMPLES or len(self._shards) >= GROUP_ROWS:
            self._flush()

    def add_rows(self, rows: pa.Table, replaced: Mapping[str, Shard | None] | None = None) -> None:
        """Write rows of another index with the same columns, as a row group.

        Shards in ``replaced`` are written as these, or left out.
        """
        self._flush()
        rows = _replace(rows, replaced or {}, self._schema)
        rejected = rows["name"].null_count
        self._totals["shards"] += len(rows) - rejected
        self._totals["rejected"] += rejected
        for total in ("samples", "bytes"):
            self._totals[total] += pc.sum(rows[total]).as_py() or 0
        self._colors.update(count_values(pc.drop_null(pc.list_flatten(rows["colors"]))))
        if len(rows):
            self._writer.write_table(rows, row_group_size=len(rows))

    def reject(self, rejected: RejectedInput) -> None:
        """Write the next rejected input."""
        if self._shards:
            self._flush()
        self._rejected.append(rejected)
        self._totals["rejected"] += 1
        if len(self._rejected) >= GROUP_SAMPLES:
            self._flush()

    def _flush(self) -> None:
        rows = [_shard_row(shard) for shard in self._shards]
        rows += [
            {name: _unicode(text) for name, text in asdict(rejected).items()}
            for rejected in self._rejected
        ]
        if rows:
            table = pa.Table.from_pylist(rows, self._schema)
            self._writer.write_table(table, row_group_size=len(rows))
        self._shards.clear()
        self._rejected.clear()
        self._pending_samples = 0


def count_values(values: pa.Array | pa.ChunkedArray) -> dict[Any, int]:
    """Return how often each value occurs, None of missing ones."""
    counted = pc.value_counts(values)
    found, counts = (counted.field(part).to_pylist() for part in ("values", "counts"))
    return dict(zip(found, counts, strict=True))


def _schema(columns: ColumnTypes) -> pa.Schema:
    added = (
        pa.field(_COLUMN_PREFIX + name, pa.list_(arrow_type(kind)))
        for name, kind in columns.items()
    )
    return pa.schema([*_SCHEMA, *added])


def count_rejected(rejected: Iterable[RejectedInput]) -> dict[str, int]:
    """Return the number of rejected inputs for each reason, most frequent first."""
    return dict(Counter(item.reason for item in rejected).most_common())


def rows_with_types(rows: pa.Table, columns: ColumnTypes) -> pa.Table:
    """Return rows of an index with these columns of samples, in these types.

    Each type must hold the values of a column that there is; those of others are null.
    """
    for name, kind in columns.items():
        field = pa.field(_COLUMN_PREFIX + name, pa.list_(arrow_type(kind)))
        number = rows.schema.get_field_index(field.name)
        if number < 0:
            rows = rows.append_column(field, _nulls(rows["samples"], field.type))
        elif rows.schema.field(number).type != field.type:
            # A whole number of more than 53 bits becomes the nearest float, as in `as_type`.
            cells = rows.column(number).cast(field.type, safe=False)
            rows = rows.set_column(number, field, cells)
    return rows


def _nulls(samples: pa.ChunkedArray, kind: pa.ListType) -> pa.Array:
    """Return a list of nulls for each row, as many as it has samples; null for a rejected input."""
    counts = np.asarray(samples.fill_null(0).to_numpy(), np.int64)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    starts = pa.array(offsets, pa.int32(), mask=np.append(samples.is_null().to_numpy(), False))
    values = pa.nulls(int(offsets[-1]), kind.value_type)
    return pa.ListArray.from_arrays(starts, values, type=kind)


def _replace(rows: pa.Table, replaced: Mapping[str, Shard | None], schema: pa.Schema) -> pa.Table:
    """Return ``rows`` with other shards in place of those in ``replaced``."""
    rows = rows.select(schema.names).cast(schema)
    parts, done = [], 0
    for number, name in enumerate(rows["name"].to_pylist()):
        if name in replaced:
            parts.append(rows.slice(done, number - done))
            shard, done = replaced[name], number + 1
            if shard is not None:
                parts.append(pa.Table.from_pylist([_shard_row(shard)], schema))
    return pa.concat_tables([*parts, rows.slice(done)]).combine_chunks()


def _shard_row(shard: Shard) -> dict[str, Any]:
    row = {
        column.name: getattr(shard, column.name)
        for column in fields(shard)
        if column.name != "columns"
    }
    for name, values in shard.columns.items():
        row[_COLUMN_PREFIX + name] = [
            _unicode(value) if isinstance(value, str) else value for value in values
        ]
    return row | {
        "samples": shard.samples,
        "blake3": bytes.fromhex(shard.blake3),
        "keys": [_unicode(key) for key in shard.keys],
    }


def _unicode(text: str) -> str:
    """Escape bytes of a name that are not UTF-8, which Parquet cannot store."""
    return text.encode(errors="backslashreplace").decode()


def write_index(
    path: Path,
    shards: Iterable[Shard],
    rejected: Iterable[RejectedInput] = (),
    *,
    target_bytes: int | None = None,
    inputs: str | None = None,
    options: dict[str, Any] | None = None,
    prefix: str = SHARDS_FOLDER,
) -> None:
    """Write an index and flush it to disk.

    Raises:
        OSError: the file cannot be written.
        ShardError: a shard's name is not UTF-8.
    """
    with errors_of(path), path.open("wb") as file:
        writer = IndexWriter(
            file, target_bytes=target_bytes, inputs=inputs, options=options, prefix=prefix
        )
        with writer:
            for shard in shards:
                writer.add(shard)
            for item in rejected:
                writer.reject(item)
        file.flush()
        os.fsync(file.fileno())


class ShardIndex:
    """An index on disk; only its header is read at first, everything else on demand.

    ``names`` (paths relative to the shards folder), ``bytes`` and ``samples``, both int64
    (num_shards,), have an entry for each shard, in the file's order. Unpickling opens the file
    again.
    """

    def __init__(self, path: Path | str, source: RawIOBase | None = None) -> None:
        """Open the index at ``path``; ``source`` is the file if it is not on disk.

        Raises:
            ShardError: it is not an index, is damaged or cut short, or has another version. All
                later reads can raise it, too.
            OSError: it cannot be read.
        """
        self.path = path
        if source is None:
            with Path(path).open("rb"):  # so that a missing file raises OSError with its name
                pass
        try:
            self._file = pq.ParquetFile(source or path, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise _damaged_error(path, error) from None
        self.header = _parse_header(path, self._file.schema_arrow.metadata or {})
        if self._file.metadata.num_rows != self.header.shards + self.header.rejected:
            raise ShardError(f"{path}: damaged: the number of rows does not match the header")
        # Keeps a few decoded row groups of the large columns, not whole columns.
        self._column = lru_cache(maxsize=8)(self._read_column)

    @cached_property
    def names(self) -> list[str]:
        names: list[str] = self.name_column().to_pylist()
        return names

    def name_column(self) -> pa.Array:
        """Return the names as an Arrow array, which takes a tenth of a list's memory."""
        return self._all_shards("name").combine_chunks()

    @cached_property
    def bytes(self) -> NDArray[np.int64]:
        return np.asarray(self._all_shards("bytes").to_numpy(), np.int64)

    @cached_property
    def samples(self) -> NDArray[np.int64]:
        return np.asarray(self._all_shards("samples").to_numpy(), np.int64)

    def content_hashes(self) -> pa.Array:
        """Return the BLAKE3 hash of each shard's bytes, an Arrow array of 32 bytes each."""
        return self._all_shards("blake3").combine_chunks()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)

    def __len__(self) -> int:
        return self.header.shards

    def offsets(self, shard: int) -> NDArray[np.int64]:
        """Return where a shard's samples lie, int64 (num_samples + 1,).

        Sample ``i``, with its headers and padding, is in the bytes ``offsets[i]`` to
        ``offsets[i + 1]``.
        """
        values: NDArray[np.int64] = self._list_cell("offsets", shard).to_numpy()
        return values

    def keys(self, shard: int) -> list[str]:
        """Return the keys of a shard's samples."""
        keys: list[str] = self._list_cell("keys", shard).to_pylist()
        return keys

    def image_sizes(self, shard: int) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
        """Return widths and heights in pixels after EXIF rotation, int32 (num_samples,) each.

        None if the index does not have them.
        """
        widths, heights = (
            self._list_cell(column, shard).to_numpy() for column in ("widths", "heights")
        )
        return (widths, heights) if len(widths) else None

    def image_sizes_by_group(
        self, shards: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]]:
        """Yield image sizes of ascending ``shards``, row group by row group.

        That is, of the next shards, for each the number of its images, int64 (n,), and the widths
        and heights of all of them, int32 (num_images,) each. Nothing is kept in memory.
        """
        groups = np.searchsorted(self._group_ends, shards, side="right")
        for group in np.unique(groups).tolist():
            rows = shards[groups == group] - (self._group_ends[group - 1] if group else 0)
            columns = self._read(("widths", "heights"), [group]).take(rows)
            widths, heights = (columns[name].combine_chunks() for name in ("widths", "heights"))
            lengths = widths.value_lengths().to_numpy().astype(np.int64)
            yield lengths, widths.flatten().to_numpy(), heights.flatten().to_numpy()

    def shard(self, number: int) -> Shard:
        """Return everything that the index has on a shard."""
        sizes = self.image_sizes(number)
        return Shard(
            name=self.names[number],
            bytes=int(self.bytes[number]),
            blake3=self._cell("blake3", number).as_py().hex(),
            keys=tuple(self.keys(number)),
            offsets=tuple(self.offsets(number).tolist()),
            widths=tuple(sizes[0].tolist()) if sizes else (),
            heights=tuple(sizes[1].tolist()) if sizes else (),
            colors=tuple(self._list_cell("colors", number).to_pylist()),
            columns={
                name: tuple(self._list_cell(_COLUMN_PREFIX + name, number).to_pylist())
                for name in self.header.columns
            },
        )

    def samples_by_group(
        self, names: Sequence[str], *, keys: bool = False
    ) -> Iterator[SampleGroup]:
        """Yield all samples with their columns ``names``, and ``keys``, row group by row group.

        Nothing is kept in memory.
        """
        stored = [_COLUMN_PREFIX + name for name in names]
        first = 0
        for group in self._shard_groups():
            table = self._read(("samples", "offsets", *["keys"] * keys, *stored), [group])
            counts = table["samples"].to_numpy().astype(np.int64)
            offsets = table["offsets"].combine_chunks().flatten().to_numpy()
            # Each shard has an offset more than samples: that of its end.
            ends = np.cumsum(counts + 1) - 1
            columns = {
                name: table[column].combine_chunks().flatten()
                for name, column in zip(names, stored, strict=True)
            }
            yield SampleGroup(
                first,
                counts,
                np.delete(np.diff(offsets), ends[:-1]),
                pa.table(columns),
                table["keys"].combine_chunks().flatten() if keys else None,
            )
            first += len(counts)

    def colors_by_group(self) -> Iterator[tuple[NDArray[np.int64], pa.Array]]:
        """Yield what images state about their colors, row group by row group.

        That is, of the next shards, the number of images of which it is known, int64 (n,), and the
        values of all of them (:attr:`Shard.colors`).
        """
        for group in self._shard_groups():
            lists = self._read(("colors",), [group]).column(0).combine_chunks()
            yield lists.value_lengths().to_numpy().astype(np.int64), lists.flatten()

    def values_by_group(self, name: str) -> Iterator[tuple[int, NDArray[np.int64], pa.Array]]:
        """Yield the values of a column of samples, row group by row group.

        That is, of the next shards, the number of the first one, the samples of each, int64 (n,),
        and the values of all of them. Nothing else is read.
        """
        first = 0
        for group in self._shard_groups():
            lists = self._read((_COLUMN_PREFIX + name,), [group]).column(0).combine_chunks()
            counts = lists.value_lengths().to_numpy().astype(np.int64)
            yield first, counts, lists.flatten()
            first += len(counts)

    def rewriter(
        self,
        file: _File,
        appended: Sequence[str] = (),
        options: dict[str, Any] | None = None,
        columns: ColumnTypes | None = None,
    ) -> IndexWriter:
        """Return the writer of an index with the same columns and parameters of packing.

        ``appended`` are digests of inputs that are added; ``options`` and ``columns`` replace the
        present ones.
        """
        header = self.header
        return IndexWriter(
            file,
            target_bytes=header.target_bytes,
            inputs=header.inputs,
            options=header.options if options is None else options,
            appended=[*header.appended, *appended],
            prefix=header.prefix,
            columns=header.columns if columns is None else columns,
        )

    def shard_rows(self) -> Iterator[pa.Table]:
        """Yield all rows of shards, for :meth:`IndexWriter.add_rows`, row group by row group."""
        for group in self._shard_groups():
            yield self._read(None, [group])

    def write_with(self, file: BinaryIO, replaced: Mapping[str, Shard | None]) -> None:
        """Write the same index to ``file``, with other shards in place of some, by name.

        None leaves a shard out. Memory holds a row group.
        """
        with self.rewriter(file) as writer:
            for group in range(self._file.num_row_groups):
                writer.add_rows(self._read(None, [group]), replaced)

    def rejected(self) -> Iterator[RejectedInput]:
        """Yield the rejected inputs, in the order in which they were written."""
        for group in range(self._shard_groups().stop, self._file.num_row_groups):
            for row in self._read(("source", "reason", "detail"), [group]).to_pylist():
                yield RejectedInput(**row)

    def _all_shards(self, column: str) -> Any:
        return self._read((column,), self._shard_groups())[column]

    def _shard_groups(self) -> range:
        """Return the row groups of shards; those of rejected inputs come after them."""
        rows = groups = 0
        while rows < self.header.shards and groups < self._file.num_row_groups:
            rows += self._file.metadata.row_group(groups).num_rows
            groups += 1
        return range(groups)

    @cached_property
    def _group_ends(self) -> list[int]:
        """The number of the shard after the last one of each row group."""
        counts = [self._file.metadata.row_group(group).num_rows for group in self._shard_groups()]
        ends: list[int] = np.cumsum(counts).tolist()
        return ends

    def _list_cell(self, column: str, shard: int) -> Any:
        return self._cell(column, shard).values

    def _cell(self, column: str, shard: int) -> Any:
        group = bisect_right(self._group_ends, shard)
        first = self._group_ends[group - 1] if group else 0
        return self._column(column, group)[shard - first]

    def _read_column(self, column: str, group: int) -> Any:
        return self._read((column,), [group])[column].combine_chunks()

    def _read(self, columns: Sequence[str] | None, groups: Sequence[int] | range) -> Any:
        """Return columns, or all of them, of row groups."""
        names = None if columns is None else list(columns)
        try:
            return self._file.read_row_groups(list(groups), columns=names)
        except (pa.ArrowException, OSError) as error:
            raise _damaged_error(self.path, error) from None


def read_header(file: RawIOBase, location: str) -> IndexHeader:
    """Read the header of a remote index; only the last bytes of ``file`` are read.

    ``location`` names it in errors.

    Raises:
        ShardError: it is not an index, is damaged or cut short, or has another version.
        OSError: it cannot be read.
    """
    try:
        metadata = pq.ParquetFile(file).schema_arrow.metadata
    except pa.ArrowException as error:
        raise _damaged_error(location, error) from None
    return _parse_header(location, metadata or {})


def _damaged_error(path: Path | str, error: Exception) -> ShardError:
    detail = next(iter(str(error).splitlines()), type(error).__name__)
    return ShardError(f"{path}: not a shard index, or damaged: {detail}")


def _parse_header(path: Path | str, metadata: dict[bytes, bytes]) -> IndexHeader:
    try:
        content = json.loads(metadata.get(_HEADER_KEY, b""))
    except (ValueError, RecursionError):
        content = {}
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ShardError(f"{path}: not a shard index")
    if (version := content.pop("version", None)) != VERSION:
        raise ShardError(
            f"{path}: index version {version}; this sm-train reads version {VERSION}: run "
            "`sm-train index`"
        )
    try:
        header = IndexHeader(**content)
        totals = map(index, (header.shards, header.samples, header.bytes, header.rejected))
        if any(total < 0 for total in totals):
            raise TypeError("a total is negative")
    except TypeError as error:
        raise ShardError(f"{path}: damaged: {error}") from None
    return header
