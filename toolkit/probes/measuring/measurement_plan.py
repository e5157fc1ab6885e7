"""Plans the jobs that measure a stage: one small run of its own for each cluster size and batch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm_train.cost.estimate import Estimate
from sm_train.cost.instances import instance_type
from sm_train.estimators.config.fields import MAX_JOB_NAME
from sm_train.estimators.config.naming import job_name, measuring_run
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.config.training import CheckpointSection
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.memory.memory_fit import memory_fit
from sm_train.toolkit.planning.run_price import estimate_run
from sm_train.toolkit.probes.short_jobs.short_run import short_run, short_run_price, with_time_limit
from sm_train.toolkit.submit.run_bundle import bundle_of

LOG_INTERVALS = 10
"""Logging intervals of a measurement: the fewest that give P10 and P90. As many steps as one of
them come before, as warm-up."""

_SYNTHETIC_SAMPLES = 512
"""Samples that each node generates, at least; two steps of a large batch otherwise."""

_START_SECONDS, _SLACK = 1200, 1.5
"""Time limit of a job: its start, and its steps at the slowest expected speed, times this."""

_UNKNOWN_SECONDS = 3600
"""Time limit of a job whose speed cannot be predicted."""


@dataclass(frozen=True)
class Sweep:
    """Batches per GPU and accumulations that are measured besides the stage's own."""

    batches: tuple[int, ...] = ()
    accumulations: tuple[int, ...] = ()


@dataclass(frozen=True)
class PlannedMeasurement:
    """One planned measurement: ``config`` is a run of a single stage.

    ``gpu_memory_planned`` is in bytes, None without a plan. ``expected`` is the job's estimate, and
    ``most_usd`` its cost at the time limit; None if the price is unknown.
    """

    config: RunConfig
    steps: int
    gpu_memory_planned: float | None
    expected: Estimate
    most_usd: float | None

    @property
    def stage(self) -> StageSection:
        """The only stage of the measurement's run."""
        return self.config.stages[0]


@dataclass(frozen=True)
class MeasurementPlan:
    """What is measured for ``stage``, cheapest first, and why other sizes are not."""

    stage: StageSection
    measurements: tuple[PlannedMeasurement, ...]
    skipped: tuple[str, ...]


def plan_measurements(
    config: RunConfig,
    stage: StageSection,
    base: Path,
    region: str,
    *,
    instances: Sequence[int] | None,
    steps: int,
    sweep: Sweep,
    synthetic: bool,
    max_runtime: int | None,
) -> MeasurementPlan:
    """Plan the measurements of ``stage``; the run file is in ``base``.

    Without ``instances``: the smallest cluster whose GPUs have the memory, and twice as many, each
    up to the stage's. The sweep is measured on the smallest cluster only.

    Raises:
        UserError: no size fits into GPU memory, or an option does not apply to the run.
    """
    _check(config, stage, instances, synthetic=synthetic)
    skipped: list[str] = []
    sizes = tuple(instances) if instances else _default_sizes(config, stage)
    own = (stage.per_device_batch_size, stage.gradient_accumulation_steps)
    wanted = [(size, *own) for size in sorted(set(sizes))]
    wanted += [(min(sizes), *batch) for batch in _sweep(stage, sweep) if batch != own]
    planned = []
    for size, batch, accumulation in wanted:
        sized = stage.model_copy(
            update={
                "instances": size,
                "per_device_batch_size": batch,
                "gradient_accumulation_steps": accumulation,
                "effective_batch_size": None,
            }
        )
        if (problem := _memory_problem(config, sized)) is not None:
            skipped.append(problem)
            continue
        planned.append(_measurement(config, sized, base, region, steps, synthetic, max_runtime))
    if not planned:
        raise UserError(
            f"--instances: nothing to measure: {'; '.join(skipped)}", ExitCode.PREFLIGHT
        )
    return MeasurementPlan(stage, tuple(planned), tuple(skipped))


def _check(
    config: RunConfig, stage: StageSection, instances: Sequence[int] | None, *, synthetic: bool
) -> None:
    if synthetic and config.entry is not None:
        raise UserError(
            "--synthetic: the run starts a script of your own, which reads its own data; remove it"
        )
    for size in instances or ():
        if size < 1:
            raise UserError(f"--instances: {size} must be 1 or more")


