"""Rewrites shards without some of their samples, under new names; the others keep their bytes.

A shard is streamed: memory holds a few samples. Each new shard has a record, an index of this shard
alone, so an interrupted rewrite resumes with the missing ones.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

from sm_train.entrypoints.data_prep.packing.shard_builder import encode_record, read_index
from sm_train.entrypoints.data_prep.packing.shard_samples import read_samples
from sm_train.entrypoints.data_prep.work.write_threads import write_in_threads
from sm_train.entrypoints.sample_metadata.column_types import ColumnTypes
from sm_train.entrypoints.shards.shard_format import SUFFIX, Shard, ShardError
from sm_train.entrypoints.shards.shard_index import IndexWriter, ShardIndex
from sm_train.entrypoints.shards.shard_writer import ShardWriter
from sm_train.entrypoints.storage.storage import store_file, write_file
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.packing.shard_set import ShardSet

RECORDS = ".removing"
"""Folder next to the index that holds the records of new shards."""

_THREADS = 4
"""Shards that are rewritten at the same time."""

Progress = Callable[[int], None]
"""Takes the number of bytes of old shards that have been read since the last call."""


@dataclass(frozen=True)
class Rewrite:
    """A shard to write as ``new``, without the samples with the keys ``removed``.

    ``new`` is empty if nothing is left of it.
    """

    old: str
    new: str
    removed: frozenset[str]


def successor(shard: str, taken: Iterable[str]) -> str:
    """Return a new name for a shard, as ``shard-000001-r1.tar`` for ``shard-000001.tar``."""
    match = re.fullmatch(rf"(.*?)(?:-r(\d+))?{re.escape(SUFFIX)}", shard)
    assert match is not None
    number, names = int(match[2] or 0) + 1, set(taken)
    while (name := f"{match[1]}-r{number}{SUFFIX}") in names:
        number += 1
    return name


def rewrite_shards(
    shards: ShardSet, index: ShardIndex, rewrites: Sequence[Rewrite], progress: Progress
) -> dict[str, Shard | None]:
    """Write the new shards that do not exist yet; return them by the names of the old ones.

    Raises:
        UserError: a shard is not as its index says.
        OSError: it cannot be read, or the new one not be written.
    """
    rows = {name: row for row, name in enumerate(index.names)}
    reading = Lock()

    def write(rewrite: Rewrite) -> Shard | None:
        with reading:
            old = index.shard(rows[rewrite.old])
        columns = index.header.columns
        return _rewrite(shards, old, rewrite, columns, progress)

    written = write_in_threads(write, rewrites, _THREADS)
    return {rewrite.old: shard for rewrite, shard in zip(rewrites, written, strict=True)}


def _rewrite(
    shards: ShardSet, old: Shard, rewrite: Rewrite, columns: ColumnTypes, progress: Progress
) -> Shard | None:
    if not rewrite.new:
        progress(old.bytes)
        return None
    finished = _read_record(shards, rewrite.new)
    # Since an interrupted attempt, more samples of the shard may have been removed.
    if finished is not None and rewrite.removed.isdisjoint(finished.keys):
        progress(old.bytes)
        return finished
    kept = [number for number, key in enumerate(old.keys) if key not in rewrite.removed]
    with (
        shards.storage.atomic_writer(shards.shard_file(rewrite.new)) as sink,
        ShardWriter(sink, rewrite.new) as writer,
    ):
        for number, content in _samples(shards, old, kept, progress):
            writer.append(old.keys[number], content)
        shard = writer.finish(
            [old.widths[number] for number in kept if old.widths],
            [old.heights[number] for number in kept if old.heights],
            [old.colors[number] for number in kept if old.colors],
            {name: [values[number] for number in kept] for name, values in old.columns.items()},
        )
    record = encode_record(shard, columns=columns)
    write_file(shards.storage, record_file(rewrite.new), record)
    return shard


def _samples(
    shards: ShardSet, old: Shard, kept: Sequence[int], progress: Progress
) -> Iterator[tuple[int, memoryview]]:
    """Yield the part of the tar of each of the samples ``kept``.

    Raises:
        UserError: the shard has another size or other samples than its index says.
    """
    try:
        yield from read_samples(shards.storage, shards.shard_file(old.name), old, kept, progress)
    except ShardError as error:
        raise UserError(f"{error}; run `sm-train index` again") from None


def record_file(shard: str) -> str:
    """Return the name of the record of a new shard in the storage."""
    return f"{RECORDS}/{shard}.parquet"


def _read_record(shards: ShardSet, name: str) -> Shard | None:
    """Return a shard that an earlier attempt has finished; None if it has not."""
    try:
        shard = read_index(shards.storage, record_file(name)).shard(0)
    except (FileNotFoundError, ShardError):
        return None
    return shard if shards.storage.size(shards.shard_file(name)) == shard.bytes else None


def _keep_replaced(
    shards: ShardSet, index: ShardIndex, written: Mapping[str, Shard | None]
) -> None:
    """Add what the index says of old shards to the index of replaced ones."""
    with (
        shards.open_replaced() as earlier,
        tempfile.TemporaryFile() as file,
    ):
        with IndexWriter(file, prefix=shards.name, columns=index.header.columns) as writer:
            for row, name in enumerate(earlier.names if earlier is not None else ()):
                assert earlier is not None
                if name not in written:
                    writer.add(earlier.shard(row).with_columns(index.header.columns))
            for row, name in enumerate(index.names):
                if name in written:
                    writer.add(index.shard(row))
        store_file(shards.storage, shards.replaced_file, file)


def switch_index(
    shards: ShardSet, index: ShardIndex, version: str, written: Mapping[str, Shard | None]
) -> None:
    """Replace the index by one with the new shards, if it still has this ``version``.

    What it says of the old ones is kept next to it: with it the jobs are found that have seen a
    sample.

    Raises:
        UserError: another command has written it meanwhile.
    """
    _keep_replaced(shards, index, written)
    with tempfile.TemporaryFile() as file:
        index.write_with(file, written)
        file.seek(0)
        if not shards.storage.replace_if(shards.index_file, file, version):
            location = shards.storage.address(shards.index_file)
            raise UserError(f"{location}: another command has written it; run this again")
