"""Everything the doctor measured, as plain data: what the verdict is made of and what is stored.

Bandwidths are bytes a second, times are seconds. Nodes are numbered as the platform lists its
hosts; a lane is a process's number on its node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sm_train.entrypoints.doctor.bus_bandwidth import Collective, Point, algbw, busbw
from sm_train.entrypoints.doctor.step_time_model import Sweeps


@dataclass(frozen=True)
class RankFacts:
    """One process that came; ``waited`` is how long after the first one."""

    rank: int
    node: int
    lane: int
    world_size: int
    gpus: int
    instance_id: str | None
    versions: dict[str, str | None]
    waited: float = 0.0


@dataclass(frozen=True)
class NodeSpeeds:
    """What one process measured by itself; those of files are of its node, from its first lane."""

    matmul_tflops: float | None = None
    host_to_device: float | None = None
    disk: float | None = None
    channel: float | None = None
    decoded_images: float | None = None
    gpus: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class GroupMeasurement:
    """Sweeps of one group of ``ranks`` processes."""

    ranks: int
    sweeps: Sweeps

    def best(self, collective: Collective = "all_reduce") -> float | None:
        """The highest bus bandwidth."""
        points = self.sweeps.get(collective, ())
        return max((busbw(collective, self.ranks, one) for one in points), default=None)


@dataclass(frozen=True)
class PairResult:
    """Two nodes' counterparts on one lane; ``failed`` says why there is no figure.

    ``bandwidth`` is in each direction, both at once; ``latency`` is of a small message one way;
    ``offset`` is how far the second node's clock is ahead, to within ``uncertainty``.
    """

    nodes: tuple[int, int]
    lane: int
    bandwidth: float = 0.0
    latency: float | None = None
    offset: float | None = None
    uncertainty: float | None = None
    failed: str | None = None


@dataclass(frozen=True)
class ClusterMeasurements:
    """``hosts`` are the platform's names; ``absent`` are ranks that took no part,
    ``too_late`` those of them that came after the roll was closed; ``gone`` are
    those that left, each with the part to which it did not come any more.

    ``failures`` are parts that did not end, each with what one of its processes said; ``cut_short``
    is set where time ran out before all parts were measured.
    """

    hosts: tuple[str, ...]
    instance_type: str | None
    world_size: int
    backend: str
    join_seconds: float
    members: tuple[RankFacts, ...]
    absent: tuple[int, ...] = ()
    too_late: tuple[int, ...] = ()
    gone: Mapping[int, str] = field(default_factory=dict)
    speeds: Mapping[int, NodeSpeeds] = field(default_factory=dict)
    world: GroupMeasurement | None = None
    intra: Mapping[int, GroupMeasurement] = field(default_factory=dict)
    inter: Mapping[int, GroupMeasurement] = field(default_factory=dict)
    pairs: tuple[PairResult, ...] = ()
    logs: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    cut_short: bool = False
    seconds: float = 0.0

    def name(self, node: int) -> str:
        """A node as people find it: its host's name and, where visible, its instance id."""
        host = self.hosts[node] if node < len(self.hosts) else f"node {node}"
        known = next((one.instance_id for one in self.members if one.node == node), None)
        return f"{host} ({known})" if known else host

    @property
    def nodes(self) -> tuple[int, ...]:
        """Those that came."""
        return tuple(sorted({one.node for one in self.members}))

    def node_bandwidths(self) -> dict[tuple[int, int], float]:
        """Of each pair of nodes, over all lanes; 0 where a lane failed."""
        sums: dict[tuple[int, int], float] = {}
        broken: set[tuple[int, int]] = set()
        for pair in self.pairs:
            sums[pair.nodes] = sums.get(pair.nodes, 0.0) + pair.bandwidth
            if pair.failed:
                broken.add(pair.nodes)
        return {nodes: 0.0 if nodes in broken else value for nodes, value in sums.items()}

    def as_document(self) -> dict[str, Any]:
        """As JSON, with both bandwidths beside every time."""
        return {
            "hosts": list(self.hosts),
            "instance_type": self.instance_type,
            "world_size": self.world_size,
            "backend": self.backend,
            "members": [asdict(one) for one in self.members],
            "absent_ranks": list(self.absent),
            "too_late_ranks": list(self.too_late),
            "gone": {str(rank): part for rank, part in self.gone.items()},
            "speeds": {str(rank): asdict(one) for rank, one in self.speeds.items()},
            "world": self.world and _timed(self.world),
            "intra_node": {str(node): _timed(one) for node, one in self.intra.items()},
            "inter_node": {str(lane): _timed(one) for lane, one in self.inter.items()},
            "pairs": [asdict(one) for one in self.pairs],
            "nccl": {str(node): one for node, one in self.logs.items()},
            "failures": dict(self.failures),
            "cut_short": self.cut_short,
            "seconds": self.seconds,
        }


def _timed(timed: GroupMeasurement) -> dict[str, Any]:
    return {
        "ranks": timed.ranks,
        **{
            name: [
                {
                    "bytes": point.bytes,
                    "seconds": point.seconds,
                    "algbw": algbw(point),
                    "busbw": busbw(name, timed.ranks, point),
                }
                for point in points
            ]
            for name, points in timed.sweeps.items()
        },
    }


def timed_from(document: Mapping[str, Any]) -> GroupMeasurement:
    """Sweeps as they pass through the store: collective → pairs of bytes and seconds."""
    sweeps: dict[Collective, tuple[Point, ...]] = {
        name: tuple(Point(size, seconds) for size, seconds in points)
        for name, points in document["sweeps"].items()
    }
    return GroupMeasurement(document["ranks"], sweeps)