def _default_sizes(config: RunConfig, stage: StageSection) -> tuple[int, ...]:
    """Return the smallest size that fits into GPU memory, and the next one to fit a scaling law."""
    size = 1
    while size < stage.instances and _memory_problem(
        config, stage.model_copy(update={"instances": size})
    ):
        size *= 2
    size = min(size, stage.instances)
    return tuple(dict.fromkeys((size, min(2 * size, stage.instances))))


def _sweep(stage: StageSection, sweep: Sweep) -> Iterator[tuple[int, int]]:
    for batch in sweep.batches or (stage.per_device_batch_size,):
        for accumulation in sweep.accumulations or (stage.gradient_accumulation_steps,):
            yield batch, accumulation


def _memory_problem(config: RunConfig, stage: StageSection) -> str | None:
    """Return why the stage does not fit into GPU memory; None if it does, or no plan says so."""
    fit = memory_fit(config, stage)
    gpu = instance_type(config.cluster.instance_type).accelerator_memory_gib
    if fit is None or gpu is None or fit.gib <= gpu:
        return None
    return (
        f"{stage.instances} × {config.cluster.instance_type} at batch "
        f"{stage.per_device_batch_size}: needs {fit.gib:.0f} of {gpu:.0f} GiB on each GPU"
    )


def _measurement(
    config: RunConfig,
    stage: StageSection,
    base: Path,
    region: str,
    steps: int,
    synthetic: bool,
    max_runtime: int | None,
) -> PlannedMeasurement:
    run = _with_names(_short_run(config, stage, steps, synthetic=synthetic), base)
    expected = estimate_run(run, region)
    limit = max_runtime or _time_limit(expected)
    run = with_time_limit(run, limit)
    fit = memory_fit(config, stage)
    price = short_run_price(run, region, seconds=limit, max_seconds=limit)
    return PlannedMeasurement(
        run,
        steps,
        None if fit is None else fit.states + fit.activations,
        expected,
        price.max_usd,
    )


def _short_run(config: RunConfig, stage: StageSection, steps: int, *, synthetic: bool) -> RunConfig:
    """Return a run of ``stage`` alone that leaves nothing but its log."""
    interval = max(1, steps // LOG_INTERVALS)
    shortened = stage.model_copy(
        update={
            "max_steps": interval + steps,
            "steps_per_second": None,
            "optimizer_state": "reset",
            "init_from": "ema",
            **({"sources": []} if synthetic else {}),
        }
    )
    run = short_run(config, shortened)
    changes: dict[str, object] = {
        "training": run.training.model_copy(update={"log_every": interval}),
        "checkpoint": CheckpointSection(save=False),
    }
    if synthetic:
        changes["data"] = run.data.model_copy(update=_synthetic(config, stage))
    return run.model_copy(update=changes)


def _synthetic(config: RunConfig, stage: StageSection) -> dict[str, object]:
    gpus = instance_type(config.cluster.instance_type).accelerators
    images = stage.per_device_batch_size * stage.gradient_accumulation_steps * gpus
    return {
        "synthetic_samples": max(_SYNTHETIC_SAMPLES, 2 * images),
        "image_key": "jpg",
        "caption_key": "txt",
        "caption": {},
        "extras": {},
        "sources": [],
        "pipe": None,
        "transform": None,
        "aspect_buckets": False,
    }


def _time_limit(expected: Estimate) -> int:
    """Return the seconds after which SageMaker stops the job, in whole minutes."""
    [stage] = expected.stages
    speed = stage.stage.speed
    if speed is None:
        return _UNKNOWN_SECONDS
    seconds = _START_SECONDS + _SLACK * stage.stage.max_steps / speed.low
    return 60 * math.ceil(seconds / 60)


def _with_names(run: RunConfig, base: Path) -> RunConfig:
    """Name the run and its stage after all that is measured, code included.

    The same measurement has the same name, so an interrupted command finds its jobs again.
    """
    [stage] = run.stages
    digest = hashlib.sha256(bundle_of(run, base).sha256.encode()).hexdigest()[:6]
    name = measuring_run(run.name)
    size = f"{stage.instances}x{stage.per_device_batch_size}x{stage.gradient_accumulation_steps}"
    label = f"{stage.name}-{size}-{digest}"
    free = MAX_JOB_NAME - len(job_name(name, "", 1))
    if len(label) > free:
        label = f"{stage.name[: free - len(digest) - 1].rstrip('-')}-{digest}"
    return run.model_copy(
        update={"name": name, "stages": [stage.model_copy(update={"name": label})]}
    )
