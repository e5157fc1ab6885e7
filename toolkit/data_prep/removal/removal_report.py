"""Describes a removal before it starts and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

from sm_train.toolkit.data_prep.removal.find_samples import FoundSample
from sm_train.toolkit.data_prep.removal.remove_samples import RemovalPlan, RemovalResult
from sm_train.toolkit.terminal.formatting import plural

_MAX_NAMED = 10
"""Samples or shards that are named; ``--json`` lists all."""


class SampleDocument(TypedDict):
    """A sample to remove; ``source`` is null if the name of its image is unknown."""

    shard: str
    key: str
    source: str | None


class RemovalDocument(TypedDict):
    """The output of ``remove --json``.

    ``samples`` are those that this command found, ``listed`` the number of removed samples in
    shards that an earlier one has not rewritten, and ``shards`` those with samples of either. The
    others are what was done, null with ``--dry-run``: ``rewritten`` is old → new names of shards
    (empty if nothing is left), ``deleted`` and ``kept`` are old ones; ``used_by`` are the jobs for
    which they are kept, ``jobs_unknown`` says why others are unknown, and ``versions_kept`` why
    earlier versions in S3 remain.
    """

    shards_path: str
    samples: list[SampleDocument]
    listed: int
    shards: list[str]
    rewritten: dict[str, str] | None
    deleted: list[str] | None
    kept: list[str] | None
    used_by: list[str] | None
    jobs_unknown: str | None
    versions_kept: str | None


def plan_lines(plan: RemovalPlan) -> Iterator[str]:
    """Yield the lines that say what a removal will do."""
    address = plan.shard_set.address
    if plan.is_empty:
        yield f"{address}: nothing to remove"
        return
    if plan.samples:
        yield (
            f"removes {len(plan.samples):,} of {plural(plan.total_samples, 'sample')} from "
            f"{address}:"
        )
        yield from (f"  {_describe(sample)}" for sample in plan.samples[:_MAX_NAMED])
        if len(plan.samples) > _MAX_NAMED:
            yield f"  … and {len(plan.samples) - _MAX_NAMED:,} more; --json lists all"
    if plan.listed:
        yield f"{plural(plan.listed, 'sample')} removed earlier, whose shards are not rewritten yet"
    if plan.shards:
        yield (
            f"rewrites {len(plan.shards):,} of {plural(plan.total_shards, 'shard')} under new "
            f"names: {plan.bytes / 1e6:,.1f} MB are read and written through this computer"
        )
    if plan.leftover:
        yield f"deletes {plural(len(plan.leftover), 'old shard')} unless a live job reads them"


def result_lines(plan: RemovalPlan, result: RemovalResult) -> Iterator[str]:
    """Yield the lines that say what was removed, and where the images still are."""
    shards = plan.shard_set
    location = shards.storage.address(shards.list_file)
    if result.listed:
        yield (
            f"listed {plural(result.listed, 'sample')} in {location}: jobs skip them from their "
            "next start or epoch on"
        )
    if result.rewritten:
        yield f"rewrote {plural(len(result.rewritten), 'shard')}; the index lists the new ones"
    if result.deleted:
        yield f"deleted {plural(len(result.deleted), 'old shard')}"
    if result.kept:
        names = ", ".join(result.kept[:_MAX_NAMED]) + (", …" * (len(result.kept) > _MAX_NAMED))
        users = ", ".join(result.users.jobs) or f"jobs are unknown ({result.users.problem})"
        yield (
            f"kept {plural(len(result.kept), 'old shard')} with the images, because "
            f"{'they may be read by ' if result.users.jobs else ''}{users}: {names}; run "
            f"`sm-train remove {_destination(plan)}` again to delete them"
        )
    if result.versions is not None:
        yield (
            f"warning: earlier versions of the deleted shards remain in {shards.address}: "
            f"{result.versions}; delete them with s3:DeleteObjectVersion and "
            "s3:ListBucketVersions"
        )
    if result.listed:
        yield (
            "the images may still be in their source, in other packs and in copies in other "
            "regions; models that have seen them do not change"
        )


def _destination(plan: RemovalPlan) -> str:
    shards = plan.shard_set
    is_pack = shards.name == "shards"
    return shards.storage.address("").rstrip("/") if is_pack else shards.address


def _describe(sample: FoundSample) -> str:
    name = f"{sample.key} in {sample.shard}"
    return name if sample.source is None else f"{name} ({sample.source})"


def removal_document(plan: RemovalPlan, result: RemovalResult | None) -> RemovalDocument:
    """Return the document that ``remove --json`` prints."""
    return {
        "shards_path": plan.shard_set.address,
        "samples": [
            {"shard": sample.shard, "key": sample.key, "source": sample.source}
            for sample in plan.samples
        ],
        "listed": plan.listed,
        "shards": list(plan.shards),
        "rewritten": None if result is None else result.rewritten,
        "deleted": None if result is None else list(result.deleted),
        "kept": None if result is None else list(result.kept),
        "used_by": None if result is None else list(result.users.jobs),
        "jobs_unknown": None if result is None else result.users.problem,
        "versions_kept": None if result is None else result.versions,
    }
