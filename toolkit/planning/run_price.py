"""The price of a run: its stages with the model's figures and a speed, what limits each, and the
estimate of the run, of a stage or of a number of steps on every cluster that its jobs may get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

from sm_train.cost.estimate import Estimate, StageEstimate, stage_cost
from sm_train.cost.speed import Speed
from sm_train.cost.speed_model import StepShares, TextEncoderPlacement, images_per_second
from sm_train.cost.stage import UNKNOWN_PROGRAM, CostStage, StageProgram
from sm_train.cost.throughput import (
    Measurement,
    cluster_network,
    is_comparable,
    predicted_speed,
    resolve_speed,
)
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.cost_stages import cost_stages, stages_measured_elsewhere
from sm_train.estimators.request.launch_plan import compile_choice, pytorch_version
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.memory.memory_fit import (
    CHECKPOINTING,
    STRATEGIES,
    fits,
    plan_for,
    planned_text_encoders,
    possible_placements,
    stage_layout,
)
from sm_train.toolkit.memory.sharding_choice import possible_strategies
from sm_train.toolkit.planning.price_table import price_table

if TYPE_CHECKING:
    from sm_train.cost.alternatives import MemoryNeed
    from sm_train.cost.throughput import StageMeasurement
    from sm_train.entrypoints.planning.memory import ModelPlan, StageLayout
    from sm_train.estimators.config.schema import RunConfig


from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


from sm_train.cost.assumptions import Assumptions, learned
from sm_train.cost.estimate import Purchase, estimate
from sm_train.cost.json_document import as_document
from sm_train.cost.throughput import StageMeasurement
from sm_train.estimators.config.placement import Placement, unique_placements
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.planning.history import History
from sm_train.toolkit.terminal.formatting import format_total_usd

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


def stages_to_price(
    config: RunConfig, measured: Sequence[StageMeasurement] = (), *, rescale_batch: bool = False
) -> list[CostStage]:
    """Return the stages of ``config``, each with its most reliable speed.

    A measurement of the same stage takes precedence over the speed that the run file states.
    Stages without either get the speed of other stages, converted.

    A measurement of another batch is converted, by images per second with ``rescale_batch``.

    Raises:
        ValueError: a figure is implausible, such as a speed above the hardware's peak.
    """
    stages = [_as_shown(stage, config, measured) for stage in cost_stages(config)]
    elsewhere = [with_model_figures(stage, config) for stage in stages_measured_elsewhere(config)]
    known = [
        *stated_measurements([*stages, *elsewhere]),
        *(_with_prediction(measurement, stages, config) for measurement in measured),
    ]
    return [
        _with_speed(stage, _measurements_of(stage, stages, measured), known, rescale_batch)
        for stage in stages
    ]


_INDEPENDENT = {"holds_latents", "compiled"}
"""Settings that are the same on every cluster."""


def _as_shown(
    stage: CostStage, config: RunConfig, measured: Iterable[StageMeasurement]
) -> CostStage:
    """Return ``stage`` with its model's figures, and what measurements show of open settings.

    The newest one counts of those at the same resolution.
    """
    planned = with_model_figures(stage, config)
    shown: dict[str, Any] = {}
    for each in (measured_stage.measurement for measured_stage in measured):
        if not each.on_cpu and each.resolution == stage.resolution:
            known = each.program.known()
            shown |= {name: known[name] for name in planned.assumed & known.keys() & _INDEPENDENT}
    return with_model_figures(stage, config, StageProgram(**shown)) if shown else planned


def predicted_speeds(config: RunConfig) -> dict[str, float]:
    """Return the it/s of stages for which the run file states none, as far as they are known."""
    try:
        stages = stages_to_price(config)
    except ValueError as error:
        raise UserError(str(error)) from None
    stated = {stage.name for stage in config.stages if stage.steps_per_second}
    return {
        stage.name: stage.speed.steps_per_second
        for stage in stages
        if stage.speed and stage.name not in stated
    }


def stated_measurements(stages: Iterable[CostStage]) -> list[Measurement]:
    """Return the speeds that the run file states, as measurements for other configurations."""
    return [
        Measurement(
            label=f"stage {stage.name}",
            steps_per_second=stage.speed.steps_per_second,
            world_size=stage.world_size,
            resolution=stage.resolution,
            effective_batch_size=stage.effective_batch_size,
            instance_type=stage.instance_type,
            per_device_batch_size=stage.per_device_batch_size,
            gradient_accumulation_steps=stage.gradient_accumulation_steps,
            predicted_images_per_second=stage.predicted_images_per_second,
            program=stage.program,
        )
        for stage in stages
        if stage.speed
    ]


@dataclass(frozen=True)
class ImplausibleSpeed:
    """A stated speed outside of the range that the speed model predicts for its configuration."""

    stage: str
    stated: float
    predicted: Speed
    cluster: str


def implausible_speeds(config: RunConfig) -> list[ImplausibleSpeed]:
    """Return the run file's speeds that leave the speed model's range."""
    found = []
    for stage in [*cost_stages(config), *stages_measured_elsewhere(config)]:
        predicted = predicted_speed(with_model_figures(stage, config))
        if stage.speed is None or predicted is None:
            continue
        stated = stage.speed.steps_per_second
        if not predicted.low <= stated <= predicted.high:
            cluster = f"{stage.instances} × {stage.instance_type}"
            found.append(ImplausibleSpeed(stage.name, stated, predicted, cluster))
    return found


def with_model_figures(
    stage: CostStage, config: RunConfig, ran: StageProgram = UNKNOWN_PROGRAM
) -> CostStage:
    """Return ``stage`` with its model's parameters, FLOPs and activations, if it has a plan.

    Its program is the one that ``ran``, as far as it is known, else the run's: images and captions
    are encoded in the job unless the shards hold latents for it.
    """
    plan = plan_for(config, stage.resolution)
    stage = _with_program(stage, config, plan).running(ran)
    if plan is None:
        return stage
    return replace(
        stage,
        encoder_flops_per_image=0.0 if stage.holds_latents else float(plan.encoder_flops_per_image),
        flops_per_image=plan.training_flops_per_image,
        activation_bytes_per_image=plan.kept_bytes,
        parameters=plan.parameters,
        trained_parameters=plan.trained_parameters,
        text_encoder_bytes=plan.text_bytes,
        exchanged_parameters=plan.exchanged_parameters,
        fp8=plan.fp8 if stage.precision == "fp8" else None,
        communication_units=plan.communication_units(stage.sharding),
        checkpoint_bytes=plan.checkpoint_bytes(
            ema=config.training.ema_decay > 0, optimizer=config.training.optimizer.name
        ),
    )


def _with_program(stage: CostStage, config: RunConfig, plan: ModelPlan | None) -> CostStage:
    """Return ``stage`` with the program that the run's jobs will choose."""
    training, version = config.training, pytorch_version(config)
    assumed = set()
    if config.data.latents is None:
        assumed.add("holds_latents")
    if version is None and training.compile == "auto":
        assumed.add("compiled")
    placement = stage.text_encoders
    if plan is None:
        assumed.add("text_encoders")
    else:
        layout = stage_layout(config, stage, stage.instance)
        placement, is_certain = planned_text_encoders(config, plan, layout, stage.instance)
        assumed |= set() if is_certain else {"text_encoders"}
    return replace(
        stage,
        compiled=compile_choice(config).compiled,
        holds_latents=config.data.latents == stage.resolution,
        text_encoders=placement,
        assumed=frozenset(assumed),
    )


