"""The collectives of an optimizer step, and the part of their time that compute cannot hide.

A third of a pass is forward, two thirds are backward (one and two FLOP per weight: Kaplan et al.
2020, section 2.1).

- ``none`` (DDP) all-reduces the gradients once per step, in buckets, during the last backward pass
  (Li et al. 2020, "PyTorch Distributed", sections 3.2 and 4.2).
- ``shard_grad_op`` gathers the weights once per step, ``full_shard`` before each forward and each
  backward pass. Both reduce-scatter the gradients, once per step if unsharded gradients fit into
  memory until then, else during each backward pass (Zhao et al. 2023, "PyTorch FSDP", section 3.2).
- ``hybrid_shard`` does what full_shard does inside each node, and all-reduces each rank's shard of
  the gradients between the nodes during the last backward pass.

DDP's buckets and FSDP's units are taken to be of equal size. A model's plan knows how many there
are (``ModelPlan.communication_units``); for other models the number is an estimate.

A collective of n ranks takes ⌈log₂ n⌉ latencies and bytes × bus factor ÷ bus bandwidth
(nccl-tests, doc/PERFORMANCE.md). The estimate takes the seconds of a call from an instance type's
nominal figures (:class:`GpuNetwork`), the doctor from what it measures in the job
(``entrypoints/probes/measured_network.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
Scope = Literal["world", "node", "between nodes"]
Phase = Literal["forward", "backward"]

FORWARD_SHARE, BACKWARD_SHARE = 1 / 3, 2 / 3
"""Shares of one pass's compute."""

BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's ``bucket_cap_mb`` by default."""

FSDP_UNITS = 16
"""Units in which the weights of a sharded model without a plan are gathered (assumed)."""

_FP32, _BF16 = 4, 2
"""Bytes of a number."""

NETWORK_SHARE = 0.6
"""Bus bandwidth of a node ÷ its network's (:data:`NETWORK_SHARE_SOURCE`)."""

NETWORK_SHARE_SOURCE = (
    "all_reduce_perf on 2, 3 and 4 p4d.24xlarge: 57, 32 and 30 of 50 GB/s (github.com/NVIDIA/nccl "
    "issue 527, 2022; taken for all types)"
)

LINK_SHARE = 0.75
"""Bus bandwidth inside a node ÷ that of a GPU's links (:data:`LINK_SHARE_SOURCE`)."""

LINK_SHARE_SOURCE = (
    "all_reduce_perf inside one p4d.24xlarge: 231 of 300 GB/s (github.com/NVIDIA/nccl issue 527, "
    "2022; taken for all types)"
)

PCIE_BYTES_PER_SECOND = 20e9
"""Bus bandwidth between GPUs without NVLink, and from the CPU's memory: PCIe 4.0 ×16 transfers 32
GB/s (assumed share)."""

NETWORK_LATENCY, NODE_LATENCY = 30e-6, 10e-6
"""Seconds of a small message between nodes over EFA, and inside a node (assumed)."""


@dataclass(frozen=True)
class Topology:
    """``nodes`` with ``per_node`` GPUs each."""

    nodes: int
    per_node: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.per_node

    def ranks(self, scope: Scope) -> int:
        """Return the ranks of one group."""
        return {"world": self.gpus, "node": self.per_node, "between nodes": self.nodes}[scope]


@dataclass(frozen=True)
class GpuNetwork(Topology):
    """A cluster's nominal network: bus bandwidths in bytes per second.

    The latencies are the seconds of a small message between two nodes, and inside a node.
    """

    between_nodes: float
    inside_node: float
    network_latency: float = NETWORK_LATENCY
    node_latency: float = NODE_LATENCY

    def bus_bandwidth(self, scope: Scope) -> float:
        """Return the bus bandwidth of one group; the ranks of a node share its network."""
        if scope == "between nodes":
            return self.between_nodes / self.per_node
        crosses = scope == "world" and self.nodes > 1
        return min(self.between_nodes, self.inside_node) if crosses else self.inside_node

    def latency(self, scope: Scope) -> float:
        """Return the seconds of a small message in one group."""
        inside = math.ceil(math.log2(self.per_node)) if scope != "between nodes" else 0
        outside = math.ceil(math.log2(self.nodes)) if scope != "node" else 0
        return self.node_latency * inside + self.network_latency * outside

    def seconds(self, call: CollectiveCalls) -> float:
        """Return the seconds of one call."""
        ranks = self.ranks(call.scope)
        if ranks == 1:
            return 0.0
        transfer = call.bytes * bus_factor(call.collective, ranks) / self.bus_bandwidth(call.scope)
        return self.latency(call.scope) + transfer


class CallTimes(Protocol):
    """A network that knows how long a collective takes."""

    def seconds(self, call: CollectiveCalls) -> float:
        """Return the seconds of one call."""


@dataclass(frozen=True)
class CollectiveCalls:
    """``count`` equal calls in each of ``passes`` passes of a step.

    ``bytes`` is the size of one call's full vector, before it is scattered or after it is gathered.
    """

    collective: Collective
    scope: Scope
    bytes: float
    count: int
    phase: Phase
    passes: int = 1


