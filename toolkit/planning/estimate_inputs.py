"""Resolve the options of ``cost`` to the inputs of an estimate: stages, purchase, assumptions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.cost.assumptions import Assumptions, learned, parameter_names
from sm_train.cost.estimate import Estimate, Purchase, estimate
from sm_train.cost.json_document import as_document
from sm_train.cost.prices import ON_DEMAND, SPOT, TRAINING_PLAN, PriceTable, staleness
from sm_train.cost.speed import Speed, stated_speed
from sm_train.cost.stage import CostStage
from sm_train.cost.throughput import resolve_speed
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.planning.price_table import price_table
from sm_train.toolkit.planning.scope import unusual_epochs

if TYPE_CHECKING:
    from sm_train.cost.throughput import StageMeasurement
    from sm_train.estimators.config.schema import RunConfig
    from sm_train.toolkit.planning.history import History
    from sm_train.toolkit.planning.run_price import StageLimit
    from sm_train.toolkit.platforms.find_run import OpenedConfig


@dataclass(frozen=True)
class CostOptions:
    """The options of ``cost`` that select what is priced, and how."""

    run: str | None = None
    changes: tuple[str, ...] = ()
    stage: str | None = None
    instance: str | None = None
    instances: int | None = None
    its: float | None = None
    max_steps: int | None = None
    measured: tuple[str, ...] = ()
    rescale_batch: bool = False
    region: str | None = None
    profile: str | None = None
    purchase: str = ON_DEMAND
    prices: Path | None = None
    assume: tuple[str, ...] = ()
    learn: bool = False


@dataclass(frozen=True)
class EstimateInputs:
    """All inputs of an estimate.

    ``config`` is None without a run file. ``defaults_used`` are sentences about options that were
    not given. ``recorded`` labels the speeds that `measure` recorded, and ``unused``
    says why others do not apply.
    """

    config: RunConfig | None
    stages: tuple[CostStage, ...]
    measured: tuple[StageMeasurement, ...]
    purchase: Purchase
    assumptions: Assumptions
    prices: PriceTable
    defaults_used: tuple[str, ...]
    recorded: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def estimate(self) -> Estimate:
        """Price the stages."""
        return estimate(self.stages, self.purchase, assumed=self.assumptions, prices=self.prices)

    def document(self, priced: Estimate, limits: Sequence[StageLimit | None]) -> dict[str, Any]:
        """Return the ``cost --json`` document of this estimate, with its warnings and limits."""
        document = as_document(priced)
        document["assumptions"] = [*self.defaults_used, *document["assumptions"]]
        document["warnings"] = self.warnings(priced)
        document["measured"] = list(self.recorded)
        for stage, limit in zip(document["stages"], limits, strict=True):
            stage["limit"] = limit and limit.as_dict()
        document["budget_usd"] = (
            self.config.budget.usd if self.config and self.config.budget else None
        )
        return document

    def limits(self, priced: Estimate) -> tuple[StageLimit | None, ...]:
        """Return what limits each stage; None where the model or the GPU is unknown."""
        if self.config is None:
            return (None,) * len(self.stages)
        from sm_train.toolkit.planning.run_price import stage_limits

        return tuple(stage_limits(self.config, priced))

    def warnings(self, priced: Estimate) -> list[str]:
        """Return warnings: unusual numbers of epochs, memory, old prices."""
        stale = [staleness(stage.price, _today()) for stage in priced.stages]
        prices = [
            *(
                stage.price.source
                for stage in priced.stages
                if stage.price.usd_per_instance_hour is None
            ),
            *(
                f"the price of {stage.price.instance_type} is {stage.price.source}"
                for stage in priced.stages
                if stage.price.status in ("derived", "assumed")
            ),
            *(line for line in stale if line),
        ]
        memory = _memory_problems(self.config) if self.config else []
        epochs = [epoch.message for epoch in unusual_epochs(self.stages, self.config)]
        return list(dict.fromkeys((*epochs, *memory, *self.unused, *prices)))


def resolve_inputs(options: CostOptions) -> EstimateInputs:
    """Resolve the options of ``cost``.

    Raises:
        UserError: an option or a file cannot be used.
        ValueError: a figure is implausible.
    """
    _check_options(options)
    if options.run is None:
        return _from_options(options, _parse_assumptions(options.assume))
    opened = _open(options)
    region, stage = options.region or opened.region, options.stage or opened.stage
    options = replace(options, region=region, stage=stage)
    return inputs_of_run(options, opened.config, opened.folder)


def _open(options: CostOptions) -> OpenedConfig:
    from sm_train.toolkit.platforms.find_run import open_config

    assert options.run is not None
    globals_ = {"region": options.region, "profile": options.profile}
    return open_config(options.run, options.changes, globals_)


@contextmanager
def usage_errors() -> Iterator[None]:
    """Raise the cost model's ValueError of an implausible figure as a :class:`UserError`."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from None


