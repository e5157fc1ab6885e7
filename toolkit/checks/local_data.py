"""Checks the shards on this machine: against their index, or for damage if there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sm_train.entrypoints.job_interface.index_location import index_path, is_streamed
from sm_train.entrypoints.shards.removed_samples import without_replaced
from sm_train.entrypoints.shards.shard_format import ShardError
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.shards.shard_verification import verify_shard
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.checks.shards import Shards, of_index, of_listing
from sm_train.toolkit.shards.shard_listing import list_folder

NO_SHARDS = Check("no-shards", ("error",))
INDEX_STALE = Check("index-stale", ("error",))
BROKEN_SHARD = Check("broken-shard", ("error",))

_LISTED = 20


def read_local(folder: Path) -> tuple[Shards | None, list[Finding]]:
    """Return the shards of ``data.local``, None if there are none, and their problems."""
    listed = list_folder(folder)
    if not listed:
        message = f"{folder} has no .tar file"
        return None, [NO_SHARDS.found("error", "data.local", message, "run sm-train pack")]
    try:
        index = ShardIndex(index_path(folder))
        from_index = of_index(index, "data.local")
        indexed = dict(zip(index.names, index.bytes.tolist(), strict=True))
    except (OSError, ShardError):
        return of_listing(listed, "data.local", str(folder)), list(_broken(folder))
    sizes = {shard.name: shard.bytes for shard in listed}
    sizes = without_replaced(sizes, index_path(folder), lambda: index.names)
    if sizes == indexed:
        return from_index, []
    stale = list(index_differences(sizes, indexed, "data.local"))
    return of_listing(listed, "data.local", str(folder)), stale


def index_differences(
    sizes: dict[str, int], indexed: dict[str, int], where: str
) -> Iterator[Finding]:
    """Compare the shards' names and sizes in bytes with those in their index.

    Contents are not compared: reading every indexed shard on every check would take hours.
    """
    names = sorted(sizes.keys() | indexed.keys())
    # A shard that was sealed from images that arrived may not be in the index yet.
    names = [name for name in names if name in indexed or not is_streamed(name)]
    differ = [name for name in names if sizes.get(name) != indexed.get(name)]
    for name in differ[:_LISTED]:
        actual = f"has {sizes[name]:,} bytes" if name in sizes else "does not exist"
        in_index = f"lists {indexed[name]:,} bytes" if name in indexed else "does not list it"
        yield INDEX_STALE.found(
            "error",
            where,
            f"{name} {actual}, but the index {in_index}",
            "run sm-train index, or pack it again",
        )
    if len(differ) > _LISTED:
        yield INDEX_STALE.found(
            "error",
            where,
            f"{len(differ) - _LISTED:,} more shards differ from the index",
            "run sm-train index",
        )


def _broken(folder: Path) -> Iterator[Finding]:
    for shard in list_folder(folder):
        try:
            verify_shard(folder / shard.name)
        except ShardError as error:
            yield BROKEN_SHARD.found("error", "data.local", str(error), "pack it again")
