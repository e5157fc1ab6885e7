"""The list of samples that were removed from a set of shards, next to its index.

Readers skip these samples until their shards have been rewritten without them, and packing never
adds their images again. It is a Parquet file with a row for each sample; its metadata names the
shards that are being rewritten.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

FORMAT = "sm-train-removals"
VERSION = 2

_HEADER_KEY = b"sm-train"
"""Key of the header in the file's metadata."""

SCHEMA = pa.schema(
    [
        pa.field("shard", pa.string()),
        pa.field("key", pa.string()),
        pa.field("source", pa.string()),
        pa.field("removed", pa.string()),
    ]
)
"""A sample's shard and key, its image's source (null if unknown), and the UTC time of its removal
in ISO 8601."""


class RemovalListError(ValueError):
    """The list cannot be read; the message is one line that names it."""


@dataclass(frozen=True, eq=False)
class RemovalList:
    """All samples that were ever removed, with the columns of :data:`SCHEMA`.

    ``rewrites`` maps each shard that is being replaced to the name of its successor, empty if
    nothing is left of it. Both may exist; the index says which one counts. ``history`` has the
    rewrites of each removal, oldest first; one that was interrupted may be among them.
    """

    samples: pa.Table = field(default_factory=SCHEMA.empty_table)
    rewrites: dict[str, str] = field(default_factory=dict)
    history: tuple[dict[str, str], ...] = ()

    @property
    def unfinished(self) -> frozenset[str]:
        """Names of shards that may lie among the others and not be in the index."""
        return frozenset({*self.rewrites, *self.rewrites.values()} - {""})

    @cached_property
    def sources(self) -> frozenset[str]:
        """The sources of all images that were removed, as far as they are known."""
        return frozenset(self.samples["source"].drop_null().to_pylist())

    @property
    def days(self) -> dict[str, int]:
        """How many samples were removed on each day; one of several versions of a shard counts."""
        shards, keys, moments = (
            self.samples[name].to_pylist() for name in ("shard", "key", "removed")
        )
        first: dict[tuple[str, str], str] = {}
        for shard, key, moment in zip(shards, keys, moments, strict=True):
            oldest = self.predecessors(shard)[-1]
            first.setdefault((oldest, key), moment[:10])
        return dict(sorted(Counter(first.values()).items()))

    @cached_property
    def successors(self) -> dict[str, str]:
        """Old → new names of all rewrites; the new one is empty if nothing is left."""
        return {old: new for rewrites in self.history for old, new in rewrites.items()}

    @cached_property
    def _olds(self) -> dict[str, str]:
        return {new: old for old, new in self.successors.items() if new}

    def predecessors(self, shard: str) -> list[str]:
        """Return a shard, and the ones that it has replaced, newest first."""
        found = [shard]
        while (old := self._olds.get(found[-1])) is not None:
            found.append(old)
        return found

    def earlier_names(self, names: Collection[str]) -> Iterator[list[str]]:
        """Yield the names of all shards before each removal, the newest first.

        ``names`` are the present ones.
        """
        found = {*names}
        for rewrites in reversed(self.history):
            found |= {old for old, new in rewrites.items() if not new or new in found}
            found -= {*rewrites.values()}
            yield sorted(found)

    def keys_by_shard(self, shards: pa.Array) -> dict[str, frozenset[str]]:
        """Return the keys of the removed samples of those of ``shards`` that have any."""
        here = self.samples.filter(pc.is_in(self.samples["shard"], value_set=shards))
        keys: dict[str, set[str]] = {}
        for shard, key in zip(here["shard"].to_pylist(), here["key"].to_pylist(), strict=True):
            keys.setdefault(shard, set()).add(key)
        return {shard: frozenset(found) for shard, found in keys.items()}

    def with_samples(self, rows: Iterable[dict[str, str | None]]) -> RemovalList:
        """Return the list with more rows of :data:`SCHEMA`."""
        added = pa.Table.from_pylist(list(rows), SCHEMA)
        return replace(self, samples=pa.concat_tables([self.samples, added]))

    def with_rewrites(self, rewrites: dict[str, str]) -> RemovalList:
        """Return the list with these unfinished rewrites instead of its own."""
        new = {old: new for old, new in rewrites.items() if self.rewrites.get(old) != new}
        history = (*self.history, new) if new else self.history
        return replace(self, rewrites=rewrites, history=history)

    def of_emptied_set(self) -> RemovalList:
        """Return the list for a new pack of the same place, which has other shards and keys.

        It keeps the images, by their sources, which are never packed again.
        """
        names = self.samples["source"].drop_null().unique().to_pylist()
        removed = dict(
            zip(
                self.samples["source"].to_pylist(), self.samples["removed"].to_pylist(), strict=True
            )
        )
        rows = [
            {"shard": "", "key": name, "source": name, "removed": removed[name]} for name in names
        ]
        return RemovalList(pa.Table.from_pylist(rows, SCHEMA))

    def encode(self) -> bytes:
        """Return the content of the file."""
        header = {
            "format": FORMAT,
            "version": VERSION,
            "rewrites": self.rewrites,
            "history": self.history,
        }
        metadata = {_HEADER_KEY: json.dumps(header, sort_keys=True).encode()}
        content = io.BytesIO()
        pq.write_table(
            self.samples.replace_schema_metadata(metadata),
            content,
            compression="zstd",
            write_page_checksum=True,
        )
        return content.getvalue()


def decode_list(content: bytes, address: str) -> RemovalList:
    """Parse what :meth:`RemovalList.encode` returned; ``address`` names it in errors.

    Raises:
        RemovalListError: it is damaged, or of a later version.
    """
    try:
        table = pq.read_table(io.BytesIO(content), page_checksum_verification=True)
        header = json.loads((table.schema.metadata or {}).get(_HEADER_KEY, b"{}"))
        samples = table.replace_schema_metadata(None).cast(SCHEMA)
    except (pa.ArrowException, OSError, ValueError) as error:
        detail = next(iter(str(error).splitlines()), type(error).__name__)
        raise RemovalListError(f"{address}: not a list of removed samples: {detail}") from None
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        raise RemovalListError(
            f"{address}: not a list of removed samples of version {VERSION}; delete it, and remove "
            "the samples again with `sm-train remove`"
        )
    return RemovalList(samples, header["rewrites"], tuple(header["history"]))
