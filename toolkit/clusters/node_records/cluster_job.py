"""Attempts of a stage on Kubernetes or Slurm, from what their nodes stored: pure functions.

An attempt is a job, so that state, cost and reviews are computed as on SageMaker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import import_module

from sm_train.entrypoints.clusters.attempts import attempts, failed, named
from sm_train.entrypoints.clusters.node_record import NodeRecord, StopRequest, StoredNode
from sm_train.entrypoints.job_interface.node_description import (
    FAILED_AFTER_PROGRESS,
    NOT_SAVED,
    STOPPED,
)
from sm_train.toolkit.clusters.node_records.record_phases import platform_of_nodes
from sm_train.toolkit.records.run_job import LOST, Platform, RunJob

_PLATFORMS = {
    "kubernetes": "sm_train.toolkit.clusters.kubernetes.kubernetes_platform",
    "slurm": "sm_train.toolkit.clusters.slurm.slurm_platform",
}
"""The name of a platform in records → the module with its ``PLATFORM``."""


@cache
def cluster_platform(name: str) -> Platform:
    """Return the platform that records name."""
    if name in _PLATFORMS:
        platform: Platform = import_module(_PLATFORMS[name]).PLATFORM
        return platform
    return platform_of_nodes(name, name.capitalize())


@dataclass(frozen=True)
class ClusterJob(RunJob):
    """One attempt: its ``starts`` of nodes."""

    starts: tuple[StoredNode, ...] = ()

    @property
    def records(self) -> list[NodeRecord]:
        """The records of its nodes."""
        return [start.record for start in self.starts]

    @property
    def may_start_again(self) -> bool:
        """Whether the platform may start it again: it failed, or SIGTERM stopped it."""
        requested = any(record.stopped_by for record in self.records)
        ends = {record.exit_code for record in self.records if record.state == "ended"}
        is_lost = any(record.state != "ended" for record in self.records)
        if NOT_SAVED in ends:
            return False
        codes = self.platform.restarted_codes
        comes_again = codes is None or is_lost or not codes.isdisjoint(ends)
        return self.status in ("Failed", "Stopped") and not requested and comes_again


def cluster_jobs(
    nodes: Sequence[StoredNode],
    checkpoints: str,
    region: str,
    now: float,
    stop: StopRequest | None = None,
) -> list[ClusterJob]:
    """Return the attempts of a stage, oldest first.

    ``nodes`` are all starts of nodes, ``checkpoints`` is the address of the stage's checkpoint
    folder, and ``stop`` the newest request to stop. ``now`` is in Unix seconds.
    """
    groups = attempts(nodes)
    return [
        _job(number, group, checkpoints, region, now if group is groups[-1] else None, stop)
        for number, group in enumerate(groups, start=1)
    ]


def _job(
    number: int,
    starts: Sequence[StoredNode],
    checkpoints: str,
    region: str,
    now: float | None,
    stop: StopRequest | None,
) -> ClusterJob:
    """Return one attempt; ``now`` is None for one that a later attempt has followed."""
    first = starts[0].record
    live = [] if now is None else [start for start in starts if start.is_live(now)]
    begin = min(start.started for start in starts)
    ended, reason = None, ""
    if live:
        status, secondary = "InProgress", _phase(live, first.nodes)
        if stop is not None and stop.applies_to(min(start.started for start in live), first.job_id):
            status = "Stopping"
    else:
        status, secondary, reason = _end(starts)
        ended = _time(max(start.seen for start in starts))
    return ClusterJob(
        f"{first.run}--{first.stage}-{first.platform}-{number:04d}",
        first.run,
        first.stage,
        status,
        platform=cluster_platform(first.platform),
        region=region,
        created=_time(begin),
        instances=(first.instance_type, len(starts)),
        nodes=tuple(start.record.node for start in starts),
        stop_command=first.commands.get("stop"),
        checkpoint_uri=checkpoints.rstrip("/"),
        secondary_status=secondary,
        started=_time(begin),
        ended=ended,
        failure_reason=reason,
        # Nodes start and end at different times: the mean of their times is that of each.
        reported_seconds=sum(start.record.ran for start in starts) / len(starts),
        starts=tuple(starts),
    )


def _phase(live: Sequence[StoredNode], nodes: int) -> str:
    """Return the secondary status of an attempt with live nodes."""
    if len(live) < nodes:
        return f"{len(live)} of {nodes} nodes"
    return "Training" if all(start.record.state == "training" for start in live) else "Starting"


def _end(starts: Sequence[StoredNode]) -> tuple[str, str, str]:
    """Return status, secondary status and reason of an attempt without live nodes."""
    lost = [start for start in starts if start.record.state != "ended"]
    if ended := failed(starts):
        progress = any(start.record.exit_code == FAILED_AFTER_PROGRESS for start in ended)
        codes = sorted({f"{start.record.exit_code}" for start in ended})
        reason = f"{named(ended)} ended with exit code {', '.join(codes)}"
        reason += ", after a new checkpoint was stored" if progress else ""
        if any(start.record.exit_code == NOT_SAVED for start in ended):
            reason += ": its last checkpoint is not stored"
        return "Failed", "Failed", reason
    if lost:
        since = _time(max(start.seen for start in lost))
        reason = f"no heartbeat of {named(lost)} since {since:%Y-%m-%d %H:%M} UTC"
        return "Failed", LOST, reason
    records = [start.record for start in starts]
    requested = next((record.stopped_by for record in records if record.stopped_by), None)
    if requested is not None:
        return "Stopped", "Stopped", f"{requested} asked for the stop"
    if any(record.exit_code == STOPPED for record in records):
        return "Stopped", "Stopped", "SIGTERM stopped it after a checkpoint"
    return "Completed", "Completed", ""


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
