"""The index of a set of shards: one small file that spares every reader the walk through them.

A packed folder holds::

    index.parquet
    shards/shard-000000.tar
    shards/shard-000001.tar …

The index lies beside the shards' folder and never in it: with ``ShardedByS3Key`` every object
below the channel's prefix is dealt to one instance, so whatever lies among the tars takes a
shard's place. The data channel is ``…/shards/``, and nothing but tars may be there.

It is one Parquet file, because planning needs a few small columns of all shards and reading needs
two large ones of a few: each is fetched alone. A row is a shard (:class:`~.shards.Shard`) or a
rejected input (:class:`RejectedInput`), whose ``name`` is null; the shards come first. The
header (:class:`IndexHeader`) is JSON in the file's metadata. A truncated file has no footer, so it
is detected; pages carry checksums.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, lru_cache
from io import RawIOBase
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from sm_train.entrypoints.data.shard_format import Shard, ShardError

FORMAT = "sm-train-index"
VERSION = 3

GROUP_SAMPLES, GROUP_ROWS = 2**16, 2**12
"""A row group is closed at so many samples or rows: what one look-up of offsets decodes."""

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
        pa.field("source", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
    ]
)
_ENCODINGS = {
    # Neighbours differ little: a tenth of the bytes of plain numbers, and of plain names.
    "offsets.list.element": "DELTA_BINARY_PACKED",
    "keys.list.element": "DELTA_BYTE_ARRAY",
}
_METADATA = b"sm-train"


@dataclass(frozen=True)
class RejectedInput:
    """An input that was left out.

    ``source`` is its path in the packed folder, its row of the table, or a shard's name.
    ``reason`` is a fixed code such as ``image-corrupt``; ``detail`` says what was wrong, for a
    person.
    """

    source: str
    reason: str
    detail: str


@dataclass(frozen=True)
class IndexHeader:
    """What was packed, into what, and what was left out, in total.

    ``target_bytes`` is the shard size that was asked for, ``inputs`` a digest over the names and
    sizes of everything that went in, and ``options`` what else decided the result: the first two
    are None for shards that sm-train did not pack.
    """

    shards: int = 0
    samples: int = 0
    bytes: int = 0
    rejected: int = 0
    target_bytes: int | None = None
    inputs: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


class IndexWriter:
    """Writes an index shard by shard; memory is bounded by one row group.

    The same rows give the same bytes. Use as a context: on an error nothing that can be read is
    left in ``file``.
    """

    def __init__(
        self,
        file: IO[bytes],
        *,
        target_bytes: int | None = None,
        inputs: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._given = {"target_bytes": target_bytes, "inputs": inputs, "options": options or {}}
        self._totals = dict.fromkeys(("shards", "samples", "bytes", "rejected"), 0)
        self._shards: list[Shard] = []
        self._rejected: list[RejectedInput] = []
        self._held = 0
        self._writer = pq.ParquetWriter(
            file,
            _SCHEMA,
            compression="zstd",
            use_dictionary=False,
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
                header = {"format": FORMAT, "version": VERSION, **self._totals, **self._given}
                self._writer.add_key_value_metadata({_METADATA: json.dumps(header, sort_keys=True)})
        finally:
            self._writer.close()

    def add(self, shard: Shard) -> None:
        """The next shard; all come before what was rejected.

        Raises:
            ShardError: its name is not UTF-8.
        """
        if _unicode(shard.name) != shard.name:
            raise ShardError(f"{_unicode(shard.name)}: the name is not UTF-8; rename the shard")
        self._shards.append(shard)
        self._totals["shards"] += 1
        self._totals["samples"] += shard.samples
        self._totals["bytes"] += shard.bytes
        self._held += shard.samples
        if self._held >= GROUP_SAMPLES or len(self._shards) >= GROUP_ROWS:
            self._flush()

    def reject(self, rejected: RejectedInput) -> None:
        """The next input that was left out."""
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
            self._writer.write_table(pa.Table.from_pylist(rows, _SCHEMA), row_group_size=len(rows))
        self._shards.clear()
        self._rejected.clear()
        self._held = 0


def _shard_row(shard: Shard) -> dict[str, Any]:
    row = {one.name: getattr(shard, one.name) for one in fields(shard)}
    return row | {
        "samples": shard.samples,
        "blake3": bytes.fromhex(shard.blake3),
        "keys": [_unicode(key) for key in shard.keys],
    }


def _unicode(text: str) -> str:
    """Names that are no UTF-8 with their odd bytes written out, which Parquet cannot hold."""
    return text.encode(errors="backslashreplace").decode()


def write_index(
    path: Path,
    shards: Iterable[Shard],
    rejected: Iterable[RejectedInput] = (),
    *,
    target_bytes: int | None = None,
    inputs: str | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """Write an index and wait until it is on the disk.

    Raises:
        OSError: the file cannot be written.
        ShardError: a shard's name is not UTF-8.
    """
    with path.open("wb") as file:
        writer = IndexWriter(file, target_bytes=target_bytes, inputs=inputs, options=options)
        with writer:
            for shard in shards:
                writer.add(shard)
            for one in rejected:
                writer.reject(one)
        file.flush()
        os.fsync(file.fileno())


class ShardIndex:
    """An index on a disk, of which only the header was read.

    ``names`` (paths below the shards' folder), ``bytes`` and ``samples`` have an entry for each
    shard, in the file's order. They and the rest are read when they are asked for. An instance
    can be pickled: it opens the file again.
    """

    def __init__(self, path: Path) -> None:
        """Open the index at ``path``.

        Raises:
            ShardError: it is no index, is damaged or cut short, or has a version of the future.
                Whatever is read later raises it, too.
            OSError: it cannot be read.
        """
        self.path = path
        with path.open("rb"):  # a missing file is Python's own error, with its name
            pass
        try:
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise _damaged(path, error) from None
        self.header = _header(path, self._file.schema_arrow.metadata or {})
        if self._file.metadata.num_rows != self.header.shards + self.header.rejected:
            raise ShardError(f"{path}: damaged: its rows do not add up to its header")
        # A look-up keeps a few decoded groups, not the whole column.
        self._column = lru_cache(maxsize=8)(self._read_column)

    @cached_property
    def names(self) -> list[str]:
        names: list[str] = self.name_column().to_pylist()
        return names

    def name_column(self) -> pa.Array:
        """The names as Arrow has them, in a tenth of the memory."""
        return self._whole("name").combine_chunks()

    @cached_property
    def bytes(self) -> NDArray[np.int64]:
        return np.asarray(self._whole("bytes").to_numpy(), np.int64)

    @cached_property
    def samples(self) -> NDArray[np.int64]:
        return np.asarray(self._whole("samples").to_numpy(), np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)

    def __len__(self) -> int:
        return self.header.shards

    def offsets(self, shard: int) -> NDArray[np.int64]:
        """Sample ``i`` of the shard lies in its bytes ``offsets[i]`` to ``offsets[i + 1]``.

        Headers and padding are included; int64 of length samples + 1.
        """
        values: NDArray[np.int64] = self._cell("offsets", shard).to_numpy()
        return values

    def keys(self, shard: int) -> list[str]:
        """The samples' keys."""
        keys: list[str] = self._cell("keys", shard).to_pylist()
        return keys

    def image_sizes(self, shard: int) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
        """Widths and heights in pixels, upright; None where the index does not have them."""
        widths, heights = (self._cell(name, shard).to_numpy() for name in ("widths", "heights"))
        return (widths, heights) if len(widths) else None

    def shard(self, number: int) -> Shard:
        """All that is known of a shard."""
        sizes = self.image_sizes(number)
        return Shard(
            name=self.names[number],
            bytes=int(self.bytes[number]),
            blake3=self._row("blake3", number).as_py().hex(),
            keys=tuple(self.keys(number)),
            offsets=tuple(self.offsets(number).tolist()),
            widths=tuple(sizes[0].tolist()) if sizes else (),
            heights=tuple(sizes[1].tolist()) if sizes else (),
        )

    def rejected(self) -> Iterator[RejectedInput]:
        """What was left out, in the order in which it came."""
        for group in range(self._shard_groups().stop, self._file.num_row_groups):
            for row in self._read(("source", "reason", "detail"), [group]).to_pylist():
                yield RejectedInput(**row)

    def _whole(self, column: str) -> Any:
        return self._read((column,), self._shard_groups())[column]

    def _shard_groups(self) -> range:
        """The row groups that hold shards; a group holds rows of one kind."""
        rows = groups = 0
        while rows < self.header.shards and groups < self._file.num_row_groups:
            rows += self._file.metadata.row_group(groups).num_rows
            groups += 1
        return range(groups)

    @cached_property
    def _group_ends(self) -> list[int]:
        """The number of the shard behind each row group."""
        counts = [self._file.metadata.row_group(one).num_rows for one in self._shard_groups()]
        ends: list[int] = np.cumsum(counts).tolist()
        return ends

    def _cell(self, column: str, shard: int) -> Any:
        return self._row(column, shard).values

    def _row(self, column: str, shard: int) -> Any:
        group = bisect_right(self._group_ends, shard)
        first = self._group_ends[group - 1] if group else 0
        return self._column(column, group)[shard - first]

    def _read_column(self, column: str, group: int) -> Any:
        return self._read((column,), [group])[column].combine_chunks()

    def _read(self, columns: Sequence[str], groups: Sequence[int] | range) -> Any:
        try:
            return self._file.read_row_groups(list(groups), columns=list(columns))
        except (pa.ArrowException, OSError) as error:
            raise _damaged(self.path, error) from None


def read_header(file: RawIOBase, place: str) -> IndexHeader:
    """The header of an index at ``place`` that lies on no disk: its last bytes are read alone.

    Raises:
        ShardError: it is no index, is damaged or cut short, or has a version of the future.
        OSError: it cannot be read.
    """
    try:
        metadata = pq.ParquetFile(file).schema_arrow.metadata
    except pa.ArrowException as error:
        raise _damaged(place, error) from None
    return _header(place, metadata or {})


def _damaged(path: Path | str, error: Exception) -> ShardError:
    detail = next(iter(str(error).splitlines()), type(error).__name__)
    return ShardError(f"{path}: not a shard index, or damaged: {detail}")


def _header(path: Path | str, metadata: dict[bytes, bytes]) -> IndexHeader:
    try:
        content = json.loads(metadata.get(_METADATA, b""))
    except ValueError:
        content = {}
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ShardError(f"{path}: not a shard index")
    if (version := content.pop("version", None)) != VERSION:
        raise ShardError(f"{path}: index version {version}; this sm-train reads {VERSION}")
    return IndexHeader(**content)
