"""Finds what an index says of the shards that a job read, also after it has changed.

Shards that were added since are left out, and those that were rewritten without removed samples are
taken from the index of replaced shards. The recorded digest shows whether it is the same data.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType

from sm_train.entrypoints.data_loading.indexed_shards import (
    IndexedShards,
    named_shards,
    select_from,
)
from sm_train.entrypoints.lineage.data_record import ChannelRecord, ShardTable
from sm_train.entrypoints.sample_metadata.row_filter import ConditionError
from sm_train.entrypoints.shards.shard_format import ShardError
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.packing.shard_set import shard_set_of_index


@dataclass(eq=False)
class RecordedIndexes:
    """The shards of recorded channels; a context manager, which closes their indexes at the end."""

    access: S3Access
    _open: ExitStack = field(default_factory=ExitStack)
    _indexes: dict[str, list[ShardIndex]] = field(default_factory=dict)
    _found: dict[tuple[str, str, str | None], IndexedShards | str] = field(default_factory=dict)

    def __enter__(self) -> RecordedIndexes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()

    def shards_of(self, channel: ChannelRecord, table: ShardTable) -> IndexedShards | str:
        """Return the shards of a channel as its index describes them, or why that is unknown."""
        if channel.index is None:
            return "they had no index"
        key = (channel.index, channel.digest, channel.where)
        if key not in self._found:
            try:
                self._found[key] = self._read(channel, channel.index, table)
            except (UserError, OSError, ShardError, ConditionError) as error:
                self._found[key] = str(error)
        return self._found[key]

    def _read(self, channel: ChannelRecord, index: str, table: ShardTable) -> IndexedShards | str:
        sources = [
            select_from(opened, channel.where, may_be_empty=True) for opened in self._opened(index)
        ]
        shards = named_shards(sources, table.names)
        if shards is None:
            known = {name for source in sources for name in source.index.names}
            return f"{index} does not describe {min({*table.names} - known)}"
        if shards.digest != channel.digest:
            return f"{index} gives digest {shards.digest}, and the job recorded {channel.digest}"
        return shards

    def _opened(self, index: str) -> list[ShardIndex]:
        """Open the present index and that of replaced shards."""
        if index not in self._indexes:
            shards = shard_set_of_index(index, self.access)
            present, _ = self._open.enter_context(shards.open_index())
            replaced = self._open.enter_context(shards.open_replaced())
            self._indexes[index] = [present] if replaced is None else [present, replaced]
        return self._indexes[index]
