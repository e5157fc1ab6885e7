"""Expected performance of a cluster, and this run's step as the network model sees it.

``expected`` holds the instance type's nominal figures (from the instance table, sent along by the
laptop). They are multiplied by the share of them that is published to be reached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from sm_train.entrypoints.common.job_config import ExpectedPerformance, JobConfig
from sm_train.entrypoints.doctor.bus_bandwidth import COLLECTIVES
from sm_train.entrypoints.doctor.measurements import ClusterMeasurements, GroupMeasurement
from sm_train.entrypoints.doctor.step_time_model import (
    Fabric,
    Sweeps,
    Workload,
    expected_sweep,
    predict_step,
)
from sm_train.entrypoints.planning.memory import (
    UnplannedModelError,
    keeps_unsharded_gradients,
    plan_model,
)


@dataclass(frozen=True)
class Band:
    """Shares of a nominal figure: ``usual`` is expected, below ``low`` something is wrong."""

    low: float
    usual: float
    source: str


NETWORK = Band(
    0.5,
    0.6,
    "all_reduce_perf on 2, 3 and 4 p4d.24xlarge: 57, 32 and 30 of 50 GB/s (github.com/NVIDIA/nccl "
    "issue 527, 2022; taken for all types)",
)
NVLINK = Band(
    0.6,
    0.75,
    "all_reduce_perf inside one p4d.24xlarge: 231 of 300 GB/s (github.com/NVIDIA/nccl issue 527, "
    "2022; taken for all types)",
)
MATMUL = Band(0.55, 0.7, "large bf16 products reach about 0.7 of an A100's 312 TFLOP/s (assumed)")

NETWORK_LATENCY, NODE_LATENCY = 30e-6, 10e-6
"""Seconds of a small message between nodes over EFA, and inside a node (assumed)."""

MATMUL_SHARE = 1 / 3
"""Share of a large matrix product's rate that training reaches: 20 to 31 % MFU (BRIA's published
1.8 it/s, MLPerf Training v4.0) over 0.7. Used for runs whose it/s is unknown."""

RECOMPUTATION = 4 / 3
"""Activation checkpointing repeats the forward pass."""


@dataclass(frozen=True)
class Reference:
    """Expected bandwidths in bytes per second: of a node's network, and of a GPU's links.

    ``latency`` is of a small message, in seconds. ``binding`` figures are the instance type's and
    can fail a cluster; the cluster's own typical link cannot.
    """

    inter_node: float | None
    intra_node: float | None
    latency: float
    source: str
    binding: bool


def reference_bandwidths(
    cluster: ClusterMeasurements, expected: ExpectedPerformance | None
) -> Reference:
    """Return the instance type's bandwidths, or this cluster's typical link if it has several."""
    if expected is not None and expected.network_gbps:
        return Reference(
            expected.network_gbps / 8 * 1e9 * NETWORK.usual,
            _nvlink_bandwidth(expected),
            NETWORK_LATENCY,
            f"{expected.instance_type}: {expected.network_gbps:g} Gbit/s × {NETWORK.usual:g} "
            f"({NETWORK.source})",
            binding=True,
        )
    intra_node = _nvlink_bandwidth(expected) if expected else None
    measured = sorted(value for value in cluster.node_bandwidths().values() if value > 0)
    if len(measured) < 3:
        source = "nothing is known to compare with"
        return Reference(None, intra_node, NETWORK_LATENCY, source, binding=intra_node is not None)
    typical = median(measured[len(measured) // 2 :])
    source = "the typical link of this cluster"
    return Reference(typical, intra_node, _latency(cluster), source, binding=False)


def _latency(cluster: ClusterMeasurements) -> float:
    """Return the latency with which :func:`expected_sweep` matches this cluster's smallest sum."""
    points = cluster.world.sweeps.get("all_reduce") if cluster.world else None
    if not points or cluster.world is None:
        return NETWORK_LATENCY
    return points[0].seconds / max(1, math.ceil(math.log2(cluster.world.ranks)))


def _nvlink_bandwidth(expected: ExpectedPerformance) -> float | None:
    return expected.nvlink_gbytes * 1e9 * NVLINK.usual if expected.nvlink_gbytes else None


