"""Bandwidths by nccl-tests' definitions, and the model of an optimizer step's time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.doctor.bus_bandwidth import (
    COLLECTIVES,
    SweepPoint,
    algbw,
    bus_factor,
    busbw,
    seconds_for,
)
from sm_train.entrypoints.doctor.expectations import fit_compute
from sm_train.entrypoints.doctor.step_time_model import (
    Fabric,
    Workload,
    expected_sweep,
    predict_step,
)

MB = 2**20
WORK = Workload(compute_seconds=0.3, gradient_bytes=100 * MB, parameter_bytes=50 * MB, units=4)


def fabric(ranks: int, rate: float, latency: float = 0.0) -> Fabric:
    sweeps = {one: expected_sweep(one, ranks, rate, latency) for one in COLLECTIVES}
    return Fabric(sweeps, sweeps, sweeps)


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
        unique_by=lambda one: one[0],
    ),
    st.tuples(st.integers(1, 2**33), st.integers(1, 2**33)),
)
def test_a_larger_message_never_takes_less_time(
    points: list[tuple[int, float]], sizes: tuple[int, int]
) -> None:
    sweep = [SweepPoint(*one) for one in points]
    small, large = (seconds_for(size, sweep) or 0.0 for size in sorted(sizes))
    assert small <= large * (1 + 1e-9)


def test_a_fast_network_hides_and_a_slow_one_sets_the_pace() -> None:
    fast = predict_step(WORK, fabric(2, 1e12))
    slow = predict_step(WORK, fabric(2, 100e6))
    assert fast is not None
    assert slow is not None
    assert fast.seconds == pytest.approx(0.3, rel=0.01)
    # 100 MiB at 100 MB/s are 1.05 s. The first of four buckets is ready after a quarter of the
    # backward pass; from then on the network is always busy.
    assert slow.seconds == pytest.approx(0.1 + 0.25 * 0.2 + 1.0486, rel=0.001)


def test_accumulation_spreads_one_sum_over_its_passes() -> None:
    once = predict_step(WORK, fabric(2, 100e6))
    four = predict_step(replace(WORK, gradient_accumulation_steps=4), fabric(2, 100e6))
    assert once is not None
    assert four is not None
    assert four.exposed_seconds == pytest.approx(once.exposed_seconds)
    assert four.compute_seconds == pytest.approx(4 * once.compute_seconds)


def test_no_overlap_means_all_of_it_shows() -> None:
    step = predict_step(replace(WORK, overlap=0.0), fabric(2, 100e6))
    assert step is not None
    assert step.exposed_seconds == pytest.approx(step.communication_seconds)


@pytest.mark.parametrize(("unsharded_gradients", "sums"), [(True, 1), (False, 3)])
def test_sharding_sets_the_number_of_gathers_and_reductions(
    *, unsharded_gradients: bool, sums: int
) -> None:
    """With three micro-batches; ``sums`` is the number of gradient reductions."""
    slow = fabric(4, 50e6)
    seconds = {}
    for sharding in ("shard_grad_op", "full_shard", "hybrid_shard"):
        work = replace(
            WORK,
            sharding=sharding,
            gradient_accumulation_steps=3,
            shard_ranks=4,
            unsharded_gradients=unsharded_gradients,
        )
        step = predict_step(work, slow)
        assert step is not None
        seconds[sharding] = step.communication_seconds
    gather, scatter = (0.75 * size * MB / 50e6 for size in (50, 100))
    between = 1.5 * 25 * MB / 50e6
    assert seconds["shard_grad_op"] == pytest.approx(gather + sums * scatter, rel=0.01)
    assert seconds["full_shard"] == pytest.approx(6 * gather + sums * scatter, rel=0.01)
    assert seconds["hybrid_shard"] == pytest.approx(6 * gather + sums * scatter + between, rel=0.01)


@given(
    st.sampled_from(["none", "shard_grad_op", "full_shard", "hybrid_shard"]),
    st.integers(1, 8),
    st.floats(1e6, 1e12),
)
def test_a_slower_network_is_never_predicted_to_be_faster(
    sharding: str, gradient_accumulation_steps: int, rate: float
) -> None:
    work = replace(
        WORK,
        sharding=sharding,
        gradient_accumulation_steps=gradient_accumulation_steps,
        shard_ranks=2,
    )
    one, other = (predict_step(work, fabric(4, speed)) for speed in (rate, rate / 2))
    assert one is not None
    assert other is not None
    assert one.seconds <= other.seconds * (1 + 1e-9)
    assert one.exposed_seconds >= 0


def test_without_a_sweep_nothing_is_predicted() -> None:
    for sharding in ("none", "full_shard"):
        assert predict_step(replace(WORK, sharding=sharding), Fabric({})) is None


def test_compute_is_solved_from_a_known_speed() -> None:
    known = fabric(4, 5e9, 30e-6)
    step = predict_step(WORK, known)
    assert step is not None
    assert fit_compute(WORK, known, step.seconds).compute_seconds == pytest.approx(0.3, rel=1e-3)