def memory_needs(config: RunConfig, stages: Iterable[CostStage]) -> dict[str, list[MemoryNeed]]:
    """Return the GPU memory that each stage needs by strategy; empty if the model has no plan.

    A stage with ``sharding: auto`` may use another strategy on another cluster.
    """
    from sm_train.cost.alternatives import MemoryNeed

    named = {stage.name: stage for stage in config.stages}
    needs = {}
    for stage in stages:
        plan, section = plan_for(config, stage.resolution), named[stage.name]
        if plan is not None:
            needs[stage.name] = [
                MemoryNeed(
                    strategy,
                    placement,
                    plan.communication_units(strategy),
                    _fixed_bytes(plan, layout, placement),
                    partial(
                        plan.activation_bytes,
                        checkpointing=section.activation_checkpointing,
                        text_encoders=placement,
                    ),
                )
                for strategy in possible_strategies(config, section)
                for layout in (stage_layout(config, stage, stage.instance, sharding=strategy),)
                for placement in possible_placements(config, plan)
            ]
    return needs


def _fixed_bytes(
    plan: ModelPlan, layout: StageLayout, text_encoders: TextEncoderPlacement
) -> Callable[[int, int], float]:
    """Return a function from world size and GPUs per node to the bytes for any batch."""

    def fixed(world_size: int, per_node: int) -> float:
        placed = replace(layout, world_size=world_size, per_node=per_node)
        return plan.memory(placed, text_encoders).states

    return fixed


