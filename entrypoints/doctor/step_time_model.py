"""Model of an optimizer step's time: from message sizes and sweeps to seconds.

A rank's step is ``gradient_accumulation_steps`` passes of ``compute_seconds`` each, plus the part
of the communication that does not overlap with them. A third of a pass is forward, two thirds are
backward (one and two FLOP per weight: Kaplan et al. 2020, section 2.1).

- ``none`` (DDP) reduces the gradients once per step, during the last backward pass, in buckets that
  become ready one after the other: bucket k of B after k/B of the pass. Each bucket waits for the
  network to be free. What remains after the backward pass is exposed. (Li et al. 2020, "PyTorch
  Distributed", sections 3.2 and 4.2.)
- ``shard_grad_op`` gathers the weights before a step's first forward pass, ``full_shard`` before
  each forward and each backward pass. Both reduce-scatter the gradients during each backward pass
  (Zhao et al. 2023, "PyTorch FSDP", section 3.2), or only during a step's last one if unsharded
  gradients fit into memory until then. The first gather and the last scatter cannot overlap with
  anything.
- ``hybrid_shard`` does what full_shard does inside each node, and reduces each rank's shard of the
  gradients between the nodes during a step's last pass.

Buckets and units are taken to be of equal size.

``overlap`` is the share of compute that communication can overlap with: 1 if the network needs no
compute (NCCL over RDMA, or a link so slow that all ranks wait for it), less if copying and adding
use the cores that compute.

The seconds of a collective come from a measured sweep or from :func:`expected_sweep`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sm_train.entrypoints.doctor.bus_bandwidth import (
    Collective,
    SweepPoint,
    bus_factor,
    seconds_for,
)

Sweeps = Mapping[Collective, Sequence[SweepPoint]]

FORWARD_SHARE, BACKWARD_SHARE = 1 / 3, 2 / 3
"""Shares of one pass's compute."""


@dataclass(frozen=True)
class Workload:
    """The work of one rank in a step.

    ``compute_seconds`` is one forward and backward pass alone; ``gradient_bytes`` and
    ``parameter_bytes`` are of the full model as they are sent, in ``units``: DDP's buckets, or the
    units in which a sharded model is gathered. ``shard_ranks`` is how many ranks share the weights
    under hybrid_shard. ``unsharded_gradients`` are reduced once per step.
    """

    compute_seconds: float
    gradient_bytes: int
    parameter_bytes: int
    units: int
    gradient_accumulation_steps: int = 1
    sharding: str = "none"
    overlap: float = 1.0
    shard_ranks: int = 1
    unsharded_gradients: bool = True


@dataclass(frozen=True)
class Fabric:
    """Sweeps over all ranks, inside a node, and over groups with one rank on each node."""

    world: Sweeps
    intra: Sweeps = field(default_factory=dict)
    inter: Sweeps = field(default_factory=dict)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step: compute, communication, and its exposed part."""

    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.exposed_seconds


def predict_step(work: Workload, fabric: Fabric) -> StepTime | None:
    """Return the step's times on ``fabric``; None if a sweep that it needs is missing."""
    compute = work.compute_seconds * work.gradient_accumulation_steps
    if work.sharding == "none":
        reduced = _gradient_reduction(work, work.gradient_bytes, fabric.world)
        return None if reduced is None else StepTime(compute, *reduced)
    sharded = _sharded_passes(
        work, fabric.intra if work.sharding == "hybrid_shard" else fabric.world
    )
    if sharded is None:
        return None
    total, exposed = sharded
    if work.sharding == "hybrid_shard":
        between = _gradient_reduction(work, work.gradient_bytes / work.shard_ranks, fabric.inter)
        if between is None:
            return None
        total, exposed = total + between[0], exposed + between[1]
    return StepTime(compute, total, exposed)


def _gradient_reduction(work: Workload, size: float, sweeps: Sweeps) -> tuple[float, float] | None:
    """Return total and exposed seconds of reducing ``size`` bytes during a backward pass."""
    seconds = seconds_for(size / work.units, sweeps.get("all_reduce", ()))
    if seconds is None:
        return None
    overlappable = work.overlap * BACKWARD_SHARE * work.compute_seconds
    total = work.units * seconds
    # The network is busy from the first bucket on, or the last one is reduced after the pass.
    return total, max(seconds, overlappable / work.units + total - overlappable)


def _sharded_passes(work: Workload, sweeps: Sweeps) -> tuple[float, float] | None:
    """Return total and exposed seconds of a step's passes with sharded weights."""
    gather = seconds_for(work.parameter_bytes / work.units, sweeps.get("all_gather", ()))
    scatter = seconds_for(work.gradient_bytes / work.units, sweeps.get("reduce_scatter", ()))
    if gather is None or scatter is None:
        return None
    keeps_weights = work.sharding == "shard_grad_op"
    backward_gather = 0.0 if keeps_weights else gather
    # One unit's compute remains when the last weights arrive or the last gradients are ready.
    overlappable = work.overlap * work.compute_seconds * (1 - 1 / work.units)
    total = exposed = 0.0
    for number in range(work.gradient_accumulation_steps):
        first, last = number == 0, number == work.gradient_accumulation_steps - 1
        forward = gather if first or not keeps_weights else 0.0
        backward = backward_gather + (scatter if last or not work.unsharded_gradients else 0.0)
        total += work.units * (forward + backward)
        # At least one unit's communication is exposed, and what exceeds the compute.
        exposed += max(forward, work.units * forward - FORWARD_SHARE * overlappable)
        exposed += max(backward, work.units * backward - BACKWARD_SHARE * overlappable)
    return total, exposed


def expected_sweep(
    collective: Collective, ranks: int, busbw: float, latency: float
) -> tuple[SweepPoint, ...]:
    """Return the sweep of a healthy fabric, for the same prediction.

    ``busbw`` is in bytes a second; ``latency`` in seconds is paid ⌈log₂ ranks⌉ times, as by a tree
    (NVIDIA, "Massively Scale Your Deep Learning Training with NCCL 2.4", 2019).
    """
    base = latency * max(1, math.ceil(math.log2(max(ranks, 2))))
    factor = bus_factor(collective, ranks)
    return tuple(
        SweepPoint(size, base + size * factor / busbw) for size in (2**10, 2**20, 2**25, 2**30)
    )
