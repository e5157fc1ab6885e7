"""Published figures, reproduced by this package's functions. Each names its source."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

import pytest
from sm_train.cost.assumptions import Assumptions
from sm_train.cost.estimate import Purchase, estimate
from sm_train.cost.json_document import usd_per_day, usd_per_million_images
from sm_train.cost.prices import PriceRow, PriceTable, shipped_prices
from sm_train.cost.scaling import fit_scaling
from sm_train.cost.speed import stated_speed
from sm_train.cost.stage import CostStage

TRAINING_ALONE = Assumptions(
    start_up_seconds=0,
    failures_per_gpu_hour=0,
    checkpoint_blocking_seconds=0,
    bytes_per_image=0,
    log_bytes_per_step=0,
)

P4DE, P5 = "ml.p4de.24xlarge", "ml.p5.48xlarge"

# README of github.com/mosaicml/diffusion: A100s, images/s at 256 and 512 px, days, dollars.
MOSAICML = [
    (8, 1100, 290, "81.33", 31_230),
    (16, 2180, 585, "40.42", 31_043),
    (32, 4080, 1195, "20.06", 30_805),
    (64, 8530, 2340, "10.14", 31_146),
    (128, 11600, 4590, "5.51", 33_874),
]
BATCH = 2048


def at(
    name: str, resolution: int, gpus: int, images_per_second: float, max_steps: int
) -> CostStage:
    return CostStage(
        name=name,
        resolution=resolution,
        instance_type="ml.p4d.24xlarge",
        instances=gpus // 8,
        per_device_batch_size=BATCH // gpus,
        gradient_accumulation_steps=1,
        max_steps=max_steps,
        speed=stated_speed(images_per_second / BATCH, "README"),
    )


@pytest.mark.parametrize(("gpus", "at_256", "at_512", "days", "dollars"), MOSAICML)
def test_mosaicml_published_rows(
    gpus: int, at_256: float, at_512: float, days: str, dollars: int
) -> None:
    # 1,126,400,000 images at 256 px and 1,740,800,000 at 512 px, at $2 for an A100-hour.
    two_dollars = PriceTable.of(
        [PriceRow("ml.p4d.24xlarge", "*", "on-demand", Decimal(16), "verified", "README", None)]
    )
    stages = [
        at("256px", 256, gpus, at_256, 1_126_400_000 // BATCH),
        at("512px", 512, gpus, at_512, 1_740_800_000 // BATCH),
    ]
    priced = estimate(stages, Purchase("us-east-1"), assumed=TRAINING_ALONE, prices=two_dollars)
    seconds = sum(stage.seconds.billable or 0 for stage in priced.stages)
    assert f"{seconds / 86400:.2f}" == days
    assert float(priced.cost or 0) == pytest.approx(dollars, abs=1)


def test_bria_cluster() -> None:
    # BRIA 2.0: 4 × p4de, 1.8 it/s at an effective batch of 2048; 16 instances under two weeks.
    price = shipped_prices().price(P4DE, "us-east-1").usd_per_instance_hour
    assert price is not None
    images_per_second = 1.8 * 2048
    assert images_per_second == pytest.approx(3686.4)
    assert images_per_second * 86400 == pytest.approx(318_504_960)
    assert usd_per_day(4, price) == Decimal("3030.15432")
    assert float(usd_per_million_images(images_per_second, 4, price)) == pytest.approx(
        9.5137, abs=1e-4
    )
    # 16 × 14 × 24 h × $31.5641075
    assert 14 * usd_per_day(16, price) == Decimal("169688.64192")


def test_mlperf_points_and_interpolation() -> None:
    # MLPerf Training v4.0, Stable Diffusion at 512 px, NVIDIA: 51,200 images in 50.27 s on 8 H100,
    # 100 steps of 2,048 in 4.10 s on 1,024.
    small, large = 51_200 / 50.27, 100 * 2048 / 4.10
    fit = fit_scaling([(8, small), (1024, large)])
    assert fit.predict(8).images_per_second == pytest.approx(small)
    assert fit.predict(1024).images_per_second == pytest.approx(large)
    between = fit.predict(128)
    assert between.low < between.images_per_second < between.high
    # Nothing superlinear, and no less than the power law through both points, less the spread.
    assert between.high < 1.07 * 16 * small
    assert between.low == pytest.approx(9414 / 1.084, rel=0.01)


def test_aws_published_nodes() -> None:
    # awsome-distributed-training, Stable Diffusion 2 at 512 px: images/s of one node.
    dollars = {
        name: float(usd_per_million_images(speed, 1, price))
        for name, speed in ((P4DE, 204.2), (P5, 385.3))
        if (price := shipped_prices().price(name, "us-east-1").usd_per_instance_hour)
    }
    assert dollars[P4DE] == pytest.approx(31.5641075 / 3600 / 204.2 * 1e6)
    assert dollars[P4DE] == pytest.approx(42.94, abs=0.01)
    assert dollars[P5] == pytest.approx(45.63, abs=0.01)


def test_two_weeks_in_seconds() -> None:
    stage = CostStage(
        name="256px",
        resolution=256,
        instance_type=P4DE,
        instances=16,
        per_device_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=round(timedelta(days=14).total_seconds() * 1.8),
        speed=stated_speed(1.8, "published"),
    )
    priced = estimate([stage], Purchase("us-east-1"), assumed=TRAINING_ALONE)
    assert float(priced.cost or 0) == pytest.approx(169_688.64, abs=0.01)
