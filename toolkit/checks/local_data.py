"""The shards on this machine, against their index and for damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sm_train.entrypoints.data.shard_format import ShardError, verify_shard
from sm_train.entrypoints.data.shard_index import ShardIndex, index_path
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.checks.shards import Shards, of_index, of_listing
from sm_train.toolkit.packing.shard_listing import list_folder

NO_SHARDS = Check(
    "no-shards",
    ("error",),
    means="The folder or the prefix of the run's shards is not there, or holds no `.tar`.",
    impact="The job fails when machines have been waited for.",
    fix="`sm-train pack` makes shards; `aws s3 sync packed s3://BUCKET` uploads them. Look for a "
    "slip in `data.uri`.",
)
INDEX_STALE = Check(
    "index-stale",
    ("error",),
    means="The index and the shards do not belong together: a shard is not there, is not in the "
    "index, or has another size.",
    impact="A job refuses an index that does not know its shards, after its start.",
    fix="Run `sm-train index` on the shards, or upload the index that was packed with them.",
)
BROKEN_SHARD = Check(
    "broken-shard",
    ("error",),
    means="A shard without an index was read and is cut short or damaged.",
    impact="Its samples are lost to the run; over `data.max_bad_fraction` the job stops.",
    fix="Pack or fetch the shard again.",
)

_NAMED = 20


def read_local(folder: Path) -> tuple[Shards | None, list[Finding]]:
    """The shards of ``data.local`` with what is wrong with them; None where there are none."""
    listed = list_folder(folder)
    if not listed:
        message = f"{folder} holds no .tar"
        return None, [NO_SHARDS.found("error", "data.local", message, "run sm-train pack")]
    try:
        index = ShardIndex(index_path(folder))
        described = of_index(index, "data.local")
        known = dict(zip(index.names, index.bytes.tolist(), strict=True))
    except (OSError, ShardError):
        return of_listing(listed, "data.local", str(folder)), list(_broken(folder))
    found = {one.name: one.bytes for one in listed}
    if found == known:
        return described, []
    stale = list(index_differences(found, known, "data.local"))
    return of_listing(listed, "data.local", str(folder)), stale


def index_differences(
    found: dict[str, int], known: dict[str, int], where: str
) -> Iterator[Finding]:
    """By name and bytes: reading shards that an index describes would take hours, each time."""
    differ = [name for name in sorted(found.keys() | known.keys()) if _differ(name, found, known)]
    for name in differ[:_NAMED]:
        said = f"{known[name]:,} bytes" if name in known else "nothing"
        real = f"has {found[name]:,} bytes" if name in found else "is not there"
        yield INDEX_STALE.found(
            "error",
            where,
            f"{name} {real}, the index says {said}",
            "run sm-train index, or pack it again",
        )
    if len(differ) > _NAMED:
        yield INDEX_STALE.found(
            "error",
            where,
            f"and {len(differ) - _NAMED:,} more differ from the index",
            "run sm-train index",
        )


def _differ(name: str, found: dict[str, int], known: dict[str, int]) -> bool:
    return found.get(name) != known.get(name)


def _broken(folder: Path) -> Iterator[Finding]:
    for one in list_folder(folder):
        try:
            verify_shard(folder / one.name)
        except ShardError as error:
            yield BROKEN_SHARD.found("error", "data.local", str(error), "pack it again")