def check_batch_sizes(stages: Sequence[CostStage], measured: Iterable[StageMeasurement]) -> None:
    """Check that measurements have the effective batch size of a stage.

    Raises:
        UserError: neither its own stage nor any other one has a measurement's batch size.
    """
    for measured_stage in measured:
        candidates = [stage for stage in stages if stage.name == measured_stage.stage] or list(
            stages
        )
        if any(is_comparable(measured_stage.measurement, stage) for stage in candidates):
            continue
        batches = sorted({stage.effective_batch_size or 0 for stage in candidates})
        raise UserError(
            f"--measured: {measured_stage.measurement.steps_per_second:.3g} it/s was measured at "
            f"an effective batch of {measured_stage.measurement.effective_batch_size}, and "
            f"{', '.join(stage.name for stage in candidates)} has "
            f"{', '.join(map(str, batches))}; measure that batch, or convert by images/s "
            "with --rescale-batch"
        )


def _with_prediction(
    measurement: StageMeasurement, stages: Sequence[CostStage], config: RunConfig
) -> Measurement:
    """Add what the speed model predicts for a measurement's configuration, if it is known."""
    measured = measurement.measurement
    batch, world_size = measured.effective_batch_size, measured.world_size
    if measured.on_cpu or batch is None or measured.resolution is None:
        return measured
    passes = measured.gradient_accumulation_steps or 1
    similar = [stage for stage in stages if stage.name == measurement.stage] or list(stages)
    stage = with_model_figures(
        replace(
            similar[0],
            speed=None,
            resolution=measured.resolution,
            instance_type=measured.instance_type or similar[0].instance_type,
            per_device_batch_size=max(1, batch // (world_size * passes)),
            gradient_accumulation_steps=passes,
        ),
        config,
        measured.program,
    )
    if stage.work is None or stage.gpu is None:
        return measured
    network = cluster_network(stage.instance, world_size)
    predicted = images_per_second(stage.work, stage.gpu, network)
    return replace(measured, predicted_images_per_second=predicted)


def _measurements_of(
    stage: CostStage, stages: Sequence[CostStage], measured: Iterable[StageMeasurement]
) -> list[Measurement]:
    """Return the measurements of this stage; those on a CPU match only by the stage's name."""
    only_stage = len(stages) == 1
    return [
        measured_stage.measurement
        for measured_stage in measured
        if (
            measured_stage.measurement.on_cpu and (only_stage or measured_stage.stage == stage.name)
        )
        or (not measured_stage.measurement.on_cpu and _matches(stage, measured_stage.measurement))
    ]


def _matches(stage: CostStage, measurement: Measurement) -> bool:
    """Return whether a measurement has the stage's cluster and resolution."""
    same_type = measurement.instance_type in (None, stage.instance_type)
    cluster = (stage.world_size, stage.resolution)
    return same_type and cluster == (measurement.world_size, measurement.resolution)


def _with_speed(
    stage: CostStage,
    matching: Sequence[Measurement],
    known: Sequence[Measurement],
    rescale_batch: bool,
) -> CostStage:
    """Set the stage's speed: measured (``matching``), stated, or converted from ``known`` ones."""
    if matching:
        measured = resolve_speed(stage, matching, rescale_batch=rescale_batch)
        if measured is not None and measured.basis in ("measured", "illustration"):
            return stage.at(measured)
    if stage.speed is not None:
        return stage
    on_gpus = [measurement for measurement in known if not measurement.on_cpu]
    return stage.at(resolve_speed(stage, on_gpus, rescale_batch=rescale_batch))


def estimate_run(
    config: RunConfig,
    region: str,
    stages: tuple[StageSection, ...] | None = None,
    history: History | None = None,
    stated: RunConfig | None = None,
    measured: Sequence[StageMeasurement] | None = None,
    is_running: bool = False,
) -> Estimate:
    """Estimate ``stages``, or the whole run, using the ``history`` of its finished jobs.

    If ``config`` has been changed for another cluster or region, ``stated`` is the original one,
    whose stated speeds are carried over. ``measured`` replaces the speeds of the history, and may
    be of another batch. A job that ``is_running`` has started up already.

    Raises:
        UserError: a figure of the run file is implausible, such as a thousand years of training.
    """
    names = {stage.name for stage in stages or config.stages}
    try:
        rescale_batch = measured is not None
        speeds = list(measured or ()) if rescale_batch else _speeds_of(history)
        if stated is not None and stated is not config:
            carried = stated_measurements(
                with_model_figures(stage, stated) for stage in cost_stages(stated)
            )
            # The last one counts: what was measured, if anything was.
            speeds = [*(StageMeasurement("", speed) for speed in carried), *speeds]
        priced = stages_to_price(config, speeds, rescale_batch=rescale_batch)
        chosen = [stage for stage in priced if stage.name in names]
        assumptions = learned(Assumptions(), history.observed) if history else None
        if is_running:
            assumptions = replace(assumptions or Assumptions(), start_up_seconds=0.0)
        purchase = Purchase(region, config.cluster.capacity)
        return estimate(chosen, purchase, assumed=assumptions, prices=price_table())
    except ValueError as error:
        raise UserError(str(error)) from None


def estimate_remaining(
    config: RunConfig,
    region: str,
    stage: StageSection,
    from_step: int,
    history: History | None = None,
    stated: RunConfig | None = None,
) -> Estimate:
    """Estimate the steps of ``stage`` after ``from_step`` (:func:`estimate_run`)."""
    left = max(1, stage.max_steps - from_step)
    return estimate_steps(config, region, stage, left, history, stated)


def estimate_steps(
    config: RunConfig,
    region: str,
    stage: StageSection,
    max_steps: int,
    history: History | None = None,
    stated: RunConfig | None = None,
    measured: Sequence[StageMeasurement] | None = None,
    is_running: bool = False,
) -> Estimate:
    """Estimate ``max_steps`` of ``stage``, with a start-up unless it is running
    (:func:`estimate_run`).
    """
    shortened = stage.model_copy(update={"max_steps": max_steps})
    stages = [shortened if other is stage else other for other in config.stages]
    return estimate_run(
        config.model_copy(update={"stages": stages}),
        region,
        (shortened,),
        history,
        stated,
        measured,
        is_running,
    )


def _speeds_of(history: History | None) -> list[StageMeasurement]:
    return [] if history is None else history.stage_measurements()


PricedCluster = tuple[Placement, Estimate]


def alternative_costs(
    config: RunConfig, region: str, history: History | None = None
) -> list[PricedCluster]:
    """Estimate the whole run on each cluster but the run file's first, as if it always got it."""
    return [
        (
            placement,
            estimate_run(placement.config, placement.region, history=history, stated=config),
        )
        for placement in unique_placements(config, region)[1:]
    ]


def remaining_alternative_costs(
    config: RunConfig, region: str, stage: str, from_step: int, history: History | None = None
) -> list[PricedCluster]:
    """Estimate the rest of the stage called ``stage`` on each of those clusters."""
    return [
        (
            placement,
            estimate_remaining(
                placement.config,
                placement.region,
                placement.stage(stage),
                from_step,
                history,
                config,
            ),
        )
        for placement in unique_placements(config, region)[1:]
    ]


def most_expensive(priced: list[PricedCluster]) -> PricedCluster | None:
    """Return the cluster with the highest known cost."""
    return max(
        priced, key=lambda alternative: total(alternative[1])["cost_at_least_usd"], default=None
    )


def total(cost: Estimate) -> dict[str, Any]:
    """Return the total of the ``cost --json`` document."""
    document: dict[str, Any] = as_document(cost)["total"]
    return document


def up_to_suffix(cost: Estimate, alternatives: list[PricedCluster]) -> str:
    """Return the suffix for a price that names the most expensive alternative; empty if none costs
    more than ``cost``.
    """
    most = most_expensive(alternatives)
    if most is None or total(most[1])["cost_at_least_usd"] <= total(cost)["cost_at_least_usd"]:
        return ""
    cluster, highest = most
    instance_type = cluster.config.cluster.instance_type
    return f", or up to {format_total_usd(total(highest))} on {instance_type} in {cluster.region}"