@dataclass(frozen=True)
class CommunicationTime:
    """Seconds of a step's collectives, and the part that does not overlap with compute."""

    seconds: float
    exposed: float


def gpu_network(
    nodes: int, per_node: int, network_gbps: float | None, link_gbytes: float | None
) -> GpuNetwork:
    """Return the network of a cluster from an instance type's nominal figures.

    ``link_gbytes`` is NVLink's GB/s of one GPU in one direction, None without NVLink.
    """
    inside = link_gbytes * 1e9 * LINK_SHARE if link_gbytes else PCIE_BYTES_PER_SECOND
    between = (network_gbps or 25.0) / 8 * 1e9 * NETWORK_SHARE
    return GpuNetwork(nodes, per_node, between, inside)


def bus_factor(collective: Collective, ranks: int) -> float:
    """Return bus bandwidth ÷ algorithm bandwidth; 0 for one rank, which sends nothing.

    Raises:
        ValueError: ``ranks`` is less than 1.
    """
    if ranks < 1:
        raise ValueError(f"ranks: {ranks} must be at least 1")
    share = (ranks - 1) / ranks
    return 2 * share if collective == "all_reduce" else share


def step_collectives(
    sharding: str,
    parameters: int,
    topology: Topology,
    *,
    trained: int | None = None,
    units: int | None = None,
    bf16: bool = True,
    reduce_bf16: bool = False,
    passes: int = 1,
    unsharded_gradients: bool = True,
) -> tuple[CollectiveCalls, ...]:
    """Return the collectives of one step with ``passes`` micro-batches.

    ``trained`` of the ``parameters`` have gradients, None means all. ``units`` are DDP's buckets or
    FSDP's units, None for an estimate. Weights are gathered in bf16 with ``bf16``, gradients are
    reduced in bf16 with ``reduce_bf16``, and otherwise in fp32.
    """
    if topology.gpus == 1:
        return ()
    with_gradients = parameters if trained is None else trained
    count = units or estimated_units(sharding, with_gradients)
    gradients = with_gradients * (_BF16 if reduce_bf16 else _FP32) / count
    if sharding == "none":
        return (CollectiveCalls("all_reduce", "world", gradients, count, "backward"),)
    scope: Scope = "node" if sharding == "hybrid_shard" else "world"
    weights = parameters * (_BF16 if bf16 else _FP32) / count
    gathers = 1 if sharding == "shard_grad_op" else passes
    calls = [CollectiveCalls("all_gather", scope, weights, count, "forward", gathers)]
    if sharding != "shard_grad_op":
        calls.append(CollectiveCalls("all_gather", scope, weights, count, "backward", passes))
    scatters = 1 if unsharded_gradients else passes
    calls.append(CollectiveCalls("reduce_scatter", scope, gradients, count, "backward", scatters))
    if sharding == "hybrid_shard" and topology.nodes > 1:
        shard = gradients / topology.per_node
        calls.append(CollectiveCalls("all_reduce", "between nodes", shard, count, "backward"))
    return tuple(calls)


def estimated_units(sharding: str, parameters: int) -> int:
    """Return about how many buckets (DDP) or units (FSDP) a model's gradients are reduced in."""
    if sharding != "none":
        return FSDP_UNITS
    # The limit applies to gradients before a hook compresses them.
    return math.ceil(_FP32 * parameters / BUCKET_BYTES)


def communication(
    calls: Sequence[CollectiveCalls], network: CallTimes, pass_seconds: float
) -> CommunicationTime:
    """Return the time of a step's ``calls``; each pass computes for ``pass_seconds``.

    What exceeds the compute of its phase is exposed, and at least the last bucket's or one unit's
    call.
    """
    reduced = [call for call in calls if call.collective == "all_reduce"]
    sharded = [call for call in calls if call.collective != "all_reduce"]
    total = sum(call.count * call.passes * network.seconds(call) for call in calls)
    backward = BACKWARD_SHARE * pass_seconds
    exposed = sum(_exposed_buckets(call, network, backward) for call in reduced)
    for number in range(max((call.passes for call in sharded), default=0)):
        for phase, share in (("forward", FORWARD_SHARE), ("backward", BACKWARD_SHARE)):
            found = [call for call in sharded if call.phase == phase and call.passes > number]
            exposed += _exposed_units(found, network, share * pass_seconds)
    return CommunicationTime(total, exposed)


def _exposed_units(
    calls: Sequence[CollectiveCalls], network: CallTimes, phase_seconds: float
) -> float:
    """Return the seconds of one phase's gathers and scatters that exceed its compute.

    One unit's compute remains when the last weights arrive or the last gradients are ready.
    """
    if not calls:
        return 0.0
    count = calls[0].count
    unit = sum(network.seconds(call) for call in calls)
    return max(unit, count * unit - phase_seconds * (1 - 1 / count))


def _exposed_buckets(call: CollectiveCalls, network: CallTimes, backward_seconds: float) -> float:
    """Return the seconds of all-reduces after the backward pass.

    Bucket k of B is ready after k/B of the pass. Either the network is always busy from the first
    one on, or it waits for each bucket and reduces the last one after the pass.
    """
    seconds = network.seconds(call)
    first_ready = backward_seconds / call.count
    return max(seconds, first_ready + call.count * seconds - backward_seconds)
