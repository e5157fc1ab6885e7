"""Checks of the placements a job may relocate to, and the same checks for each placement."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date

from sm_train.estimators.config.placement import placements, unique_placements
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding, Subject, found_at
from sm_train.toolkit.checks.image import image_findings
from sm_train.toolkit.checks.memory import memory_findings
from sm_train.toolkit.planning.run_price import estimate_run
from sm_train.toolkit.shards.shard_listing import ShardListing
from sm_train.toolkit.terminal.formatting import format_duration

FALLBACK_LATE = Check("fallback-late", ("warning",))
FALLBACK_DATA = Check("fallback-data", ("error",))


def relocated_subjects(subject: Subject) -> Iterator[Subject]:
    """Yield the run at each of its fallbacks."""
    for placement in placements(subject.config, subject.region)[1:]:
        yield Subject(
            placement.config,
            placement.region,
            estimate_run(placement.config, placement.region, stated=subject.config),
            subject.base,
            number=placement.number,
            key=placement.key,
        )


def memory_findings_of_clusters(config: RunConfig, region: str) -> Iterator[Finding]:
    """Check the memory on each cluster that a job may get; that of an own script is unknown."""
    if config.entry is not None:
        return
    home, *others = unique_placements(config, region)
    yield from memory_findings(home.config)
    for other in others:
        yield from found_at(other, memory_findings(other.config))


def relocation_findings(config: RunConfig, region: str, today: date) -> Iterator[Finding]:
    """Check the run file's fallbacks."""
    every = placements(config, region)
    for placement in every if len(every) > 1 else ():
        cluster = placement.config.cluster
        if cluster.capacity == "spot" and cluster.max_pending is None:
            wait = format_duration(cluster.max_wait or cluster.max_runtime)
            yield FALLBACK_LATE.found(
                "warning",
                "cluster.max_pending" if placement.number == 0 else placement.key,
                f"a job waits up to {wait} for spot instances in {placement.region} before the "
                "next placement is tried",
                "write max_pending: 30m",
            )
    known = {finding.code for finding in image_findings(config, region, today)}
    for placement in every[1:]:
        found = image_findings(placement.config, placement.region, today)
        yield from found_at(placement, (finding for finding in found if finding.code not in known))


def relocated_data_findings(
    relocated: Subject, home: ShardListing, copies: ShardListing
) -> Iterator[Finding]:
    """Compare the shards in another region with the run's own."""
    expected = {shard.name: shard.bytes for shard in home.shards}
    actual = {shard.name: shard.bytes for shard in copies.shards}
    names = sorted({name for name, _ in expected.items() ^ actual.items()})
    if names:
        yield FALLBACK_DATA.found(
            "error",
            relocated.key,
            f"{relocated.config.data.uri}: {len(names):,} shards are missing, unexpected or of "
            f"another size, such as {names[0]}",
            "copy the shards with their index",
        )
