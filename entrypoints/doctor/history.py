"""The doctor's results beside the run: kept, compared with, and what they remember of nodes.

``checkpoints/doctor/TIME.json`` is one result. SageMaker copies the folder to S3 and back, so a
restarted stage finds its own; the final model carries the newest on to the next stage.
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
VERSION = 1
REMEMBERED = 50
"""Results that are looked at, the newest."""

NOTEWORTHY = 0.1
"""A smaller difference from the last result is chance."""


@dataclass(frozen=True)
class Earlier:
    """What an earlier result says; ``accused`` are instance ids with the code of the finding."""

    time: str
    instance_type: str | None
    backend: str
    nodes: int
    world_size: int
    network: float | None
    accused: tuple[tuple[str, str], ...]


def keep(folder: Path, document: dict[str, Any]) -> Path:
    """Write a result, whole or not at all; returns where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{document['time'].replace(':', '').replace('-', '')}.json"
    write_atomic(path, (json.dumps(document, indent=1) + "\n").encode())
    return path


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def results(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The results in ``folders``, the oldest first; damaged ones are passed over."""
    found = []
    for path in sorted(path for folder in folders for path in folder.glob("*.json")):
        try:
            document = json.loads(path.read_bytes())
            if document["version"] == VERSION:
                found.append(document)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda one: str(one["time"]))[-REMEMBERED:]


def earlier(documents: Sequence[dict[str, Any]]) -> list[Earlier]:
    """What comparisons need of results."""
    return [
        Earlier(
            time=one["time"],
            instance_type=one["evidence"]["instance_type"],
            backend=one["evidence"]["backend"],
            nodes=len(one["evidence"]["hosts"]),
            world_size=one["evidence"]["world_size"],
            network=one["network"],
            accused=tuple((node["instance_id"], node["code"]) for node in one["accused"]),
        )
        for one in documents
    ]


def accused(evidence: ClusterMeasurements, found: Sequence[ClusterFinding]) -> list[dict[str, Any]]:
    """The nodes that a result remembers as failed or slow; by instance id where it is visible."""
    ids = {one.node: one.instance_id for one in evidence.members}
    seen = sorted({(node, one.code) for one in found for node in one.nodes})
    return [
        {"host": evidence.name(node), "instance_id": ids.get(node), "code": code}
        for node, code in seen
        if code != SEEN_BEFORE
    ]


SEEN_BEFORE = "seen-before"


def compare(
    evidence: ClusterMeasurements, network: float | None, before: Sequence[Earlier]
) -> Iterator[ClusterFinding]:
    """Against the last result of the same kind of cluster, and nodes that were accused before."""
    cluster = (evidence.instance_type, evidence.backend, len(evidence.hosts), evidence.world_size)
    alike = [
        one
        for one in before
        if (one.instance_type, one.backend, one.nodes, one.world_size) == cluster and one.network
    ]
    if alike and network:
        last = alike[-1]
        slower = 1 - network / (last.network or network)
        if slower > NOTEWORTHY:
            yield ClusterFinding(
                "slower-than-last",
                "warn",
                f"the network is {slower:.0%} slower than your last ({last.time[:10]}, "
                f"{(last.network or 0) / 1e9:.3g} GB/s on as many nodes)",
                "these machines may be placed farther apart, or one is slow: see the pairs",
            )
    known: dict[str, list[tuple[str, str]]] = {}
    for one in before:
        for instance, code in one.accused:
            if instance:
                known.setdefault(instance, []).append((one.time[:10], code))
    for node in evidence.nodes:
        instance_id = next(one.instance_id for one in evidence.members if one.node == node)
        for time, code in known.get(instance_id or "", [])[-1:]:
            yield ClusterFinding(
                SEEN_BEFORE,
                "warn",
                f"{evidence.name(node)} was found fault with before: {code} on {time}",
                "stop the job and submit it again if it is slow once more",
                (node,),
            )
