"""Helpers of the tests of verdict, which other tests use as well."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from sm_train.cost.network import COLLECTIVES, Collective, CollectiveCalls, GpuNetwork, Scope
from sm_train.entrypoints.distributed.nccl_log import NcclLog
from sm_train.entrypoints.probes.bus_bandwidth import SweepPoint
from sm_train.entrypoints.probes.measurements import (
    ClusterMeasurements,
    GroupMeasurement,
    NodeSpeeds,
    PairResult,
    RankFacts,
)

GPU = {
    "name": "NVIDIA A100",
    "memory_mib": 40960,
    "clock_mhz": 1410,
    "clock_limit_mhz": 1410,
    "ecc": True,
    "ecc_errors": 0,
    "temperature": 40,
    "slowdown": False,
    "driver": "550",
    "links": 12,
    "links_inactive": 0,
}


LOG = asdict(NcclLog("efa", "efa", "2.28.3", "1.16", "2.1", 8, 8, (), 4))


TYPICAL = 30e9


def group(network: GpuNetwork, scope: Scope) -> GroupMeasurement:
    """Return what the doctor measures in a group of this network."""

    def seconds(collective: Collective, size: int) -> float:
        return network.seconds(CollectiveCalls(collective, scope, size, 1, "forward"))

    sizes = (2**10, 2**20, 2**25, 2**30)
    sweeps = {
        collective: tuple(SweepPoint(size, seconds(collective, size)) for size in sizes)
        for collective in COLLECTIVES
    }
    return GroupMeasurement(network.ranks(scope), sweeps)


def cluster_of(nodes: int = 4, rate: float = TYPICAL, **changes: Any) -> ClusterMeasurements:
    """Return a healthy p4d cluster; ``rate`` is its bus bandwidth between nodes."""
    ranks = tuple(
        RankFacts(
            rank, rank // 8, rank % 8, nodes * 8, 8, f"i-0000000{rank // 8}", {"torch": "2.6"}
        )
        for rank in range(nodes * 8)
    )
    speeds = {
        rank.rank: NodeSpeeds(220, 25e9, 2e9, 1e9, 1000, (GPU,) * 8)
        if rank.local_rank == 0
        else NodeSpeeds(220, 25e9)
        for rank in ranks
    }
    pairs = tuple(
        PairResult((a, b), local_rank, rate / 8, 20e-6, 0.0, 1e-4, passes=(rate / 8, rate / 8))
        for a in range(nodes)
        for b in range(a + 1, nodes)
        for local_rank in range(8)
    )

    network = GpuNetwork(nodes, 8, rate, 225e9)
    healthy = ClusterMeasurements(
        node_names=tuple(f"algo-{node + 1}" for node in range(nodes)),
        instance_type="ml.p4d.24xlarge",
        world_size=nodes * 8,
        backend="nccl",
        join_timeout=40,
        ranks=ranks,
        speeds=speeds,
        world=group(network, "world"),
        intra_node={node: group(network, "node") for node in range(nodes)},
        inter_node={local_rank: group(network, "between nodes") for local_rank in range(8)},
        pairs=pairs,
        nccl_logs=dict.fromkeys(range(nodes), LOG),
        seconds=40.0,
    )
    return replace(healthy, **changes)
