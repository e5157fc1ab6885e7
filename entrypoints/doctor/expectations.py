"""What a cluster of known machines should give, and this run's step as the network model sees it.

``expected`` figures are the machine's nominal ones (the instance table's, which the laptop sends
along) times what is published to be reached of them.
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
    plan_preset,
)


@dataclass(frozen=True)
class Band:
    """Shares of a nominal figure: below ``low`` something is wrong, ``usual`` is expected."""

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
"""Of what a large matrix product reaches, training does: 20 to 31 % MFU (BRIA's published 1.8 it/s,
MLPerf Training v4.0) over 0.7. For runs whose it/s nobody measured."""

RECOMPUTATION = 4 / 3
"""Activation checkpointing does the forward pass again."""


@dataclass(frozen=True)
class Reference:
    """Bytes a second that a node's network and a GPU's links should give, and why.

    ``latency`` is of a small message; ``firm`` tells figures of the machines from this cluster's
    own, by which nothing is refused.
    """

    network: float | None
    inside: float | None
    latency: float
    why: str
    firm: bool


def reference(evidence: ClusterMeasurements, expected: ExpectedPerformance | None) -> Reference:
    """By the instance type; without one, the usual link of this very cluster, if it has several."""
    if expected is not None and expected.network_gbps:
        return Reference(
            expected.network_gbps / 8 * 1e9 * NETWORK.usual,
            _inside(expected),
            NETWORK_LATENCY,
            f"{expected.instance_type}: {expected.network_gbps:g} Gbit/s × {NETWORK.usual:g} "
            f"({NETWORK.source})",
            firm=True,
        )
    inside = _inside(expected) if expected else None
    measured = sorted(value for value in evidence.node_bandwidths().values() if value > 0)
    if len(measured) < 3:
        why = "nothing is known to compare with"
        return Reference(None, inside, NETWORK_LATENCY, why, firm=inside is not None)
    usual = median(measured[len(measured) // 2 :])
    why = "the usual link of this cluster"
    return Reference(usual, inside, _latency(evidence), why, firm=False)


def _latency(evidence: ClusterMeasurements) -> float:
    """The one by which :func:`expected_sweep` begins as this cluster's sums do."""
    points = evidence.world.sweeps.get("all_reduce") if evidence.world else None
    if not points or evidence.world is None:
        return NETWORK_LATENCY
    return points[0].seconds / max(1, math.ceil(math.log2(evidence.world.ranks)))


def _inside(expected: ExpectedPerformance) -> float | None:
    return expected.nvlink_gbytes * 1e9 * NVLINK.usual if expected.nvlink_gbytes else None


def expected_fabric(evidence: ClusterMeasurements, given: Reference) -> Fabric | None:
    """The cluster as it should be; None where nothing is known of it."""
    nodes, lanes = len(evidence.nodes), len({one.lane for one in evidence.members})
    whole = given.network if nodes > 1 else given.inside
    if whole is None:
        return None
    latency = given.latency if nodes > 1 else NODE_LATENCY
    inside = given.inside or whole
    return Fabric(
        _sweeps(nodes * lanes, whole, latency),
        _sweeps(lanes, inside, NODE_LATENCY),
        # All lanes share the node's network.
        _sweeps(nodes, (given.network or whole) / lanes, latency),
    )


def _sweeps(ranks: int, busbw: float, latency: float) -> Sweeps:
    return {one: expected_sweep(one, ranks, busbw, latency) for one in COLLECTIVES}


def measured_fabric(evidence: ClusterMeasurements) -> Fabric | None:
    """The cluster as it is: of several groups the slowest, which the others wait for."""
    if evidence.world is None:
        return None
    world = evidence.world.sweeps
    intra, inter = (_slowest(groups.values()) for groups in (evidence.intra, evidence.inter))
    return Fabric(world, intra or world, inter or world)


def _slowest(groups: Iterable[GroupMeasurement]) -> Sweeps | None:
    timed = list(groups)
    return min(timed, key=lambda one: one.best() or 0.0).sweeps if timed else None


def workload(
    settings: JobConfig,
    evidence: ClusterMeasurements,
    expected: ExpectedPerformance | None,
    fabric: Fabric | None,
) -> tuple[Workload, str] | None:
    """The run's step and what its compute rests on; None for models that nobody counted."""
    stage, bf16 = settings.stage, settings.training.precision == "bf16"
    try:
        plan = plan_preset(
            settings.model.preset, stage.resolution, precision=settings.training.precision
        )
    except UnplannedModelError:
        return None
    lanes = max(1, len({one.lane for one in evidence.members}))
    work = Workload(
        compute_seconds=0.0,
        gradient_bytes=4 * plan.parameters,
        parameter_bytes=(2 if bf16 else 4) * plan.parameters,
        gradient_accumulation_steps=stage.gradient_accumulation_steps,
        sharding=stage.sharding,
        shard_ranks=lanes,
        whole_gradients=keeps_unsharded_gradients(
            settings, len(evidence.members), lanes, _gpu_memory(evidence)
        ),
    )
    if expected is not None and expected.steps_per_second and fabric is not None:
        speed = expected.steps_per_second
        return solved(work, fabric, 1 / speed), f"{speed:.3g} it/s ({expected.speed_source})"
    rates = [one.matmul_tflops for one in evidence.speeds.values() if one.matmul_tflops]
    if not rates:
        return None
    flops = plan.training_flops_per_image * stage.per_device_batch_size
    if stage.activation_checkpointing:
        flops = int(flops * RECOMPUTATION)
    compute = flops / (median(rates) * 1e12 * MATMUL_SHARE)
    why = f"{flops / 1e12:.3g} TFLOP a pass at a third of what a matrix product reaches here"
    return replace(work, compute_seconds=compute), why


def _gpu_memory(evidence: ClusterMeasurements) -> int | None:
    """Bytes of the smallest GPU; None where there are none."""
    sizes = [gpu["memory_mib"] for one in evidence.speeds.values() for gpu in one.gpus]
    return min((2**20 * size for size in sizes if size), default=None)


def solved(work: Workload, fabric: Fabric, step_seconds: float) -> Workload:
    """The workload whose step takes ``step_seconds`` on ``fabric``; at least 1 % is compute."""
    low, high = (
        0.01 * step_seconds / work.gradient_accumulation_steps,
        step_seconds / work.gradient_accumulation_steps,
    )
    for _ in range(60):
        middle = (low + high) / 2
        step = predict_step(replace(work, compute_seconds=middle), fabric)
        if step is not None and step.seconds < step_seconds:
            low = middle
        else:
            high = middle
    return replace(work, compute_seconds=high)