def expected_fabric(cluster: ClusterMeasurements, reference: Reference) -> Fabric | None:
    """Return the cluster's fabric as it should be; None if nothing is known about it."""
    nodes, local_ranks = len(cluster.nodes), len({one.local_rank for one in cluster.ranks})
    bandwidth = reference.inter_node if nodes > 1 else reference.intra_node
    if bandwidth is None:
        return None
    latency = reference.latency if nodes > 1 else NODE_LATENCY
    return Fabric(
        _expected_sweeps(nodes * local_ranks, bandwidth, latency),
        _expected_sweeps(local_ranks, reference.intra_node or bandwidth, NODE_LATENCY),
        # All local ranks share the node's network.
        _expected_sweeps(nodes, (reference.inter_node or bandwidth) / local_ranks, latency),
    )


def _expected_sweeps(ranks: int, busbw: float, latency: float) -> Sweeps:
    return {one: expected_sweep(one, ranks, busbw, latency) for one in COLLECTIVES}


def measured_fabric(cluster: ClusterMeasurements) -> Fabric | None:
    """Return the measured fabric: of several groups the slowest, which all ranks wait for."""
    if cluster.world is None:
        return None
    world = cluster.world.sweeps
    intra_node = _slowest_sweeps(cluster.intra_node.values())
    inter_node = _slowest_sweeps(cluster.inter_node.values())
    return Fabric(world, intra_node or world, inter_node or world)


def _slowest_sweeps(groups: Iterable[GroupMeasurement]) -> Sweeps | None:
    slowest = min(groups, key=lambda one: one.best_busbw() or 0.0, default=None)
    return slowest.sweeps if slowest else None


def workload(
    config: JobConfig,
    cluster: ClusterMeasurements,
    expected: ExpectedPerformance | None,
    fabric: Fabric | None,
) -> tuple[Workload, str] | None:
    """Return the run's step and the basis of its compute time; None for models without a plan."""
    stage, bf16 = config.stage, config.training.precision == "bf16"
    try:
        plan = plan_model(
            config.model,
            stage.resolution,
            precision=config.training.precision,
            plan=config.expected.model_plan,
        )
    except UnplannedModelError:
        return None
    local_ranks = max(1, len({one.local_rank for one in cluster.ranks}))
    work = Workload(
        compute_seconds=0.0,
        gradient_bytes=(2 if config.training.reduce_dtype == "bf16" else 4)
        * plan.trained_parameters,
        parameter_bytes=(2 if bf16 else 4) * plan.parameters,
        units=plan.communication_units(stage.sharding),
        gradient_accumulation_steps=stage.gradient_accumulation_steps,
        sharding=stage.sharding,
        shard_ranks=local_ranks,
        unsharded_gradients=keeps_unsharded_gradients(
            config, len(cluster.ranks), local_ranks, _min_gpu_memory(cluster)
        ),
    )
    if expected is not None and expected.steps_per_second and fabric is not None:
        speed = expected.steps_per_second
        basis = f"{speed:.3g} it/s ({expected.speed_source})"
        return fit_compute(work, fabric, 1 / speed), basis
    rates = [one.matmul_tflops for one in cluster.speeds.values() if one.matmul_tflops]
    if not rates:
        return None
    flops = plan.training_flops_per_image * stage.per_device_batch_size
    if stage.activation_checkpointing:
        flops = int(flops * RECOMPUTATION)
    compute_seconds = flops / (median(rates) * 1e12 * MATMUL_SHARE)
    basis = f"{flops / 1e12:.3g} TFLOP a pass at a third of what a matrix product reaches here"
    return replace(work, compute_seconds=compute_seconds), basis


def _min_gpu_memory(cluster: ClusterMeasurements) -> int | None:
    """Return the bytes of the smallest GPU; None if there are no GPUs."""
    mebibytes = [gpu["memory_mib"] for one in cluster.speeds.values() for gpu in one.gpus]
    return min((2**20 * size for size in mebibytes if size), default=None)


def fit_compute(work: Workload, fabric: Fabric, step_seconds: float) -> Workload:
    """Return the workload whose step takes ``step_seconds`` on ``fabric``; at least 1 % is compute.

    Bisects: a step's time rises with its compute time.
    """
    high = step_seconds / work.gradient_accumulation_steps
    low = 0.01 * high
    for _ in range(60):
        middle = (low + high) / 2
        step = predict_step(replace(work, compute_seconds=middle), fabric)
        if step is not None and step.seconds < step_seconds:
            low = middle
        else:
            high = middle
    return replace(work, compute_seconds=high)
