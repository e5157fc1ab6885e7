"""A run file's stages ready to be priced: model figures from the presets, speeds resolved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sm_train.cost.stage import CostStage
from sm_train.cost.throughput import Measurement, resolve_speed, same_batch
from sm_train.estimators.cost_stages import cost_stages
from sm_train.toolkit.costing.memory_fit import fixed_bytes, plan_of
from sm_train.toolkit.errors import UserError

if TYPE_CHECKING:
    from sm_train.cost.alternatives import MemoryNeed
    from sm_train.estimators.config.schema import RunConfig
    from sm_train.toolkit.costing.throughput import Measured


def stages_to_price(
    config: RunConfig, measured: Sequence[Measured] = (), *, rescale_batch: bool = False
) -> list[CostStage]:
    """The stages of ``config``, each at the speed that the firmest rule gives it.

    A measurement of the very stage counts before what the run file states; the stated speeds of
    other stages are carried over to those without one.

    Raises:
        UserError: a measurement is of another batch size, and ``rescale_batch`` is not set.
        ValueError: a figure that nobody could mean, such as a speed above the hardware's peak.
    """
    stages = [with_model(stage, config) for stage in cost_stages(config)]
    if not rescale_batch:
        refuse_other_batches(stages, measured)
    known = [*known_speeds(stages), *(_with_flops(one, stages) for one in measured)]
    return [
        _at_its_speed(stage, _belonging(stage, stages, measured), known, rescale_batch)
        for stage in stages
    ]


def known_speeds(stages: Iterable[CostStage]) -> list[Measurement]:
    """What the run file states of its stages, as measurements for the others."""
    return [
        Measurement(
            label=f"stage {stage.name}",
            steps_per_second=stage.speed.steps_per_second,
            world_size=stage.world_size,
            resolution=stage.resolution,
            effective_batch_size=stage.effective_batch_size,
            instance_type=stage.instance_type,
            flops_per_image=stage.flops_per_image,
        )
        for stage in stages
        if stage.speed
    ]


def with_model(stage: CostStage, config: RunConfig) -> CostStage:
    """``stage`` with its model's parameters and FLOP an image, where the preset is counted."""
    plan = plan_of(config, stage.resolution)
    if plan is None:
        return stage
    return replace(stage, flops_per_image=plan.training_flops_per_image, parameters=plan.parameters)


def memory_needs(config: RunConfig, stages: Iterable[CostStage]) -> dict[str, MemoryNeed]:
    """What each stage needs of a GPU, for the stages whose preset is counted."""
    from sm_train.cost.alternatives import MemoryNeed

    named = {stage.name: stage for stage in config.stages}
    needs = {}
    for stage in stages:
        plan, own = plan_of(config, stage.resolution), named[stage.name]
        if plan is not None:
            needs[stage.name] = MemoryNeed(
                partial(fixed_bytes, plan, config, own.sharding),
                partial(plan.activation_bytes, checkpointing=own.activation_checkpointing),
            )
    return needs


def refuse_other_batches(stages: Sequence[CostStage], measured: Iterable[Measured]) -> None:
    """An it/s belongs to its batch size.

    Raises:
        UserError: a measurement is of a batch size that its stage, or every stage, does not have.
    """
    for one in measured:
        named = [stage for stage in stages if stage.name == one.stage] or list(stages)
        if any(same_batch(one.measurement, stage) for stage in named):
            continue
        batches = sorted({stage.effective_batch_size or 0 for stage in named})
        raise UserError(
            f"--measured: {one.measurement.steps_per_second:.3g} it/s was measured at an "
            f"effective batch of {one.measurement.effective_batch_size}, and "
            f"{', '.join(stage.name for stage in named)} has {', '.join(map(str, batches))}; an "
            "it/s does not carry over: measure it there, or give --rescale-batch to carry "
            "images/s over"
        )


def _with_flops(one: Measured, stages: Sequence[CostStage]) -> Measurement:
    """Event lines do not count FLOP: they are those of the run's stage of the same resolution."""
    flops = next(
        (
            stage.flops_per_image
            for stage in stages
            if stage.resolution == one.measurement.resolution
        ),
        None,
    )
    return replace(one.measurement, flops_per_image=flops)


def _belonging(
    stage: CostStage, stages: Sequence[CostStage], measured: Iterable[Measured]
) -> list[Measurement]:
    """Measurements of this very stage. Those made on a CPU belong to their own stage alone."""
    alone = len(stages) == 1
    return [
        one.measurement
        for one in measured
        if (one.measurement.on_cpu and (alone or one.stage == stage.name))
        or (not one.measurement.on_cpu and _is_of(stage, one.measurement))
    ]


def _is_of(stage: CostStage, one: Measurement) -> bool:
    there = (one.world_size, one.resolution)
    same_machine = one.instance_type in (None, stage.instance_type)
    return same_machine and there == (stage.world_size, stage.resolution)


def _at_its_speed(
    stage: CostStage, own: Sequence[Measurement], known: Sequence[Measurement], rescale_batch: bool
) -> CostStage:
    if own:
        measured = resolve_speed(stage, own, rescale_batch=rescale_batch)
        if measured is not None and measured.basis in ("measured", "illustration"):
            return stage.at(measured)
    if stage.speed is not None:
        return stage
    on_gpus = [one for one in known if not one.on_cpu]
    return stage.at(resolve_speed(stage, on_gpus, rescale_batch=rescale_batch))
