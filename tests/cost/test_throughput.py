"""The speed of a stage: rules, their order, and how the range widens."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.cost.network import gpu_network
from sm_train.cost.scaling import StepScaling, fit_scaling, scale_one, scale_steps
from sm_train.cost.speed import Speed, stated_speed
from sm_train.cost.speed_model import SPREAD, StepWork, exposed_communication
from sm_train.cost.stage import CostStage
from sm_train.cost.throughput import CARRY_SPREAD, RESIZED_SPREAD, Measurement, resolve_speed

from benchmarks.speed_calibration import SpeedPoint, speed_points

FLOPS = {256: 0.543e12, 512: 2.413e12}
KEPT_BYTES = {256: 0.318e9, 512: 1.246e9}


def stage(resolution: int = 256, instances: int = 4, **changes: Any) -> CostStage:
    made = CostStage(
        name=f"{resolution}px",
        resolution=resolution,
        instance_type="ml.p4de.24xlarge",
        instances=instances,
        per_device_batch_size=1024 // (instances * 8),
        gradient_accumulation_steps=2,
        max_steps=1000,
        flops_per_image=FLOPS[resolution],
        activation_bytes_per_image=KEPT_BYTES[resolution],
        parameters=865_910_724,
    )
    return replace(made, **changes)


def measured(its: float, gpus: int, resolution: int = 256, **changes: Any) -> Measurement:
    own = stage(resolution, max(1, gpus // 8))
    own = replace(own, per_device_batch_size=2048 // (2 * own.world_size))
    made = Measurement("job", its, gpus, resolution, 2048, "ml.p4de.24xlarge")
    predicted = own.predicted_images_per_second
    return replace(made, **{"predicted_images_per_second": predicted} | changes)


def resolved(cost_stage: CostStage, *measurements: Measurement, **options: Any) -> Speed:
    speed = resolve_speed(cost_stage, measurements, **options)
    assert speed is not None
    return speed


def width(speed: Speed) -> float:
    return speed.high / speed.low


def test_each_rule_is_named_and_widens_the_range() -> None:
    own = resolved(stage(), measured(1.8, 32))
    fitted = resolved(stage(), measured(0.5, 8), measured(0.97, 16))
    scaled = resolved(stage(instances=16), measured(1.8, 32))
    moved = resolved(stage(512), measured(1.8, 32))
    other = resolved(stage(instance_type="ml.p5.48xlarge"), measured(1.8, 32))
    nothing = resolved(stage())
    assert [speed.basis for speed in (own, fitted, scaled, moved, other, nothing)] == [
        "measured",
        "scaling fit",
        "scaled",
        "other resolution",
        "other hardware",
        "predicted",
    ]
    assert own.steps_per_second == 1.8
    assert width(own) < width(fitted)
    assert width(own) < width(moved)
    assert width(own) < width(other)
    assert all(speed.why for speed in (own, fitted, scaled, moved, other, nothing))


def test_measurement_is_carried_by_the_ratio_of_two_predictions() -> None:
    own, other = stage(), stage(512)
    assert own.predicted_images_per_second is not None
    assert other.predicted_images_per_second is not None
    ratio = other.predicted_images_per_second / own.predicted_images_per_second
    speed = resolved(other, measured(1.8, 32))
    assert speed.steps_per_second == pytest.approx(1.8 * ratio)
    assert "the speed model's prediction there; the same share of its prediction here" in speed.why
    p5 = stage(instance_type="ml.p5.48xlarge")
    assert p5.predicted_images_per_second is not None
    ratio = p5.predicted_images_per_second / own.predicted_images_per_second
    assert resolved(p5, measured(1.8, 32)).steps_per_second == pytest.approx(1.8 * ratio)


def test_nearest_measurement_is_carried() -> None:
    other_gpu = measured(4.0, 32, instance_type="ml.p5.48xlarge")
    near, far = measured(1.0, 32, 512), measured(1.8, 32, 256)
    found = resolved(stage(512, per_device_batch_size=8), other_gpu, far, near)
    assert (
        found.steps_per_second
        == resolved(stage(512, per_device_batch_size=8), near).steps_per_second
    )


@settings(deadline=None, max_examples=60)
@given(
    share=st.floats(1 / SPREAD, SPREAD),
    resolution=st.sampled_from([256, 512]),
    kind=st.sampled_from(["ml.p4de.24xlarge", "ml.p5.48xlarge", "ml.g6e.48xlarge"]),
    instances=st.sampled_from([1, 4, 16]),
    batch=st.sampled_from([8, 32]),
)
def test_plausible_measurement_keeps_other_stages_in_their_unmeasured_range(
    share: float, resolution: int, kind: str, instances: int, batch: int
) -> None:
    own = stage()
    predicted = (own.predicted_images_per_second or 0) / 2048
    single = stage(resolution, instances, instance_type=kind, per_device_batch_size=batch)
    unmeasured = resolved(single)
    carried = resolved(single, measured(predicted * share, 32))
    tolerance = 1 + 1e-9
    assert unmeasured.low <= carried.steps_per_second * tolerance
    assert carried.steps_per_second <= unmeasured.high * tolerance


def test_published_pairs_lie_within_the_spread_of_a_carried_speed() -> None:
    """Two points of one source and model: the ratio of the speeds against the model's."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for point, other in combinations(speed_points(), 2):
        same_software = (point.source, point.model, point.work.sharding, point.work.compiled) == (
            other.source,
            other.model,
            other.work.sharding,
            other.work.compiled,
        )
        if same_software and bool(point.work.encoder_flops) == bool(other.work.encoder_flops):
            error = abs(math.log(point.ratio() / other.ratio()))
            errors[point.network.gpus == other.network.gpus].append(error)
    for same_size, spread in ((True, CARRY_SPREAD), (False, RESIZED_SPREAD)):
        found = errors[same_size]
        assert len(found) > 80
        inside = sum(error <= math.log(spread) for error in found) / len(found)
        assert inside >= 0.9


