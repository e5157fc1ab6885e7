"""What a stage's machines should give and its steps should take, for the doctor in the job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from sm_train.cost.estimate import StageEstimate


@dataclass(frozen=True)
class Expectation:
    """One stage's; None is unknown. The job reads it as ``settings.Expected``."""

    instance_type: str
    accelerators: int
    efa: bool
    network_gbps: float | None
    nvlink_gbytes: float | None
    bf16_tflops: float | None
    iterations_per_second: float | None
    speed_source: str | None
    usd_per_instance_hour: float | None


def expectations(stages: Iterable[StageEstimate]) -> dict[str, object]:
    """By the names of the stages, from how they were priced."""
    return {one.stage.name: asdict(_expectation(one)) for one in stages}


def _expectation(one: StageEstimate) -> Expectation:
    machine, speed, price = one.stage.machine, one.stage.speed, one.price.usd_per_instance_hour
    return Expectation(
        instance_type=machine.name,
        accelerators=machine.accelerators,
        efa=machine.supports_efa,
        network_gbps=machine.network_gbps,
        nvlink_gbytes=machine.nvlink_gbytes,
        bf16_tflops=machine.bf16_tflops,
        iterations_per_second=speed.iterations_per_second if speed else None,
        speed_source=speed.basis if speed else None,
        usd_per_instance_hour=None if price is None else float(price),
    )
