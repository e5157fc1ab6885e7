"""Collectives of the network model against those that the training loop starts on 128 ranks."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch.distributed as dist
from sm_train.cost.network import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    GpuNetwork,
    step_collectives,
)
from sm_train.entrypoints.models.components import read_preset
from sm_train.entrypoints.models.network import Network
from sm_train.entrypoints.planning.memory import plan_preset

from tests.support.deadline import DEADLINE
from tests.support.fake_gpu import FakeReport, FakeRun, run_on_fake_gpu

CLUSTER = GpuNetwork(nodes=16, per_node=8, between_nodes=30e9, inside_node=225e9)
RESOLUTION, PASSES = 128, 2
NAMES = {
    "allreduce": "all_reduce",
    "allgather_base": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
}
SCALARS = {"_exchange_status", "log_steps", "gradient_norm"}
"""Functions that exchange numbers: the request to stop, a log interval's metrics, the norm."""

Traffic = dict[tuple[str, int], tuple[int, int]]
"""Collective and size of its group → calls and bytes in a step."""


def add_up(calls: Iterable[tuple[str, int, int, int]]) -> Traffic:
    traffic: Traffic = {}
    for name, ranks, count, size in calls:
        known, total = traffic.get((name, ranks), (0, 0))
        traffic[name, ranks] = known + count, total + count * size
    return traffic


def predicted(preset: str, sharding: str) -> Traffic:
    parameters = plan_preset(preset, RESOLUTION, precision="bf16").parameters
    calls = step_collectives(sharding, parameters, CLUSTER, passes=PASSES)
    return add_up(
        (one.kind, CLUSTER.ranks(one.scope), one.count * one.passes, round(one.bytes))
        for one in calls
    )


def observed(report: FakeReport) -> Traffic:
    return add_up(
        (NAMES[one.name], one.ranks, one.count, one.bytes)
        for one in report.collectives
        if one.function not in SCALARS
    )


def expected_calls(preset: str, sharding: str) -> dict[tuple[str, int], int]:
    """Return the calls of FSDP2: one for each block, and one for the weights outside of them."""
    units = len(plan_preset(preset, RESOLUTION, precision="bf16").fsdp_block_parameters) + 1
    ranks = CLUSTER.per_node if sharding == "hybrid_shard" else CLUSTER.gpus
    calls = {("all_gather", ranks): 2 * PASSES * units, ("reduce_scatter", ranks): units}
    if sharding == "hybrid_shard":
        calls["all_reduce", CLUSTER.nodes] = units
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["sd2", "mmdit-8b"])
@pytest.mark.parametrize("sharding", ["none", "full_shard", "hybrid_shard"])
def test_bytes_of_a_step_are_those_of_the_network_model(preset: str, sharding: str) -> None:
    run = FakeRun(preset, RESOLUTION, 1, PASSES, 1, sharding, world_size=CLUSTER.gpus)
    [report] = run_on_fake_gpu([run], timeout=4 * DEADLINE).reports
    actual, model = observed(report), predicted(preset, sharding)
    assert actual.keys() == model.keys()
    for key, (_, size) in model.items():
        # FSDP2 pads the rows of each weight to a multiple of the ranks.
        assert actual[key][1] == pytest.approx(size, rel=0.01), key
    # DDP divides its first bucket into others after a pass, for which it reads from the GPU.
    if sharding != "none":
        calls = {key: count for key, (count, _) in actual.items()}
        assert calls == expected_calls(preset, sharding)


@pytest.mark.parametrize("preset", ["sd2", "mmdit-2b"])
def test_buckets_of_ddp_are_larger_than_the_models(preset: str) -> None:
    """A bucket ends with the weight that fills it: at most twice as many are predicted."""
    network = Network(read_preset(preset)["network"], None, 64).module
    # Gradients are ready in about the reverse order of the weights.
    weights = [*network.parameters()][::-1]
    limits = [FIRST_BUCKET_BYTES, BUCKET_BYTES]
    buckets, _ = dist._compute_bucket_assignment_by_size(weights, limits)
    [(predicted_calls, _)] = predicted(preset, "none").values()
    assert predicted_calls / 2 <= len(buckets) <= predicted_calls