def test_prediction_without_measurements_is_the_speed_models() -> None:
    single = stage()
    speed = resolved(single)
    assert single.predicted_images_per_second is not None
    assert speed.steps_per_second == pytest.approx(single.predicted_images_per_second / 2048)
    assert width(speed) == pytest.approx(SPREAD**2)
    # BRIA publishes 1.8 it/s for this stage.
    assert speed.low < 1.8 < speed.high
    assert "(calibrated on 97 published points)" in speed.why
    other = resolved(stage(instance_type="ml.g5.48xlarge"))
    assert "none of A10G is published, so the range is wider" in other.why
    assert other.high / other.low > speed.high / speed.low


def test_no_extrapolation_exceeds_the_peak() -> None:
    # 72 % MFU on p4de, carried to other GPUs and cluster sizes.
    fast = measured(0.72 * 312 * 32 / (0.543 * 2048), 32)
    for changes in (
        {"instances": 64, "per_device_batch_size": 4, "gradient_accumulation_steps": 1},
        {"instance_type": "ml.p5.48xlarge"},
        {"instance_type": "ml.g5.48xlarge"},
        {"instance_type": "ml.p6-b200.48xlarge"},
    ):
        single = stage(**changes)
        moved = single.at(resolved(single, fast))
        assert moved.flops_utilization is not None
        assert moved.flops_utilization <= 1
        speed = moved.speed
        assert speed is not None
        assert single.at(replace(speed, steps_per_second=speed.high)).flops_utilization <= 1 + 1e-9  # type: ignore[operator]


def test_measurement_of_fewer_figures_scales_with_the_cluster() -> None:
    """Without the model's figures: fewer GPUs are each at least as fast as measured."""
    single = stage(instances=2, flops_per_image=None, per_device_batch_size=64)
    known = measured(1.8, 32, predicted_images_per_second=None)
    found = resolved(single, known)
    assert found.low == pytest.approx(0.9)
    assert found.steps_per_second == pytest.approx(0.9 / 0.95)


def test_speed_is_unknown_without_flops() -> None:
    assert resolve_speed(stage(flops_per_image=None), []) is None


def test_other_batch_counts_only_with_rescale_batch() -> None:
    small = measured(4.0, 32, effective_batch_size=1024)
    # The model carries it: a larger batch per GPU takes more than half of the steps.
    assert resolved(stage(), small).basis == "scaled"
    rescaled = resolved(stage(), small, rescale_batch=True)
    assert rescaled.steps_per_second == pytest.approx(2.0)
    assert "--rescale-batch" in rescaled.why


