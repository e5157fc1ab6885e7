"""The places that a run may go to when machines cannot be had."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from sm_train.estimators.config.placement import Placement, placements
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.packing.shard_listing import ShardListing
from sm_train.toolkit.submit.submission import other_start
from sm_train.toolkit.terminal.formatting import format_duration

FALLBACK_START = Check(
    "fallback-start",
    ("error",),
    means="A stage would start another way at a fallback than at the run's own place: by SMDDP at "
    "one and by torchrun at the other, from images with another PyTorch.",
    impact="`submit` refuses the run: the start script of the one is not staged for the other.",
    fix="Write `cluster.backend: nccl`, or take only p4d and p4de.",
)
FALLBACK_LATE = Check(
    "fallback-late",
    ("warning",),
    means="A job on spot machines waits for them until `cluster.max_wait`, which is no less than "
    "`cluster.max_runtime`, and only then the next place is tried.",
    impact="Days without training. Waiting itself is not billed.",
    fix="Write `cluster.max_pending`, 30 minutes at least: the job is given up after it.",
    source="SageMaker API reference, StoppingCondition (2026-11)",
)
FALLBACK_DATA = Check(
    "fallback-data",
    ("error",),
    means="The bucket that stands for the run's own at a fallback holds other shards, or not all "
    "of them.",
    impact="The run would go on with other data in the middle of an epoch: samples are lost or "
    "come "
    "twice.",
    fix="Copy the shards with their index (`aws s3 sync`, or S3 replication with a batch job for "
    "what was there before).",
)


def fallback_findings(config: RunConfig, region: str) -> Iterator[Finding]:
    """What the run file says of its places."""
    every = placements(config, region)
    for place in every[1:]:
        if problem := other_start(config, place):
            message, _, fix = problem.partition("; ")
            yield FALLBACK_START.found("error", place.where, message, fix)
    for place in every if len(every) > 1 else ():
        cluster = place.config.cluster
        if cluster.capacity == "spot" and cluster.max_pending is None:
            wait = format_duration(cluster.max_wait or cluster.max_runtime)
            yield FALLBACK_LATE.found(
                "warning",
                "cluster.max_pending" if place.number == 0 else place.where,
                f"spot machines in {place.region} are waited for as long as {wait} before the next "
                "place is tried",
                "write max_pending: 30m",
            )


def data_findings(place: Placement, own: ShardListing, there: ShardListing) -> Iterator[Finding]:
    """The shards of another region against the run's own."""
    here = {one.name: one.bytes for one in own.shards}
    copies = {one.name: one.bytes for one in there.shards}
    wrong = sorted(here.items() ^ copies.items())
    if wrong:
        names = sorted({name for name, _ in wrong})
        yield FALLBACK_DATA.found(
            "error",
            place.where,
            f"{place.config.data.uri}: {len(names):,} shards are missing, too many or of another "
            f"size, such as {names[0]}",
            "copy the shards with their index",
        )


def found_at(place: Placement, findings: Iterable[Finding]) -> Iterator[Finding]:
    """What other checks find of a place, as the run file's key for it."""
    machine = place.config.cluster.instance_type
    for one in findings:
        message = f"{machine} in {place.region}: {one.message}"
        yield replace(one, where=place.where, message=message)
