"""Bandwidths by nccl-tests' definitions, and a step's time on a measured network."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.cost.instances import instance_type, instance_types
from sm_train.cost.network import (
    CollectiveCalls,
    GpuNetwork,
    Scope,
    bus_factor,
    communication,
    step_collectives,
)
from sm_train.entrypoints.probes.bus_bandwidth import SweepPoint, algbw, busbw, seconds_for
from sm_train.entrypoints.probes.expectations import reference_bandwidths
from sm_train.entrypoints.probes.measured_network import MeasuredNetwork
from sm_train.entrypoints.probes.workload import Workload, fit_compute, predict_step

from tests.entrypoints.probes.verdict_support import cluster_of, group

MB = 2**20
SCOPES: tuple[Scope, ...] = ("world", "node", "between nodes")


def measured(network: GpuNetwork) -> MeasuredNetwork:
    """Return a network on which the sweeps find the figures of ``network``."""
    sweeps = {scope: group(network, scope).sweeps for scope in SCOPES}
    return MeasuredNetwork(network.nodes, network.per_node, sweeps)


def fabric(ranks: int, rate: float, latency: float = 0.0) -> MeasuredNetwork:
    """Return the measured network of ``ranks`` nodes with one GPU each."""
    return measured(GpuNetwork(ranks, 1, rate, rate, latency, latency))


# 100 MiB of gradients in four buckets.
WORK = Workload(0.3, 1, (CollectiveCalls("all_reduce", "world", 25 * MB, 4, "backward"),))


@pytest.mark.parametrize(
    ("collective", "ranks", "size", "microseconds", "alg", "bus"),
    [
        # Rows of all_reduce_perf on 1 to 4 × 8 A100 (github.com/NVIDIA/nccl issue 527, 2022).
        ("all_reduce", 8, 1073741824, 8142.6, 131.87, 230.77),
        ("all_reduce", 16, 1073741824, 35215, 30.49, 57.17),
        ("all_reduce", 24, 1073741824, 64782, 16.57, 31.77),
        ("all_reduce", 32, 1073741824, 70253, 15.28, 29.61),
        # The definitions (nccl-tests, doc/PERFORMANCE.md): (n − 1) / n of the whole vector.
        ("all_gather", 4, 4_000_000, 1000, 4.0, 3.0),
        ("reduce_scatter", 4, 4_000_000, 1000, 4.0, 3.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(
    collective: str, ranks: int, size: int, microseconds: float, alg: float, bus: float
) -> None:
    point = SweepPoint(size, microseconds / 1e6)
    assert algbw(point) / 1e9 == pytest.approx(alg, rel=1e-3)
    assert busbw(collective, ranks, point) / 1e9 == pytest.approx(bus, rel=1e-3)  # type: ignore[arg-type]


def test_one_rank_sends_nothing_and_none_is_a_mistake() -> None:
    assert bus_factor("all_reduce", 1) == 0
    with pytest.raises(ValueError, match="ranks: 0"):
        bus_factor("all_gather", 0)


@given(
    st.lists(
        st.tuples(st.integers(1, 2**30), st.floats(1e-6, 10.0)),
        min_size=1,
        max_size=8,
        unique_by=lambda pair: pair[0],
    ),
    st.tuples(st.integers(1, 2**33), st.integers(1, 2**33)),
)
def test_a_larger_message_never_takes_less_time(
    points: list[tuple[int, float]], sizes: tuple[int, int]
) -> None:
    sweep = [SweepPoint(*point) for point in points]
    small, large = (seconds_for(size, sweep) or 0.0 for size in sorted(sizes))
    assert small <= large * (1 + 1e-9)


def test_a_fast_network_hides_and_a_slow_one_sets_the_pace() -> None:
    fast = predict_step(WORK, fabric(2, 1e12))
    slow = predict_step(WORK, fabric(2, 100e6))
    assert fast.seconds == pytest.approx(0.3, rel=0.01)
    # 100 MiB at 100 MB/s are 1.05 s. The first of four buckets is ready after a quarter of the
    # backward pass; from then on the network is always busy.
    assert slow.seconds == pytest.approx(0.1 + 0.25 * 0.2 + 1.0486, rel=0.001)


def test_accumulation_spreads_one_sum_over_its_passes() -> None:
    once = predict_step(WORK, fabric(2, 100e6))
    four = predict_step(replace(WORK, passes=4), fabric(2, 100e6))
    assert four.exposed_seconds == pytest.approx(once.exposed_seconds)
    assert four.compute_seconds == pytest.approx(4 * once.compute_seconds)


@pytest.mark.parametrize(("unsharded_gradients", "sums"), [(True, 1), (False, 3)])
def test_sharding_sets_the_number_of_gathers_and_reductions(
    *, unsharded_gradients: bool, sums: int
) -> None:
    """With three micro-batches; ``sums`` is the number of gradient reductions."""
    slow = measured(GpuNetwork(2, 4, 200e6, 50e6, 0.0, 0.0))
    seconds = {}
    for sharding in ("shard_grad_op", "full_shard", "hybrid_shard"):
        calls = step_collectives(
            sharding,
            25 * MB,
            slow,
            units=4,
            passes=3,
            unsharded_gradients=unsharded_gradients,
        )
        seconds[sharding] = predict_step(Workload(0.3, 3, calls), slow).communication_seconds
    # bf16 weights of 50 MiB, fp32 gradients of 100 MiB; all of it crosses the slower links.
    gather, scatter = (7 / 8 * size * MB / 50e6 for size in (50, 100))
    assert seconds["shard_grad_op"] == pytest.approx(gather + sums * scatter, rel=0.01)
    assert seconds["full_shard"] == pytest.approx(6 * gather + sums * scatter, rel=0.01)
    gather, scatter = (6 / 8 * size * MB / 50e6 for size in (50, 100))
    between = 25 * MB / 50e6
    assert seconds["hybrid_shard"] == pytest.approx(6 * gather + sums * scatter + between, rel=0.01)


@given(
    st.sampled_from(["none", "shard_grad_op", "full_shard", "hybrid_shard"]),
    st.integers(1, 8),
    st.floats(1e6, 1e12),
)
def test_a_slower_network_is_never_predicted_to_be_faster(
    sharding: str, passes: int, rate: float
) -> None:
    fast, slow = fabric(4, rate), fabric(4, rate / 2)
    calls = step_collectives(sharding, 25 * MB, fast, units=4, passes=passes)
    work = Workload(0.3, passes, calls)
    on_fast, on_slow = predict_step(work, fast), predict_step(work, slow)
    assert on_fast.seconds <= on_slow.seconds * (1 + 1e-9)
    assert on_fast.exposed_seconds >= 0


@settings(deadline=None)
@given(
    sharding=st.sampled_from(["none", "shard_grad_op", "full_shard", "hybrid_shard"]),
    nodes=st.sampled_from([1, 2, 16]),
    pass_seconds=st.floats(0.01, 3.0),
    passes=st.integers(1, 4),
    units=st.integers(1, 700),
)
def test_step_on_a_network_that_reaches_its_nominal_figures_is_the_estimates(
    sharding: str, nodes: int, pass_seconds: float, passes: int, units: int
) -> None:
    nominal = instance_type("ml.p4d.24xlarge").network(nodes)
    calls = step_collectives(sharding, 250 * MB, nominal, units=units, passes=passes)
    estimate = communication(calls, nominal, pass_seconds)
    step = predict_step(Workload(pass_seconds, passes, calls), measured(nominal))
    assert step.exposed_seconds == pytest.approx(estimate.exposed)
    assert step.communication_seconds == pytest.approx(estimate.seconds)


@pytest.mark.parametrize("nodes", [2, 16])
def test_doctor_expects_the_network_that_the_estimate_is_for(nodes: int) -> None:
    for instance in instance_types():
        if instance.network_gbps and instance.accelerators == 8:
            reference = reference_bandwidths(cluster_of(nodes), instance)
            assert reference.network == instance.network(nodes), instance.name


def test_without_a_sweep_a_collective_is_unknown() -> None:
    unknown = MeasuredNetwork(4, 1, {scope: {} for scope in SCOPES})
    assert not unknown.knows(WORK.calls)
    assert fabric(4, 1e9).knows(WORK.calls)
    with pytest.raises(ValueError, match="all_reduce: not measured"):
        predict_step(WORK, unknown)


def test_compute_is_solved_from_a_known_speed() -> None:
    known = fabric(4, 5e9, 30e-6)
    step = predict_step(WORK, known)
    assert fit_compute(WORK, known, step.seconds).compute_seconds == pytest.approx(0.3, rel=1e-3)
