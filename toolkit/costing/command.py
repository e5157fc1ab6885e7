"""From what a person asks of ``cost`` to what the model prices: stages, purchase, assumptions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.cost.assumptions import Assumptions, learned, parameter_names
from sm_train.cost.estimate import Estimate, Purchase, estimate
from sm_train.cost.json_document import as_document
from sm_train.cost.prices import ON_DEMAND, PriceTable, staleness
from sm_train.cost.stage import CostStage
from sm_train.cost.throughput import resolve_speed, stated_speed
from sm_train.toolkit.costing.price_table import DEFAULT_REGION, price_table
from sm_train.toolkit.errors import UserError

if TYPE_CHECKING:
    from sm_train.estimators.config.schema import RunConfig
    from sm_train.toolkit.costing.history import History
    from sm_train.toolkit.costing.throughput import Measured


@dataclass(frozen=True)
class Asked:
    """The options of ``cost`` that say what is priced, and how."""

    run: Path | None = None
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
    history: Path | None = None
    learn: bool = False
    samples: int | None = None


@dataclass(frozen=True)
class Costing:
    """Everything that an estimate is made of; ``config`` is None without a run file."""

    config: RunConfig | None
    stages: tuple[CostStage, ...]
    measured: tuple[Measured, ...]
    purchase: Purchase
    assumed: Assumptions
    prices: PriceTable
    samples: int | None
    notes: tuple[str, ...]

    def estimate(self) -> Estimate:
        return estimate(self.stages, self.purchase, assumed=self.assumed, prices=self.prices)

    def document(self, priced: Estimate) -> dict[str, Any]:
        """The document of ``cost --json`` of this estimate, with what is to be warned of."""
        document = as_document(priced)
        document["assumptions"] = [*self.notes, *document["assumptions"]]
        document["warnings"] = self.warnings(priced)
        return document

    def warnings(self, priced: Estimate) -> list[str]:
        """Old prices, and stages that do not see every sample once."""
        from sm_train.toolkit.costing.memory_fit import unplanned

        found = [staleness(one.price, _today()) for one in priced.stages]
        prices = [line for line in found if line and self.purchase.capacity != "training-plan"]
        plan = [problem] if self.config and (problem := unplanned(self.config)) else []
        return list(dict.fromkeys((*prices, *plan, *_short_epochs(self.stages, self.samples))))


def costing(asked: Asked) -> Costing:
    """What ``asked`` means.

    Raises:
        UserError: an option or a file cannot be used.
        ValueError: a figure that nobody could mean.
    """
    _check_options(asked)
    assumed = _assumptions(asked.assume)
    if asked.run is None:
        return _of_options(asked, assumed)
    return _of_run(asked, asked.run, assumed)


def _check_options(asked: Asked) -> None:
    for name, value in (("--instance", asked.instance), ("--instances", asked.instances)):
        if asked.run is not None and value is not None:
            raise UserError(f"{name}: {value} and RUN both name the cluster; give one")
    for name, given in (
        ("--stage", asked.stage is not None),
        ("--history", asked.history is not None),
        ("--learn", asked.learn),
    ):
        if asked.run is None and given:
            raise UserError(f"{name}: belongs to a run file; give RUN too")
    if asked.its is not None and asked.measured:
        raise UserError("--its: and --measured both give the it/s; give one")
    for name, number in (
        ("--its", asked.its),
        ("--instances", asked.instances),
        ("--steps", asked.max_steps),
        ("--samples", asked.samples),
    ):
        if number is not None and not 0 < number < float("inf"):
            raise UserError(f"{name}: {number} must be a positive number")


def _assumptions(given: Iterable[str]) -> Assumptions:
    figures: dict[str, float] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in parameter_names():
            known = ", ".join(parameter_names())
            raise UserError(f"--assume: {text!r} is not NAME=VALUE; names: {known}")
        try:
            figures[name] = float(value)
        except ValueError:
            raise UserError(f"--assume: {name}: {value!r} must be a number") from None
    try:
        return Assumptions().assuming(**figures)
    except ValueError as error:
        raise UserError(f"--assume: {error}") from None


def _of_options(asked: Asked, assumed: Assumptions) -> Costing:
    if asked.instance is None:
        raise UserError("RUN or --instance: give a run file, or an instance type and its figures")
    if asked.instances is None:
        raise UserError("--instances: is missing; give the number of instances")
    if asked.max_steps is None:
        raise UserError("--steps: is missing; give the number of optimizer steps")
    measured = read_measurements(asked, asked.region or DEFAULT_REGION)
    if asked.its is None and not measured:
        raise UserError("--its: is missing; give optimizer steps a second, or --measured FILE")
    stage = CostStage(
        name="run",
        resolution=measured[-1].measurement.resolution if measured else None,
        instance_type=asked.instance,
        instances=asked.instances,
        per_device_batch_size=None,
        gradient_accumulation_steps=1,
        max_steps=asked.max_steps,
    )
    speed = (
        stated_speed(asked.its, "given by --its")
        if asked.its
        else resolve_speed(stage, [one.measurement for one in measured])
    )
    notes = [] if asked.region else [f"region: {DEFAULT_REGION}, as none was given (--region)"]
    return Costing(
        config=None,
        stages=(stage.at(speed),),
        measured=tuple(measured),
        purchase=Purchase(asked.region or DEFAULT_REGION, kind=asked.purchase),
        assumed=assumed,
        prices=price_table(asked.prices),
        samples=None,
        notes=tuple(notes),
    )


def region_of(asked: Asked) -> str:
    """The region of the prices: the options', the run file's or the environment's."""
    from sm_train.estimators.config.load import load_run
    from sm_train.toolkit.aws.session import resolve_region

    config = load_run(asked.run) if asked.run else None
    if config is None and asked.region is None:
        return DEFAULT_REGION
    return resolve_region(asked.region, config.region if config else None, asked.profile)


