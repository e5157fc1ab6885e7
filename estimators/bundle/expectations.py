"""What a stage's machines should give and its steps should take, for the doctor in the job.

A pure function of the run file and of the shipped tables, so that a bundle's bytes stay one's own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sm_train.cost.estimate import Purchase, hourly_price
from sm_train.cost.instances import instance_type
from sm_train.cost.prices import shipped_prices
from sm_train.estimators.config.schema import RunConfig, StageSection


@dataclass(frozen=True)
class Expectation:
    """One stage's; None is unknown. The job reads it as ``settings.Expected``."""

    instance_type: str
    accelerators: int
    efa: bool
    network_gbps: float | None
    nvlink_gbytes: float | None
    bf16_tflops: float | None
    steps_per_second: float | None
    speed_source: str | None
    usd_per_instance_hour: float | None


def expectations(config: RunConfig) -> dict[str, object]:
    """By the names of the stages."""
    price = _price(config)
    return {stage.name: asdict(_expectation(config, stage, price)) for stage in config.stages}


def _expectation(config: RunConfig, stage: StageSection, price: float | None) -> Expectation:
    machine, speed = instance_type(config.cluster.instance_type), stage.steps_per_second
    return Expectation(
        instance_type=machine.name,
        accelerators=machine.accelerators,
        efa=machine.supports_efa,
        network_gbps=machine.network_gbps,
        nvlink_gbytes=machine.nvlink_gbytes,
        bf16_tflops=machine.bf16_tflops,
        steps_per_second=speed,
        speed_source="the run file states it" if speed else None,
        usd_per_instance_hour=price,
    )


def _price(config: RunConfig) -> float | None:
    """Dollars of an instance-hour; unknown without a region, and for what is prepaid."""
    if config.region is None or config.cluster.capacity == "training-plan":
        return None
    purchase = Purchase(config.region, config.cluster.capacity)
    price = hourly_price(config.cluster.instance_type, purchase, shipped_prices())
    amount = price.usd_per_instance_hour
    return None if amount is None else float(amount)
