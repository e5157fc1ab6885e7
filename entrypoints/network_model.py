"""What the network costs an optimizer step: a model, from sizes and sweeps to seconds.

The step of a rank is ``accumulation`` passes of ``compute_seconds`` each, plus what of the
communication is not hidden behind them:

- **DDP** sums the gradients once a step, with the last pass (``no_sync`` before), in buckets that
  become ready one after the other while the backward pass runs. The backward pass is two thirds of
  a pass (one forward and two backward FLOP for each weight: Kaplan et al. 2020, section 2.1). With
  B buckets the k-th is ready after k/B of it; each waits for its turn on the network. What is left
  after the backward pass is exposed. (Li et al. 2020, "PyTorch Distributed", sections 3.2, 4.2.)
- **SHARD_GRAD_OP** gathers the weights once and reduce-scatters the gradients once in every pass;
  **FULL_SHARD** gathers them twice (Zhao et al. 2023, "PyTorch FSDP", section 3.2; Rajbhandari et
  al. 2020, "ZeRO", section 7). Gathers are prefetched behind compute as reductions are.
- **HYBRID_SHARD** does FULL_SHARD inside each node and all-reduces each rank's part of the
  gradients between nodes, once in every pass.

``overlap`` is the share of the hideable time that really hides: 1 where the network needs no
compute (NCCL over RDMA), less where it does (gloo copies and adds on the CPU that computes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sm_train.entrypoints.bus_bandwidth import Collective, Point, bus_factor, seconds_for

Sharding = Literal["DDP", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"]

BACKWARD_SHARE = 2 / 3
"""Of one pass's compute."""

BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's ``bucket_cap_mb`` by default."""

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is smaller, so that sums begin soon (``dist._DEFAULT_FIRST_BUCKET_BYTES``)."""


@dataclass(frozen=True)
class Workload:
    """What one rank does in a step.

    ``compute_seconds`` is one forward and backward pass alone, ``gradient_bytes`` and
    ``parameter_bytes`` are of the whole model, ``shard_ranks`` is how many ranks a HYBRID_SHARD
    shard group has.
    """

    compute_seconds: float
    gradient_bytes: int
    parameter_bytes: int
    accumulation: int = 1
    sharding: Sharding = "DDP"
    overlap: float = 1.0
    shard_ranks: int = 1


@dataclass(frozen=True)
class Fabric:
    """Sweeps by collective: over all ranks, and inside a node and between nodes where they differ.

    ``inter`` is of the groups that have one rank on each node.
    """

    world: Mapping[Collective, Sequence[Point]]
    intra: Mapping[Collective, Sequence[Point]]
    inter: Mapping[Collective, Sequence[Point]]


@dataclass(frozen=True)
class Step:
    """Seconds of one optimizer step: computing, communicating, and what of that is exposed."""

    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.exposed_seconds


def predict_step(work: Workload, fabric: Fabric) -> Step | None:
    """The step on this fabric; None where a sweep that it needs is missing."""
    compute = work.compute_seconds * work.accumulation
    if work.sharding == "DDP":
        return _with_ddp(work, fabric, compute)
    seconds = _pass_communication(work, fabric)
    if seconds is None:
        return None
    hidden = min(seconds, work.overlap * work.compute_seconds)
    times = work.accumulation
    return Step(compute, seconds * times, (seconds - hidden) * times)


def bucket_sizes(gradient_bytes: int) -> tuple[int, ...]:
    """DDP's buckets in the order in which they become ready."""
    sizes = [min(FIRST_BUCKET_BYTES, gradient_bytes)]
    while (left := gradient_bytes - sum(sizes)) > 0:
        sizes.append(min(BUCKET_BYTES, left))
    return tuple(sizes)


def _with_ddp(work: Workload, fabric: Fabric, compute: float) -> Step | None:
    window = work.overlap * BACKWARD_SHARE * work.compute_seconds
    ready = done = total = 0.0
    for size in bucket_sizes(work.gradient_bytes):
        seconds = seconds_for(size, fabric.world.get("all_reduce", ()))
        if seconds is None:
            return None
        ready += size / work.gradient_bytes * window
        done = max(done, ready) + seconds
        total += seconds
    return Step(compute, total, done - window)


def _pass_communication(work: Workload, fabric: Fabric) -> float | None:
    """Seconds on the network of one pass of a sharded model."""
    hybrid = work.sharding == "HYBRID_SHARD"
    sweeps = fabric.intra if hybrid else fabric.world
    gathers = 1 if work.sharding == "SHARD_GRAD_OP" else 2
    gather = seconds_for(work.parameter_bytes, sweeps.get("all_gather", ()))
    scatter = seconds_for(work.gradient_bytes, sweeps.get("reduce_scatter", ()))
    if gather is None or scatter is None:
        return None
    seconds = gathers * gather + scatter
    if hybrid:
        part = work.gradient_bytes / work.shard_ranks
        between = seconds_for(part, fabric.inter.get("all_reduce", ()))
        if between is None:
            return None
        seconds += between
    return seconds


def expected_sweep(
    collective: Collective, ranks: int, busbw: float, latency: float
) -> tuple[Point, ...]:
    """The sweep of a fabric that is in order, for the same prediction.

    ``busbw`` is in bytes a second; ``latency`` in seconds is paid ⌈log₂ ranks⌉ times, as by a tree
    (NVIDIA, "Massively Scale Your Deep Learning Training with NCCL 2.4", 2019).
    """
    base = latency * max(1, math.ceil(math.log2(max(ranks, 2))))
    factor = bus_factor(collective, ranks)
    return tuple(
        Point(size, base + size * factor / busbw) for size in (2**10, 2**20, 2**25, 2**30)
    )