def _check_options(options: CostOptions) -> None:
    for name, value in (("--instance", options.instance), ("--instances", options.instances)):
        if options.run is not None and value is not None:
            raise UserError(f"{name}: {value} and RUN both name the cluster; give one")
    for name, is_given in (
        ("--stage", options.stage is not None),
        ("--set", bool(options.changes)),
        ("--learn", options.learn),
    ):
        if options.run is None and is_given:
            raise UserError(f"{name}: requires a run file; give RUN too")
    if options.its is not None and options.measured:
        raise UserError("--its: and --measured both give the it/s; give one")
    for name, number in (
        ("--its", options.its),
        ("--instances", options.instances),
        ("--steps", options.max_steps),
    ):
        if number is not None and not 0 < number < float("inf"):
            raise UserError(f"{name}: {number} must be a positive number")


def _parse_assumptions(texts: Iterable[str]) -> Assumptions:
    figures: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--assume: {text!r} must be NAME=VALUE")
        if name not in parameter_names():
            from difflib import get_close_matches

            known = parameter_names()
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise UserError(f"--assume: {name!r} is not a figure of the cost model; {hint}")
        try:
            figures[name] = float(value)
        except ValueError:
            raise UserError(f"--assume: {name}: {value!r} must be a number") from None
    try:
        return Assumptions().assuming(**figures)
    except ValueError as error:
        raise UserError(f"--assume: {error}") from None


def _from_options(options: CostOptions, assumptions: Assumptions) -> EstimateInputs:
    from sm_train.toolkit.aws.session import price_region

    if options.instance is None:
        raise UserError("RUN or --instance: give a run file, or an instance type and its figures")
    if options.instances is None:
        raise UserError("--instances: is missing; give the number of instances")
    if options.max_steps is None:
        raise UserError("--steps: is missing; give the number of optimizer steps")
    region = price_region(options.region)
    measured = read_measurements(options, region)
    if options.its is None and not measured:
        raise UserError("--its: is missing; give optimizer steps a second, or --measured FILE")
    stage = CostStage(
        name="run",
        resolution=measured[-1].measurement.resolution if measured else None,
        instance_type=options.instance,
        instances=options.instances,
        per_device_batch_size=None,
        gradient_accumulation_steps=1,
        max_steps=options.max_steps,
    )
    speed: Speed | None
    if options.its:
        speed = stated_speed(options.its, "given by --its")
    else:
        speed = resolve_speed(stage, [measured_stage.measurement for measured_stage in measured])
    defaults_used = () if options.region else (f"region: {region}, the default (set --region)",)
    return EstimateInputs(
        config=None,
        stages=(stage.at(speed),),
        measured=tuple(measured),
        purchase=_purchase(region, ON_DEMAND, options.purchase),
        assumptions=assumptions,
        prices=price_table(options.prices),
        defaults_used=defaults_used,
    )


def region_of(options: CostOptions) -> str:
    """Return the region of the prices: that of the options, the run file or the environment."""
    from sm_train.toolkit.aws.session import price_region, resolve_region

    if options.run is None:
        return price_region(options.region)
    opened = _open(options)
    region = options.region or opened.region
    return resolve_region(region, opened.config.region, options.profile)


def inputs_of_run(options: CostOptions, config: RunConfig, base: Path) -> EstimateInputs:
    """Resolve the options for a run whose file is in ``base``.

    Raises:
        UserError: an option or a file cannot be used.
        ValueError: a figure is implausible.
    """
    from sm_train.toolkit.aws.session import resolve_region
    from sm_train.toolkit.planning.measured_speeds import applicable, read_measured_file
    from sm_train.toolkit.planning.run_price import check_batch_sizes, stages_to_price

    assumptions = _parse_assumptions(options.assume)
    region = resolve_region(options.region, config.region, options.profile)
    history = _history(options, config, region)
    from_history = history.stage_measurements() if history else []
    recorded, unused = applicable(config, read_measured_file(config, base))
    given = read_measurements(options, region)
    measured = [*from_history, *recorded, *given]
    stages = stages_to_price(config, measured, rescale_batch=options.rescale_batch)
    if not options.rescale_batch:
        check_batch_sizes(stages, given)
    chosen = [stage for stage in stages if options.stage in (None, stage.name)]
    if not chosen:
        names = ", ".join(stage.name for stage in stages)
        raise UserError(f"--stage: {options.stage!r} is not in the run file; it has {names}")
    return EstimateInputs(
        config=config,
        stages=tuple(_override(chosen, options)),
        measured=tuple(measured),
        purchase=_purchase(region, config.cluster.capacity, options.purchase),
        assumptions=learned(assumptions, history.observed) if history else assumptions,
        prices=price_table(options.prices),
        defaults_used=(),
        recorded=tuple(_uses(recorded, stages)),
        unused=(*unused, *_unused_statements(config, stages)),
    )


