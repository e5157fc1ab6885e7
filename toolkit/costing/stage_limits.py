"""What limits each stage of a run, and the change of the run file that saves most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from typing import Any

from sm_train.cost.estimate import Estimate, StageEstimate, stage_cost
from sm_train.cost.speed_model import StepShares
from sm_train.cost.stage import CostStage
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.memory.memory_fit import CHECKPOINTING, STRATEGIES, fits, plan_for

_LEAST_SAVING = Decimal("0.005")
"""Changes that save less than this share of a stage's cost are not proposed."""


@dataclass(frozen=True)
class FasterChange:
    """A change, the predicted speed with it ÷ that without, and the dollars that it saves."""

    text: str
    speedup: float
    saved: Decimal


@dataclass(frozen=True)
class StageLimit:
    """The shares of a stage's step, and the change that saves most; None if none helps."""

    stage: str
    shares: StepShares
    change: FasterChange | None

    def as_dict(self) -> dict[str, Any]:
        change = self.change
        return {
            "resource": self.shares.limit,
            "shares": asdict(self.shares),
            "change": change and change.text,
            "speedup": change and change.speedup,
            "saved_usd": change and float(change.saved),
        }

    def describe(self) -> str:
        """Return what limits the stage as a sentence."""
        return f"{self.stage} is limited by {self.shares.limit}: {self.shares.describe()}"

    def describe_change(self) -> str:
        """Return the change with its dollars as a phrase."""
        if self.change is None:
            return "no change of the run file is predicted to help"
        return (
            f"{self.change.text} is predicted to train {self.change.speedup:.2f} × as fast and to "
            f"save ${self.change.saved:,.0f}"
        )


def stage_limits(config: RunConfig, estimate: Estimate) -> list[StageLimit | None]:
    """Return the limit of each stage; None where the model or the GPU is unknown.

    Changes are compared by the ratio of the speed model's predictions, which scales the stage's
    own speed. Proposed are only those that fit the GPU's memory at the same effective batch.
    """
    sections = {section.name: section for section in config.stages}
    return [
        _limit(config, sections[priced.stage.name], priced, estimate) for priced in estimate.stages
    ]


def _limit(
    config: RunConfig, section: StageSection, priced: StageEstimate, estimate: Estimate
) -> StageLimit | None:
    shares = priced.stage.step_shares
    if shares is None:
        return None
    changes = _changes(config, section, priced, estimate)
    best = max(changes, key=lambda change: change.saved, default=None)
    return StageLimit(section.name, shares, best)


def _changes(
    config: RunConfig, section: StageSection, priced: StageEstimate, estimate: Estimate
) -> Iterator[FasterChange]:
    """Yield the changes that save money."""
    stage, cost = priced.stage, priced.cost
    before = stage.predicted_images_per_second
    # A script of the user's own reads none of these keys.
    if stage.speed is None or cost is None or not before or config.entry is not None:
        return
    for text, changed in _variants(config, section, stage):
        speedup = (changed.predicted_images_per_second or before) / before
        try:
            faster = changed.at(stage.speed.scaled(speedup))
        except ValueError:  # above the hardware's peak
            continue
        after = stage_cost(faster, priced.price, estimate.purchase, estimate.assumed)[1]
        if after is not None and cost - after >= _LEAST_SAVING * cost:
            yield FasterChange(text, speedup, cost - after)


def _variants(
    config: RunConfig, section: StageSection, stage: CostStage
) -> Iterator[tuple[str, CostStage]]:
    """Yield changes of the run file that fit into memory, each with the stage that it makes."""
    name, unknown = f"stages.{section.name}", replace(stage, speed=None)
    if not stage.compiled:
        # SMDDP's image has a PyTorch with which compiled training was never measured.
        newer = "cluster.backend: nccl (a newer PyTorch, which compiles)"
        text = newer if config.cluster.backend == "smddp" else "training.compile: true"
        yield text, replace(unknown, compiled=True)
    if stage.encoder_flops_per_image:
        latents = replace(unknown, encoder_flops_per_image=0.0, holds_latents=True)
        yield f"latents of {stage.resolution} px (`sm-train pack --latents`)", latents
    lighter = CHECKPOINTING[: CHECKPOINTING.index(stage.activation_checkpointing)]
    for choice in lighter:
        if fits(config, section, activation_checkpointing=choice):
            changed = replace(unknown, activation_checkpointing=choice)
            yield f"{name}.activation_checkpointing: {str(choice).lower()}", changed
    if stage.reduce_dtype == "fp32" and stage.world_size > 1:
        yield "training.reduce_dtype: bf16", replace(unknown, reduce_dtype="bf16")
    plan = plan_for(config, stage.resolution)
    for strategy in STRATEGIES if stage.world_size > 1 and plan else ():
        if strategy != section.sharding and fits(config, section, sharding=strategy):
            units = plan.communication_units(strategy) if plan else None
            sharded = replace(unknown, sharding=strategy, communication_units=units)
            yield f"{name}.sharding: {strategy}", sharded
    images, passes = section.per_device_batch_size, section.gradient_accumulation_steps
    if passes % 2 == 0 and fits(config, section, per_device_batch_size=2 * images):
        larger = replace(
            unknown, per_device_batch_size=2 * images, gradient_accumulation_steps=passes // 2
        )
        text = f"per_device_batch_size: {2 * images}, gradient_accumulation_steps: {passes // 2}"
        yield f"{name}.{text}", larger
