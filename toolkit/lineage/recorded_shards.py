"""Finds what an index says of the shards that a job read, also after it has changed.

Shards that were added since are left out, and those that were rewritten without removed samples are
taken from the index of replaced shards. The recorded digest shows whether it is the same data.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import pyarrow as pa
from sm_train.entrypoints.data.shard_catalog import IndexedShards, read_indexed_shards
from sm_train.entrypoints.data.shard_format import ShardError
from sm_train.entrypoints.data.shard_index import GROUP_SAMPLES, IndexWriter, ShardIndex
from sm_train.entrypoints.lineage.data_record import ChannelRecord, ShardTable
from sm_train.entrypoints.object_store.store import S3Access
from sm_train.entrypoints.sample_metadata.row_filter import ConditionError
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.packing.shard_set import ShardSet, shard_set_of_index


@dataclass(eq=False)
class RecordedIndexes:
    """The shards of recorded channels; a context manager, which removes its files at the end."""

    access: S3Access
    _folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)
    _found: dict[tuple[str, str, str | None], IndexedShards | None] = field(default_factory=dict)

    def __enter__(self) -> RecordedIndexes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._folder.cleanup()

    def shards_of(self, channel: ChannelRecord, table: ShardTable) -> IndexedShards | None:
        """Return the shards of a channel as its index describes them; None if it has changed."""
        if channel.index is None:
            return None
        key = (channel.index, channel.digest, channel.where)
        if key not in self._found:
            path = Path(self._folder.name) / f"{len(self._found)}.parquet"
            self._found[key] = self._read(channel, table, path)
        return self._found[key]

    def _read(self, channel: ChannelRecord, table: ShardTable, path: Path) -> IndexedShards | None:
        assert channel.index is not None
        with suppress(UserError, OSError, ShardError, ConditionError):
            with _indexes(shard_set_of_index(channel.index, self.access)) as indexes:
                if not _write_recorded(indexes, table.names, path):
                    return None
            shards = read_indexed_shards(path, channel.where)
            if shards.digest == channel.digest:
                return shards
        return None


@contextmanager
def _indexes(shards: ShardSet) -> Iterator[list[ShardIndex]]:
    """Open the present index and that of replaced shards."""
    with ExitStack() as stack:
        present, _ = stack.enter_context(shards.open_index())
        replaced = stack.enter_context(shards.open_replaced())
        yield [present] if replaced is None else [present, replaced]


def _write_recorded(indexes: Sequence[ShardIndex], names: Sequence[str], path: Path) -> bool:
    """Write an index of these shards to ``path``; return False if one is in none of ``indexes``."""
    rows = {
        name: (index, row) for index in reversed(indexes) for row, name in enumerate(index.names)
    }
    if not rows.keys() >= {*names}:
        return False
    columns = indexes[0].header.columns
    with path.open("wb") as file, IndexWriter(file, columns=columns) as writer:
        part: list[pa.Table] = []
        samples = 0
        for name in sorted(names):
            index, row = rows[name]
            part.append(index.shard_row(row))
            samples += int(index.samples[row])
            if samples >= GROUP_SAMPLES:
                writer.add_rows(pa.concat_tables(part))
                part, samples = [], 0
        if part:
            writer.add_rows(pa.concat_tables(part))
    return True