def _uses(recorded: Iterable[StageMeasurement], stages: Sequence[CostStage]) -> Iterator[str]:
    """Yield the recorded speeds that the stages' speeds follow from, and how."""
    for each in (measured_stage.measurement for measured_stage in recorded):
        users = [stage for stage in stages if stage.speed and each.label in stage.speed.why]
        if any(each.program.agrees_with(stage.program) for stage in users):
            yield each.label
        elif users:
            yield f"converted from {each.steps_per_second:.3g} it/s, {each.label}"


def _unused_statements(config: RunConfig, stages: Sequence[CostStage]) -> Iterator[str]:
    """Yield a sentence for each speed of the run file that a measurement replaces."""
    stated = {stage.name: stage.steps_per_second for stage in config.stages}
    for stage in stages:
        its, speed = stated[stage.name], stage.speed
        if its and speed and speed.basis == "measured" and speed.steps_per_second != its:
            yield (
                f"stages.{stage.name}.steps_per_second: {its:g} is not used, because the stage was "
                f"measured: {speed.steps_per_second:.3g} it/s"
            )


def _purchase(region: str, capacity: str, kind: str) -> Purchase:
    """Return the purchase; ``--purchase spot`` and ``training-plan`` are capacities, too."""
    if kind in (SPOT, TRAINING_PLAN):
        capacity = kind
    return Purchase(region, capacity, kind)


def _override(stages: Sequence[CostStage], options: CostOptions) -> list[CostStage]:
    """Replace the run file's figures by those of --its and --steps, which apply to one stage."""
    for option, value in (("--its", options.its), ("--steps", options.max_steps)):
        if value is not None and len(stages) > 1:
            raise UserError(f"{option}: {value} applies to one stage; select it with --stage")
    changed = list(stages)
    if options.max_steps is not None:
        changed = [replace(changed[0], max_steps=options.max_steps)]
    if options.its is not None:
        changed = [changed[0].at(stated_speed(options.its, "given by --its"))]
    return changed


def read_measurements(options: CostOptions, region: str) -> list[StageMeasurement]:
    """Read the measurements of ``--measured``: logs, folders of local runs, places of runs on
    clusters, or training jobs.
    """
    if not options.measured:
        return []
    from sm_train.toolkit.planning.measured_speeds import (
        read_measured,
        read_measured_job,
        read_measured_run,
    )

    measurements = []
    for name in options.measured:
        globals_ = {"region": region, "profile": options.profile}
        if (attempt := read_measured_run(name, globals_)) is not None:
            measurements.append(attempt)
        # A local file takes precedence; names of training jobs have neither dots nor slashes.
        elif Path(name).exists() or "." in name or os.sep in name:
            measurements += read_measured(Path(name))
        else:
            measurements.append(read_measured_job(name, region, options.profile))
    return measurements


def _history(options: CostOptions, config: RunConfig, region: str) -> History | None:
    if not options.learn:
        return None
    from sm_train.toolkit.aws.session import open_session
    from sm_train.toolkit.planning.history import history_uri, read_history

    uri = history_uri(config, region)
    history = read_history(open_session(options.profile, region), uri)
    if history is None:
        raise UserError(
            f"--learn: {uri} does not exist yet; `sm-train cost --actual RUN` writes it"
        )
    return history


def _memory_problems(config: RunConfig) -> list[str]:
    """Return which stages do not fit in GPU memory, or why that is not known."""
    from sm_train.toolkit.memory.memory_fit import stages_short_of_memory, unplanned

    problem = unplanned(config)
    return [f"{problem.reason}; {problem.fix}"] if problem else stages_short_of_memory(config)


def _today() -> date:
    return datetime.now(UTC).date()
