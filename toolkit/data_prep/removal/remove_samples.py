"""Removes samples: lists them first, then rewrites their shards, then deletes the old ones.

The list takes effect at once: readers skip what it names. Each further step may be interrupted; the
next `sm-train remove` resumes it. The index switches to the new shards in one conditional
write, and an old shard is deleted when no live job may read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sm_train.entrypoints.shards.removal_list import RemovalList
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.storage.storage import S3Prefix
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.packing.shard_set import ShardSet
from sm_train.toolkit.data_prep.processing.destination_lock import lock_destination
from sm_train.toolkit.data_prep.removal.find_samples import FoundSample, find_samples
from sm_train.toolkit.data_prep.removal.rewrite_shards import (
    RECORDS,
    Rewrite,
    rewrite_shards,
    successor,
    switch_index,
)
from sm_train.toolkit.data_prep.removal.shard_users import RecordedJob, ShardUsers, users_since, utc

Progress = Callable[[int, int], None]
"""Progress callback ``(bytes_rewritten, bytes_total)``."""


@dataclass(frozen=True)
class RemovalPlan:
    """What a removal will do: ``samples`` are not listed yet, ``listed`` are, in shards that exist.

    ``shards`` are the names of all shards with samples of either, which have ``bytes``, and
    ``total_samples`` and ``total_shards`` those of the whole set. ``leftover`` are old shards that
    an earlier removal could not delete.
    """

    shard_set: ShardSet
    samples: tuple[FoundSample, ...]
    listed: int
    shards: tuple[str, ...]
    bytes: int
    total_samples: int
    total_shards: int
    leftover: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.samples or self.shards or self.leftover)


@dataclass(frozen=True)
class RemovalResult:
    """What was observed.

    ``listed`` samples were added to the list; ``rewritten`` are old → new names of shards, the new
    one empty if nothing is left. ``deleted`` are old shards, and ``kept`` those that still hold the
    images, because ``users`` may read them. ``versions`` says why earlier versions in S3 were not
    deleted; None if they were, or there are none.
    """

    listed: int
    rewritten: dict[str, str]
    deleted: tuple[str, ...]
    kept: tuple[str, ...]
    users: ShardUsers
    versions: str | None = None


def plan_removal(shards: ShardSet, names: Sequence[str], where: str | None) -> RemovalPlan:
    """Find the samples to remove, and the shards to rewrite; nothing is written.

    Without names and a condition it is what an earlier removal left to do.

    Raises:
        UserError: there is no index, or one of the names is no sample.
    """
    removals = shards.read_list()
    with shards.open_index() as (index, _):
        is_asked = where is not None or bool(names)
        wanted = find_samples(shards, index, names, where, removals) if is_asked else []
        known = _keys(removals, index)
        samples = [sample for sample in wanted if sample.key not in known.get(sample.shard, ())]
        listed = sum(map(len, known.values()))
        if len(samples) + listed >= index.header.samples:
            raise UserError(f"{shards.address}: no sample would be left; delete the whole set")
        affected = sorted({*known, *(sample.shard for sample in samples)})
        sizes = dict(zip(index.names, index.bytes.tolist(), strict=True))
        return RemovalPlan(
            shards,
            tuple(samples),
            listed,
            tuple(affected),
            sum(sizes[name] for name in affected),
            index.header.samples,
            len(index),
            tuple(sorted(old for old in removals.rewrites if old not in sizes)),
        )


def _keys(removals: RemovalList, index: ShardIndex) -> dict[str, frozenset[str]]:
    """Return the keys of the removed samples of each shard that the index still has."""
    return removals.keys_by_shard(index.name_column())


def remove_samples(
    plan: RemovalPlan,
    progress: Progress,
    regions: Sequence[str] = (),
    recorded: Sequence[RecordedJob] = (),
) -> RemovalResult:
    """List the samples of ``plan``, rewrite their shards, and delete the old ones if possible.

    ``regions`` are further ones in which SageMaker's jobs may read the shards. ``recorded`` are
    jobs outside of SageMaker that may still read them.

    Raises:
        UserError: another command writes to the destination, or has written the index.
        OSError: something cannot be read or written.
    """
    shards = plan.shard_set
    with lock_destination(shards.storage):
        removals = _list(shards, plan.samples)
        rewritten = _rewrite(shards, removals, progress)

        def find_users(moment: datetime) -> ShardUsers:
            return users_since(shards, moment, regions, recorded)

        return _delete_old(shards, len(plan.samples), rewritten, find_users)


def _list(shards: ShardSet, samples: Sequence[FoundSample]) -> RemovalList:
    """Add samples to the list, which stops their use."""
    removals = shards.read_list()
    if not samples:
        return removals
    now = datetime.now(UTC).isoformat(timespec="seconds")
    listed = set(
        zip(removals.samples["shard"].to_pylist(), removals.samples["key"].to_pylist(), strict=True)
    )
    added = removals.with_samples(
        {"shard": shard, "key": sample.key, "source": sample.source, "removed": now}
        for sample in samples
        for shard in removals.predecessors(sample.shard)
        if (shard, sample.key) not in listed
    )
    shards.write_list(added)
    return added


def _rewrite(shards: ShardSet, removals: RemovalList, progress: Progress) -> dict[str, str]:
    """Rewrite the shards with listed samples, and switch the index; return old → new names."""
    with shards.open_index() as (index, version):
        keys = _keys(removals, index)
        if not keys:
            return {}
        names = index.names
        rows = {name: row for row, name in enumerate(names)}
        total, done = sum(int(index.bytes[rows[name]]) for name in keys), 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total)

        taken = {*names, *removals.unfinished}
        rewrites = []
        for old, removed in sorted(keys.items()):
            planned = removals.rewrites.get(old)
            if removed.issuperset(index.keys(rows[old])):
                if planned:  # what an interrupted removal has left of it
                    shards.storage.remove(shards.shard_file(planned))
                new = ""
            else:
                new = planned or successor(old, taken)
                taken.add(new)
            rewrites.append(Rewrite(old, new, removed))
        renamed = {rewrite.old: rewrite.new for rewrite in rewrites}
        # Before a new shard exists: readers ignore names that the list gives as unfinished.
        shards.write_list(removals.with_rewrites({**removals.rewrites, **renamed}))
        written = rewrite_shards(shards, index, rewrites, advance)
        switch_index(shards, index, version, written)
        return renamed


def _delete_old(
    shards: ShardSet,
    listed: int,
    rewritten: dict[str, str],
    find_users: Callable[[datetime], ShardUsers],
) -> RemovalResult:
    """Delete the shards that the index no longer has, unless a job may read them."""
    removals, storage = shards.read_list(), shards.storage
    old = sorted(removals.rewrites)
    storage.remove_folder(RECORDS)
    if not old:
        return RemovalResult(listed, rewritten, (), (), ShardUsers())
    users = find_users(utc(storage.modified_ns(shards.index_file)))
    if users.jobs or users.problem is not None:
        return RemovalResult(listed, rewritten, (), tuple(old), users)
    versions = None
    for name in old:
        problem = _delete(shards, name)
        versions = versions or problem
    shards.write_list(removals.with_rewrites({}))
    return RemovalResult(listed, rewritten, tuple(old), (), users, versions)


def _delete(shards: ShardSet, name: str) -> str | None:
    """Delete a shard with its earlier versions; return why those remain, None if they do not."""
    file = shards.shard_file(name)
    if not isinstance(shards.storage, S3Prefix):
        shards.storage.remove(file)
        return None
    from botocore.exceptions import ClientError

    try:
        shards.storage.remove_versions(file)
    except ClientError as error:
        shards.storage.remove(file)
        return error.response["Error"].get("Code", "") or " ".join(str(error).split())
    return None
