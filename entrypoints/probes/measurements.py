"""Everything the doctor measured, as plain data: the input of the verdict, and what is stored.

Bandwidths are in bytes per second, times in seconds. Nodes are numbered in the order in which the
platform lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sm_train.cost.network import Collective, Topology
from sm_train.entrypoints.probes.bus_bandwidth import SweepPoint, Sweeps, algbw, busbw
from sm_train.entrypoints.probes.round_robin import Pair


@dataclass(frozen=True)
class RankFacts:
    """One rank that joined; ``join_delay`` is its seconds after the first one.

    ``rdma`` are the node's RDMA devices with an active link, None if that is unknown.
    """

    rank: int
    node: int
    local_rank: int
    world_size: int
    gpus: int
    instance_id: str | None
    versions: dict[str, str | None]
    join_delay: float = 0.0
    rdma: tuple[str, ...] | None = None


@dataclass(frozen=True)
class NodeSpeeds:
    """What one rank measured alone; its node's first local rank also measures files and GPUs.

    ``disk`` and ``channel`` (the train channel) are in bytes per second; ``gpus`` are the fields of
    :class:`~sm_train.entrypoints.probes.gpu_inventory.Gpu`.
    """

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

    def best_busbw(self, collective: Collective = "all_reduce") -> float | None:
        """Return the highest bus bandwidth; None if the collective was not measured."""
        points = self.sweeps.get(collective, ())
        return max((busbw(collective, self.ranks, point) for point in points), default=None)


@dataclass(frozen=True)
class PairResult:
    """Measurement between two nodes' ranks of one local rank; ``error`` is set if it failed.

    ``bandwidth`` is in each direction, both at once, the best of all passes. ``passes`` holds each
    pass's: the round robin first, then the retests; None where the pair was not measured.
    ``latency`` is of a small message one way. ``clock_offset`` is how far the second node's clock
    is ahead, within ``clock_uncertainty``.
    """

    nodes: tuple[int, int]
    local_rank: int
    bandwidth: float = 0.0
    latency: float | None = None
    clock_offset: float | None = None
    clock_uncertainty: float | None = None
    error: str | None = None
    passes: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class ClusterMeasurements:
    """All measurements of one cluster.

    ``node_names`` are the platform's. ``missing_ranks`` took no part; ``late_ranks`` are those of
    them that came after the join timeout. ``lost_ranks`` left: rank → the part that it missed.
    ``errors`` maps parts that did not finish to one rank's error. ``timed_out`` is set if time ran
    out before every part was measured. ``nccl_logs`` maps nodes to parsed NCCL logs.
    """

    node_names: tuple[str, ...]
    instance_type: str | None
    world_size: int
    backend: str
    join_timeout: float
    ranks: tuple[RankFacts, ...]
    missing_ranks: tuple[int, ...] = ()
    late_ranks: tuple[int, ...] = ()
    lost_ranks: Mapping[int, str] = field(default_factory=dict)
    speeds: Mapping[int, NodeSpeeds] = field(default_factory=dict)
    world: GroupMeasurement | None = None
    intra_node: Mapping[int, GroupMeasurement] = field(default_factory=dict)
    inter_node: Mapping[int, GroupMeasurement] = field(default_factory=dict)
    pairs: tuple[PairResult, ...] = ()
    nccl_logs: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    timed_out: bool = False
    seconds: float = 0.0

    def name(self, node: int) -> str:
        """Return a node's name and, where known, its instance id."""
        name = self.node_names[node] if node < len(self.node_names) else f"node {node}"
        instance_id = next((rank.instance_id for rank in self.ranks if rank.node == node), None)
        return f"{name} ({instance_id})" if instance_id else name

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes that joined."""
        return tuple(sorted({rank.node for rank in self.ranks}))

    @property
    def topology(self) -> Topology:
        """The nodes that joined, and the processes on each."""
        return Topology(len(self.nodes), max(1, len({rank.local_rank for rank in self.ranks})))

    def node_bandwidths(self) -> dict[Pair, float]:
        """Return each pair's bandwidth summed over local ranks; 0 if one of them failed."""
        sums: dict[Pair, float] = {}
        broken: set[Pair] = set()
        for pair in self.pairs:
            sums[pair.nodes] = sums.get(pair.nodes, 0.0) + pair.bandwidth
            if pair.error:
                broken.add(pair.nodes)
        return {nodes: 0.0 if nodes in broken else value for nodes, value in sums.items()}

    def bandwidth_passes(self) -> list[dict[Pair, float]]:
        """Return each pass's bandwidths summed over local ranks, as round_robin takes them.

        A pair that failed for one local rank has bandwidth 0.
        """
        by_pass: list[dict[Pair, list[float]]] = []
        for pair in self.pairs:
            values = pair.passes or (0.0 if pair.error else pair.bandwidth,)
            for number, value in enumerate(values):
                if number == len(by_pass):
                    by_pass.append({})
                if value is not None:
                    by_pass[number].setdefault(pair.nodes, []).append(value)
        return [
            {nodes: sum(values) if min(values) > 0 else 0.0 for nodes, values in bandwidths.items()}
            for bandwidths in by_pass
        ]

    def as_document(self) -> dict[str, Any]:
        """Return a JSON document, with algbw and busbw next to every time."""
        return {
            "nodes": list(self.node_names),
            "instance_type": self.instance_type,
            "world_size": self.world_size,
            "backend": self.backend,
            "ranks": [asdict(rank) for rank in self.ranks],
            "missing_ranks": list(self.missing_ranks),
            "late_ranks": list(self.late_ranks),
            "lost_ranks": {str(rank): part for rank, part in self.lost_ranks.items()},
            "speeds": {str(rank): asdict(speeds) for rank, speeds in self.speeds.items()},
            "world": self.world and _sweeps_document(self.world),
            "intra_node": {
                str(node): _sweeps_document(sweeps) for node, sweeps in self.intra_node.items()
            },
            "inter_node": {
                str(local_rank): _sweeps_document(sweeps)
                for local_rank, sweeps in self.inter_node.items()
            },
            "pairs": [asdict(pair) for pair in self.pairs],
            "nccl": {str(node): log for node, log in self.nccl_logs.items()},
            "errors": dict(self.errors),
            "timed_out": self.timed_out,
            "seconds": self.seconds,
        }


def _sweeps_document(measured: GroupMeasurement) -> dict[str, Any]:
    return {
        "ranks": measured.ranks,
        **{
            collective: [
                {
                    "bytes": point.bytes,
                    "seconds": point.seconds,
                    "algbw": algbw(point),
                    "busbw": busbw(collective, measured.ranks, point),
                }
                for point in points
            ]
            for collective, points in measured.sweeps.items()
        },
    }


def sweeps_from_store(document: Mapping[str, Any]) -> GroupMeasurement:
    """Parse sweeps as they pass through the store: collective → (bytes, seconds) pairs."""
    sweeps: dict[Collective, tuple[SweepPoint, ...]] = {
        collective: tuple(SweepPoint(size, seconds) for size, seconds in points)
        for collective, points in document["sweeps"].items()
    }
    return GroupMeasurement(document["ranks"], sweeps)
