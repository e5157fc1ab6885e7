"""Expected performance of a cluster: its instance type's nominal figures, or its typical link.

Nominal figures are multiplied by the share of them that is published to be reached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from sm_train.cost.instances import InstanceType
from sm_train.cost.network import (
    LINK_SHARE,
    LINK_SHARE_SOURCE,
    NETWORK_LATENCY,
    NETWORK_SHARE,
    NETWORK_SHARE_SOURCE,
    NODE_LATENCY,
    GpuNetwork,
    gpu_network,
)
from sm_train.entrypoints.probes.measurements import ClusterMeasurements


@dataclass(frozen=True)
class Band:
    """Shares of a nominal figure: ``usual`` is expected, below ``low`` something is wrong."""

    low: float
    usual: float
    source: str


NETWORK = Band(0.5, NETWORK_SHARE, NETWORK_SHARE_SOURCE)
NVLINK = Band(0.6, LINK_SHARE, LINK_SHARE_SOURCE)
MATMUL = Band(0.55, 0.7, "large bf16 products reach about 0.7 of an A100's 312 TFLOP/s (assumed)")


@dataclass(frozen=True)
class Reference:
    """Expected bandwidths in bytes per second: of a node's network, and of a GPU's links.

    ``network`` is what a step is predicted on, None if nothing is known to compare with.
    ``binding`` figures are the instance type's and can fail a cluster; the cluster's own typical
    link cannot.
    """

    inter_node: float | None
    intra_node: float | None
    network: GpuNetwork | None
    source: str
    binding: bool


def reference_bandwidths(cluster: ClusterMeasurements, instance: InstanceType | None) -> Reference:
    """Return the instance type's bandwidths, or this cluster's typical link if it has several."""
    nodes, per_node = cluster.topology.nodes, cluster.topology.per_node
    intra_node = None
    if instance is not None and instance.nvlink_gbytes:
        intra_node = instance.nvlink_gbytes * 1e9 * LINK_SHARE
    if instance is not None and instance.network_gbps:
        network = gpu_network(nodes, per_node, instance.network_gbps, instance.nvlink_gbytes)
        return Reference(
            network.between_nodes,
            intra_node,
            # The bandwidth between GPUs without NVLink is assumed: no reason to fail a node.
            network if nodes > 1 or intra_node else None,
            f"{instance.name}: {instance.network_gbps:g} Gbit/s × {NETWORK.usual:g} "
            f"({NETWORK.source})",
            binding=True,
        )
    measured = sorted(value for value in cluster.node_bandwidths().values() if value > 0)
    if len(measured) < 3:
        alone = nodes == 1 and intra_node is not None
        return Reference(
            None,
            intra_node,
            GpuNetwork(nodes, per_node, intra_node, intra_node) if alone and intra_node else None,
            "nothing is known to compare with",
            binding=intra_node is not None,
        )
    typical = median(measured[len(measured) // 2 :])
    inside = intra_node or typical
    network = GpuNetwork(nodes, per_node, typical, inside, _network_latency(cluster))
    return Reference(typical, intra_node, network, "the typical link of this cluster", False)


def _network_latency(cluster: ClusterMeasurements) -> float:
    """Return the latency between nodes with which the model meets this cluster's smallest sum."""
    points = cluster.world.sweeps.get("all_reduce") if cluster.world else None
    nodes, per_node = cluster.topology.nodes, cluster.topology.per_node
    if not points or nodes == 1:
        return NETWORK_LATENCY
    inside = NODE_LATENCY * math.ceil(math.log2(per_node))
    return max(0.0, points[0].seconds - inside) / math.ceil(math.log2(nodes))