def test_cpu_speed_is_only_an_illustration() -> None:
    speed = resolved(stage(flops_per_image=None), measured(1.0, 2, on_cpu=True))
    assert speed.basis == "illustration"
    assert "not on 256px (4 × ml.p4de.24xlarge, 32 GPUs" in speed.why


def test_rejects_speed_above_peak_with_the_arithmetic() -> None:
    # 0.543 TFLOP × 2048 images × 10 it/s = 11,121 TFLOP/s; 32 × 312 = 9,984.
    with pytest.raises(ValueError, match="steps_per_second") as caught:
        stage().at(stated_speed(10, "given"))
    for expected in ("111%", "2048 images", "0.543 TFLOP", "11,121 TFLOP/s", "9,984"):
        assert expected in str(caught.value)
    assert stage().at(stated_speed(8.9, "given")).flops_utilization == pytest.approx(
        0.991, abs=1e-3
    )


points = st.dictionaries(
    st.sampled_from([8, 16, 32, 64, 128, 256, 512, 1024]),
    st.floats(1.0, 200.0),
    min_size=2,
    max_size=8,
)


@settings(deadline=None, max_examples=200)
@given(points, st.integers(8, 4096))
def test_fit_range_contains_the_prediction_for_any_points(
    per_gpu: dict[int, float], gpus: int
) -> None:
    fit = fit_scaling([(size, size * each) for size, each in per_gpu.items()])
    found = fit.predict(gpus)
    assert 0 < found.low <= found.images_per_second <= found.high


def test_fit_reproduces_points_on_a_law() -> None:
    law = {gpus: gpus / (0.007 + 2e-5 * gpus) for gpus in (8, 32, 128)}
    fit = fit_scaling(list(law.items()))
    for gpus, images in law.items():
        assert fit.predict(gpus).images_per_second == pytest.approx(images)
    assert fit.residual == pytest.approx(0, abs=1e-9)
    assert fit.predict(64).images_per_second == pytest.approx(64 / (0.007 + 2e-5 * 64))


def test_fit_needs_two_cluster_sizes() -> None:
    with pytest.raises(ValueError, match="two or more cluster sizes"):
        fit_scaling([(8, 100.0), (8, 101.0)])


@given(st.integers(0, 7), st.integers(0, 7))
def test_one_point_scales_both_ways_by_published_efficiency(here: int, there: int) -> None:
    """More GPUs are at most as fast each as measured, fewer GPUs at least."""
    found = scale_one(8 * 2**here, 100.0, 8 * 2**there)
    linear = 100.0 * 2.0 ** (there - here)
    assert found.low <= found.images_per_second <= found.high
    assert (found.low if there < here else found.high) == pytest.approx(linear)
    back = scale_one(8 * 2**there, found.images_per_second, 8 * 2**here)
    assert back.images_per_second == pytest.approx(100.0)


def weak_scaling_points() -> list[tuple[list[SpeedPoint], SpeedPoint]]:
    """Published points of equal work per GPU: those on the smallest cluster, and a larger one."""
    groups: dict[object, list[SpeedPoint]] = {}
    for point in speed_points():
        key = (point.source, point.model, point.resolution, point.gpu, point.work)
        groups.setdefault(key, []).append(point)
    pairs = []
    for group in groups.values():
        smallest = min(point.network.gpus for point in group)
        base = [point for point in group if point.network.gpus == smallest]
        pairs += [(base, point) for point in group if point.network.gpus > smallest]
    return pairs


def seconds_of(point: SpeedPoint) -> float:
    images = point.work.images * point.work.passes * point.network.gpus
    return images / point.images_per_second


def assert_predicted(measured_points: list[SpeedPoint], expected: SpeedPoint) -> None:
    """Within 5 %, and inside the range."""
    work = expected.work
    step = scale_steps(
        [(point.network, seconds_of(point)) for point in measured_points],
        expected.network,
        lambda network, compute: exposed_communication(work, network, compute / work.passes),
    )
    assert step.low <= seconds_of(expected) <= step.high
    assert step.seconds / seconds_of(expected) == pytest.approx(1, abs=0.05)


def test_one_measured_cluster_predicts_published_larger_ones() -> None:
    """H100 and H200, 4 to 128 GPUs, DDP and full sharding: within 5 %, and inside the range."""
    pairs = weak_scaling_points()
    assert len(pairs) >= 7
    for base, larger in pairs:
        assert_predicted(base, larger)