def _of_run(asked: Asked, run: Path, assumed: Assumptions) -> Costing:
    from sm_train.estimators.config.load import load_run
    from sm_train.toolkit.aws.session import resolve_region
    from sm_train.toolkit.costing.stages import stages_to_price

    config = load_run(run)
    region = resolve_region(asked.region, config.region, asked.profile)
    history = _history(asked, config, region)
    before = history.measured() if history else []
    measured = [*before, *read_measurements(asked, region)]
    stages = stages_to_price(config, measured, rescale_batch=asked.rescale_batch)
    chosen = [stage for stage in stages if asked.stage in (None, stage.name)]
    if not chosen:
        names = ", ".join(stage.name for stage in stages)
        raise UserError(f"--stage: {asked.stage!r} is not in {run}; it has {names}")
    return Costing(
        config=config,
        stages=tuple(_with_options(chosen, asked)),
        measured=tuple(measured),
        purchase=Purchase(region, config.cluster.capacity, asked.purchase),
        assumed=learned(assumed, history.observed) if history else assumed,
        prices=price_table(asked.prices),
        samples=asked.samples or config.data.samples or _local_samples(config, run.parent),
        notes=(),
    )


def _with_options(stages: Sequence[CostStage], asked: Asked) -> list[CostStage]:
    """The options' figures in place of the run file's: each belongs to one stage."""
    for option, value in (("--its", asked.its), ("--steps", asked.max_steps)):
        if value is not None and len(stages) > 1:
            raise UserError(f"{option}: {value} belongs to one stage; name it with --stage")
    changed = list(stages)
    if asked.max_steps is not None:
        changed = [replace(changed[0], max_steps=asked.max_steps)]
    if asked.its is not None:
        changed = [changed[0].at(stated_speed(asked.its, "given by --its"))]
    return changed


def read_measurements(asked: Asked, region: str) -> list[Measured]:
    """What ``--measured`` names: logs, folders of local runs, or training jobs."""
    from sm_train.toolkit.costing.throughput import read_measured, read_measured_job

    found = []
    for place in asked.measured:
        # A job's name has neither a dot nor a slash; what is on the disk comes first.
        if Path(place).exists() or "." in place or os.sep in place:
            found.append(read_measured(Path(place)))
        else:
            found.append(read_measured_job(place, region, asked.profile))
    return found


def _history(asked: Asked, config: RunConfig, region: str) -> History | None:
    if asked.history is not None:
        from sm_train.toolkit.costing.history import read_history_file

        return read_history_file(asked.history)
    if not asked.learn:
        return None
    from sm_train.toolkit.aws.session import open_session
    from sm_train.toolkit.costing.history import history_uri, read_history

    uri = history_uri(config, region)
    history = read_history(open_session(asked.profile, region), uri)
    if history is None:
        raise UserError(f"--learn: {uri} is not there yet; `sm-train cost --actual RUN` writes it")
    return history


def _local_samples(config: RunConfig, base: Path) -> int | None:
    if config.data.local is None:
        return None
    from sm_train.entrypoints.common.index_location import index_path
    from sm_train.entrypoints.data.shard_format import ShardError
    from sm_train.entrypoints.data.shard_index import ShardIndex

    try:
        return ShardIndex(index_path(base / config.data.local)).header.samples
    except (OSError, ShardError):
        return None


def _short_epochs(stages: Sequence[CostStage], samples: int | None) -> list[str]:
    return [
        f"max_steps: {stage.max_steps:,} of {stage.name} see {stage.images:,} images, "
        f"{stage.images / samples:.0%} of the {samples:,} in the shards: not one epoch"
        for stage in stages
        if samples and stage.images is not None and stage.images < samples
    ]


def _today() -> date:
    return datetime.now(UTC).date()
