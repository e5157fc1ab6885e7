"""Comparison of a result of the doctor with those that the run has stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sm_train.entrypoints.probes.findings import ClusterFinding
from sm_train.entrypoints.probes.measurements import ClusterMeasurements

MIN_SLOWDOWN = 0.1
"""A network that is slower than the last result's by less than this share is within noise."""

SEEN_BEFORE = "seen-before"


@dataclass(frozen=True)
class EarlierResult:
    """What comparisons need of a result; ``flagged`` are (instance id, code of the finding)."""

    time: str
    instance_type: str | None
    backend: str
    nodes: int
    world_size: int
    network: float | None
    flagged: tuple[tuple[str, str], ...]


def parse_results(documents: Sequence[dict[str, Any]]) -> list[EarlierResult]:
    """Return what comparisons need of ``documents``."""
    return [
        EarlierResult(
            time=document["time"],
            instance_type=document["measurements"]["instance_type"],
            backend=document["measurements"]["backend"],
            nodes=len(document["measurements"]["nodes"]),
            world_size=document["measurements"]["world_size"],
            network=document["network"],
            flagged=tuple(
                (node["instance_id"], node["code"]) for node in document["flagged_nodes"]
            ),
        )
        for document in documents
    ]


def flagged_nodes(
    cluster: ClusterMeasurements, findings: Sequence[ClusterFinding]
) -> list[dict[str, Any]]:
    """Return the faulty nodes that a result records, with the instance id where it is known."""
    instance_ids = {rank.node: rank.instance_id for rank in cluster.ranks}
    faults = sorted(
        {(node, finding.code, finding.level) for finding in findings for node in finding.nodes}
    )
    return [
        {
            "node": cluster.name(node),
            "instance_id": instance_ids.get(node),
            "code": code,
            "level": level,
        }
        for node, code, level in faults
        if code != SEEN_BEFORE
    ]


def compare(
    cluster: ClusterMeasurements, network: float | None, earlier: Sequence[EarlierResult]
) -> Iterator[ClusterFinding]:
    """Compare with the last result of the same kind of cluster, and find nodes flagged before."""
    kind = (cluster.instance_type, cluster.backend, len(cluster.node_names), cluster.world_size)
    similar = [
        result
        for result in earlier
        if (result.instance_type, result.backend, result.nodes, result.world_size) == kind
        and result.network
    ]
    if similar and network:
        last = similar[-1]
        slowdown = 1 - network / (last.network or network)
        if slowdown > MIN_SLOWDOWN:
            yield ClusterFinding(
                "slower-than-last",
                "warn",
                f"the network is {slowdown:.0%} slower than in the last result ({last.time[:10]}, "
                f"{(last.network or 0) / 1e9:.3g} GB/s on as many nodes)",
                "these instances may be placed farther apart, or one is slow: see the pairs",
            )
    # instance id → (date, code) of each time it was flagged
    flagged: dict[str, list[tuple[str, str]]] = {}
    for result in earlier:
        for instance_id, code in result.flagged:
            if instance_id:
                flagged.setdefault(instance_id, []).append((result.time[:10], code))
    instance_ids = {rank.node: rank.instance_id or "" for rank in reversed(cluster.ranks)}
    for node in cluster.nodes:
        for date, code in flagged.get(instance_ids[node], [])[-1:]:
            yield ClusterFinding(
                SEEN_BEFORE,
                "warn",
                f"{cluster.name(node)} was flagged before: {code} on {date}",
                "stop the job and submit it again if it is slow once more",
                (node,),
            )