def test_largest_measured_cluster_predicts_published_smaller_ones() -> None:
    """As above, from the largest to the smallest."""
    for base, larger in weak_scaling_points():
        assert_predicted([larger], base[0])


def test_speed_that_waits_for_the_network_is_not_carried_to_a_cluster_without_one() -> None:
    """3.42 it/s on 16 nodes became 3.42 it/s on one node: $264 where the model says $114."""
    figures = {"per_device_batch_size": 4, "gradient_accumulation_steps": 1}
    large, single = (stage(instances=instances, **figures) for instances in (16, 1))
    alone, stated = resolved(single), resolved(large).steps_per_second
    known = measured(
        stated,
        128,
        effective_batch_size=512,
        per_device_batch_size=4,
        gradient_accumulation_steps=1,
    )
    found = resolved(single, known)
    assert stated < 0.8 * alone.steps_per_second
    assert found.low <= alone.steps_per_second <= found.high * 1.05
    assert found.low >= stated * 0.9


@settings(deadline=None, max_examples=50)
@given(
    seconds=st.floats(0.05, 5),
    growth=st.floats(0.9, 1.6),
    nodes=st.sampled_from([1, 2, 4, 8, 16, 64, 256]),
    sharding=st.sampled_from(["none", "full_shard"]),
    both=st.booleans(),
)
def test_scaled_step_is_never_faster_than_its_compute(
    seconds: float, growth: float, nodes: int, sharding: str, both: bool
) -> None:
    """The range contains the median, and no cluster size makes a GPU faster than measured."""
    work = StepWork(8, 1, 2.4e12, 1.2e9, 900_000_000, sharding=sharding)
    sizes = [gpu_network(size, 8, 400, 300) for size in ((1, 2) if both else (1,))]
    points = list(zip(sizes, (seconds, seconds * growth), strict=False))
    step = scale_steps(
        points,
        gpu_network(nodes, 8, 400, 300),
        lambda network, compute: exposed_communication(work, network, compute),
    )
    assert step.low <= step.seconds <= step.high
    assert math.isfinite(step.high)
    assert step.seconds >= 0.9 * min(measured for _, measured in points) or nodes <= 2
    assert 1 / 8 <= step.network_speed <= 8


def test_slower_second_node_means_a_slower_network_and_a_slower_cluster() -> None:
    work = StepWork(8, 1, 2.4e12, 1.2e9, 2_000_000_000)
    single, two, sixteen = (gpu_network(nodes, 8, 400, 300) for nodes in (1, 2, 16))

    def scaled(second: float) -> StepScaling:
        return scale_steps(
            [(single, 0.30), (two, second)],
            sixteen,
            lambda network, compute: exposed_communication(work, network, compute),
        )

    quick, slow = scaled(0.31), scaled(0.50)
    assert slow.network_speed < quick.network_speed
    assert slow.seconds > quick.seconds
    assert slow.seconds > 0.50


@settings(deadline=None, max_examples=30)
@given(
    its=st.floats(0.01, 5),
    here=st.integers(1, 32),
    there=st.integers(1, 256),
    sharding=st.sampled_from(["none", "full_shard", "hybrid_shard"]),
)
def test_measured_work_per_gpu_applies_at_any_size_and_fewer_gpus_are_no_slower(
    its: float, here: int, there: int, sharding: str
) -> None:
    def sized(instances: int) -> CostStage:
        batch = {"per_device_batch_size": 16, "sharding": sharding}
        return replace(stage(), instances=instances, **batch)

    measurement = Measurement(
        "job",
        min(its, 0.5 * resolved(sized(here)).steps_per_second),
        8 * here,
        256,
        16 * 2 * 8 * here,
        "ml.p4de.24xlarge",
        per_device_batch_size=16,
        gradient_accumulation_steps=2,
    )
    speed = resolved(sized(there), measurement)
    assert speed.basis == ("measured" if here == there else "scaled")
    assert speed.low <= speed.steps_per_second <= speed.high
    if there != here:
        # Equal work on each GPU: no cluster takes a step faster than a smaller one, but for noise.
        ratio = speed.steps_per_second / measurement.steps_per_second
        assert ratio >= 1 - 1e-9 if there < here else ratio <= 1.05 * (1 + 1e-9)
    assert resolve_speed(replace(sized(there), per_device_batch_size=8), [measurement]) != speed
