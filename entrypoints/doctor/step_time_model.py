"""What the network costs an optimizer step: a model, from sizes and sweeps to seconds.

The step of a rank is ``gradient_accumulation_steps`` passes of ``compute_seconds`` each, plus
what of
the communication is not hidden behind them. A third of a pass is forward, two thirds are backward
(one and two FLOP for each weight: Kaplan et al. 2020, section 2.1).

- ``none`` (DDP) sums the gradients once a step, with the last pass, in buckets that become ready
  one after the other while the backward pass runs: after k/B of the bytes, k/B of that time has
  gone by. Each waits for its turn on the network. What is left after the backward pass is exposed.
  (Li et al. 2020, "PyTorch Distributed", sections 3.2 and 4.2.)
- ``shard_grad_op`` gathers the weights before a step's first forward pass, ``full_shard`` before
  each forward and each backward pass, and both scatter the sums of the gradients during each
  backward pass (Zhao et al. 2023, "PyTorch FSDP", section 3.2), or during a step's last one alone
  where whole gradients fit until then. This goes by units, :data:`UNITS` of one size; the first
  gather and the last scatter have nothing to hide behind.
- ``hybrid_shard`` does what full_shard does inside each node, and sums each rank's part of the
  gradients between the nodes with the last pass of a step.

``overlap`` is the share of compute that communication can hide behind: 1 where the network needs
no compute (NCCL over RDMA, or a link so slow that all wait for it), less where copying and adding
take the very cores that compute.

The seconds of a collective come from a sweep that was measured, or from :func:`expected_sweep`.
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
"""Of one pass's compute."""

BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's ``bucket_cap_mb`` by default."""

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is smaller, so that sums begin soon (``dist._DEFAULT_FIRST_BUCKET_BYTES``)."""

UNITS = 16
"""Blocks in which a split model's weights are gathered (the presets have 8 to 60)."""


@dataclass(frozen=True)
class Workload:
    """What one rank does in a step.

    ``compute_seconds`` is one forward and backward pass alone; ``gradient_bytes`` and
    ``parameter_bytes`` are of the whole model as they travel; ``shard_ranks`` is how many ranks
    split the weights under hybrid_shard. ``whole_gradients`` are summed once a step.
    """

    compute_seconds: float
    gradient_bytes: int
    parameter_bytes: int
    gradient_accumulation_steps: int = 1
    sharding: str = "none"
    overlap: float = 1.0
    shard_ranks: int = 1
    whole_gradients: bool = True


@dataclass(frozen=True)
class Fabric:
    """Sweeps over all ranks; inside a node; and of the groups with one rank on each node."""

    world: Sweeps
    intra: Sweeps = field(default_factory=dict)
    inter: Sweeps = field(default_factory=dict)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step: computing, communicating, and what of that is exposed."""

    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.exposed_seconds


def predict_step(work: Workload, fabric: Fabric) -> StepTime | None:
    """The step on this fabric; None where a sweep that it needs is missing."""
    compute = work.compute_seconds * work.gradient_accumulation_steps
    if work.sharding == "none":
        sent = _summed(work, work.gradient_bytes, fabric.world)
        return None if sent is None else StepTime(compute, *sent)
    split = _split_step(work, fabric.intra if work.sharding == "hybrid_shard" else fabric.world)
    if split is None:
        return None
    total, exposed = split
    if work.sharding == "hybrid_shard":
        between = _summed(work, work.gradient_bytes // work.shard_ranks, fabric.inter)
        if between is None:
            return None
        total, exposed = total + between[0], exposed + between[1]
    return StepTime(compute, total, exposed)


def bucket_sizes(gradient_bytes: int) -> tuple[int, ...]:
    """DDP's buckets in the order in which they become ready."""
    sizes = [min(FIRST_BUCKET_BYTES, gradient_bytes)]
    while (left := gradient_bytes - sum(sizes)) > 0:
        sizes.append(min(BUCKET_BYTES, left))
    return tuple(sizes)


def _summed(work: Workload, size: int, sweeps: Sweeps) -> tuple[float, float] | None:
    """Seconds, all and exposed, of summing ``size`` bytes of gradients during a backward pass."""
    points = sweeps.get("all_reduce", ())
    window = work.overlap * BACKWARD_SHARE * work.compute_seconds
    ready = done = total = 0.0
    for bucket in bucket_sizes(size):
        seconds = seconds_for(bucket, points)
        if seconds is None:
            return None
        ready += bucket / size * window
        done = max(done, ready) + seconds
        total += seconds
    return total, done - window


def _split_step(work: Workload, sweeps: Sweeps) -> tuple[float, float] | None:
    """Seconds, all and exposed, of a step's passes of a model whose weights are split."""
    gather = seconds_for(work.parameter_bytes / UNITS, sweeps.get("all_gather", ()))
    scatter = seconds_for(work.gradient_bytes / UNITS, sweeps.get("reduce_scatter", ()))
    if gather is None or scatter is None:
        return None
    keeps_weights = work.sharding == "shard_grad_op"
    again = 0.0 if keeps_weights else gather
    # One unit's compute is left when the last weights have come, or the last gradients are ready.
    window = work.overlap * work.compute_seconds * (1 - 1 / UNITS)
    total = exposed = 0.0
    for number in range(work.gradient_accumulation_steps):
        first, last = number == 0, number == work.gradient_accumulation_steps - 1
        before = gather if first or not keeps_weights else 0.0
        after = again + (scatter if last or not work.whole_gradients else 0.0)
        total += UNITS * (before + after)
        exposed += max(before, UNITS * before - FORWARD_SHARE * window)
        exposed += max(after, UNITS * after - BACKWARD_SHARE * window)
    return total, exposed


def expected_sweep(
    collective: Collective, ranks: int, busbw: float, latency: float
) -> tuple[SweepPoint, ...]:
    """The sweep of a fabric that is in order, for the same prediction.

    ``busbw`` is in bytes a second; ``latency`` in seconds is paid ⌈log₂ ranks⌉ times, as by a tree
    (NVIDIA, "Massively Scale Your Deep Learning Training with NCCL 2.4", 2019).
    """
    base = latency * max(1, math.ceil(math.log2(max(ranks, 2))))
    factor = bus_factor(collective, ranks)
    return tuple(
        SweepPoint(size, base + size * factor / busbw) for size in (2**10, 2**20, 2**25, 2**30)
    )
