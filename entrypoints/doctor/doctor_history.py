"""Stored results of the doctor: written, compared with, and the nodes that they flagged.

``checkpoints/doctor/TIME.json`` is one result. SageMaker copies the folder to S3 and back, so a
restarted stage finds its own results; the final model carries the newest on to the next stage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sm_train.entrypoints.common.atomic_write import write_atomic
from sm_train.entrypoints.doctor.findings import ClusterFinding
from sm_train.entrypoints.doctor.measurements import ClusterMeasurements

FOLDER = "doctor"
VERSION = 2
MAX_RESULTS = 50
"""Number of newest results that are read."""

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


def write_result(folder: Path, document: dict[str, Any]) -> Path:
    """Write a result atomically; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{document['time'].replace(':', '').replace('-', '')}.json"
    write_atomic(path, (json.dumps(document, indent=1) + "\n").encode())
    return path


def timestamp() -> str:
    """Return the current time in UTC, as results are named and sorted."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def read_results(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Read the results in ``folders``, the oldest first; skips damaged ones."""
    documents = []
    for path in sorted(path for folder in folders for path in folder.glob("*.json")):
        try:
            document = json.loads(path.read_bytes())
            if document["version"] == VERSION:
                documents.append(document)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(documents, key=lambda document: str(document["time"]))[-MAX_RESULTS:]


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


def unfit_nodes(documents: Sequence[dict[str, Any]], since: str) -> list[str]:
    """Return the nodes that results since a time (of :func:`timestamp`) found unfit, by the names
    of their machines, where these are known.
    """
    return sorted(
        {
            node["instance_id"] or node["node"]
            for document in documents
            if str(document["time"]) >= since
            for node in document["flagged_nodes"]
            if node["level"] == "fail"
        }
    )


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
