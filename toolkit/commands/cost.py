"""``sm-train cost``: what a run costs, in dollars and days."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.errors import UserError

if TYPE_CHECKING:
    from sm_train.cost.estimate import Estimate
    from sm_train.cost.stage import Stage
    from sm_train.toolkit.measured import Measured

_DEFAULT_REGION = "us-east-1"


@click.command()
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option("--stage", metavar="S", help="One stage of RUN.")
@click.option("--instance", metavar="T", help="Without RUN: instance type.")
@click.option("--instances", type=int, metavar="N", help="Without RUN: number of instances.")
@click.option("--its", type=float, metavar="X", help="Optimizer steps a second.")
@click.option("--iterations", type=int, metavar="N", help="Optimizer steps.")
@click.option(
    "--measured", type=click.Path(path_type=Path), help="Take the it/s from a run's event lines."
)
@click.option("--region", metavar="R", help="AWS region of the prices.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.pass_obj
def command(
    options: dict[str, Any],
    run: Path | None,
    stage: str | None,
    instance: str | None,
    instances: int | None,
    its: float | None,
    iterations: int | None,
    measured: Path | None,
    region: str | None,
    as_json: bool,
) -> None:
    """Price RUN, or a cluster given by --instance, --instances, --its and --iterations.

    Offline: prices are from a dated table, and each says its source.
    """
    from sm_train.cost.estimate import estimate

    region = region or options["region"]
    for name, value in (("--instance", instance), ("--instances", instances)):
        if run is not None and value is not None:
            raise UserError(f"{name}: {value} and RUN both name the cluster; give one")
    if run is None and stage is not None:
        raise UserError(f"--stage: {stage!r} is one of a run file's stages; give RUN too")
    try:
        speed = _Speed(its, _measured(its, measured))
        if run is None:
            asked = _from_options(instance, instances, iterations, speed, region)
        else:
            asked = _from_run(run, stage, iterations, speed, region, options["profile"])
        priced = estimate(asked.stages, region=asked.region, capacity=asked.capacity)
    except ValueError as error:
        raise UserError(str(error)) from None
    _show(priced, asked, as_json)


@dataclass(frozen=True)
class _Speed:
    """The it/s of the command line: a figure, a measurement or none."""

    option: float | None
    measured: Measured | None


@dataclass(frozen=True)
class _Asked:
    """What is to be priced, and what is to be said of it before the model's assumptions."""

    stages: list[Stage]
    region: str
    capacity: str
    notes: list[str]


def _measured(its: float | None, path: Path | None) -> Measured | None:
    _positive("--its", its)
    if path is None:
        return None
    if its is not None:
        raise UserError("--its: and --measured both give the it/s; give one")
    from sm_train.toolkit.measured import read_measured

    return read_measured(path)


def _positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise UserError(f"{name}: {value} must be a positive number")


def _from_options(
    instance: str | None,
    instances: int | None,
    iterations: int | None,
    speed: _Speed,
    region: str | None,
) -> _Asked:
    from sm_train.cost.stage import Stage

    measured = speed.measured
    if instance is None:
        raise UserError("RUN or --instance: give a run file, or an instance type and its figures")
    if instances is None:
        raise UserError("--instances: is missing; give the number of instances")
    if iterations is None:
        raise UserError("--iterations: is missing; give the number of optimizer steps")
    if speed.option is None and measured is None:
        raise UserError("--its: is missing; give optimizer steps a second, or --measured FILE")
    _positive("--instances", instances)
    _positive("--iterations", iterations)
    stage = Stage(
        name="run",
        resolution=measured.resolution if measured else None,
        instance_type=instance,
        instances=instances,
        per_gpu_batch=None,
        accumulation=1,
        iterations=iterations,
        iterations_per_second=measured.iterations_per_second if measured else speed.option,
        throughput_source="measured" if measured else "option",
    )
    notes = [_note(stage, measured)] if measured else []
    if region is None:
        notes.append(f"region: {_DEFAULT_REGION}, as none was given (--region)")
    return _Asked([stage], region or _DEFAULT_REGION, "on-demand", notes)


def _from_run(
    run: Path,
    name: str | None,
    iterations: int | None,
    speed: _Speed,
    region: str | None,
    profile: str | None,
) -> _Asked:
    from sm_train.estimators.plan import cost_stages
    from sm_train.estimators.run_file import load_run
    from sm_train.toolkit.aws import resolve_region

    config = load_run(run)
    stages = [stage for stage in cost_stages(config) if name in (None, stage.name)]
    if not stages:
        names = ", ".join(stage.name for stage in config.stages)
        raise UserError(f"--stage: {name!r} is not in {run}; it has {names}")
    stages = _with_options(stages, iterations, speed.option)
    notes = []
    if measured := speed.measured:
        stages = [_with_measured(stage, measured, alone=len(stages) == 1) for stage in stages]
        notes = [_note(stage, measured) for stage in stages if _is_measured(stage)]
        if not notes:
            raise UserError(f"--measured: is of stage {measured.stage!r}, which is not in {run}")
    region = resolve_region(region, config.region, profile)
    return _Asked(stages, region, config.cluster.capacity, notes)


def _with_options(stages: list[Stage], iterations: int | None, its: float | None) -> list[Stage]:
    """The options' figures in place of the run file's: each belongs to one stage."""
    from dataclasses import replace

    _positive("--iterations", iterations)
    for option, value in (("--its", its), ("--iterations", iterations)):
        if value is not None and len(stages) > 1:
            raise UserError(f"{option}: {value} belongs to one stage; name it with --stage")
    if iterations is not None:
        stages = [replace(stages[0], iterations=iterations)]
    if its is not None:
        stages = [replace(stages[0], iterations_per_second=its, throughput_source="option")]
    return stages


def _with_measured(stage: Stage, measured: Measured, *, alone: bool) -> Stage:
    """The measured speed on the stage it is of; a single stage takes it whatever its name."""
    from dataclasses import replace

    if stage.name != measured.stage and not alone:
        return stage
    return replace(
        stage,
        iterations_per_second=measured.iterations_per_second,
        throughput_source="measured",
    )


def _is_measured(stage: Stage) -> bool:
    return stage.throughput_source == "measured"


def _note(stage: Stage, measured: Measured) -> str:
    """Where a measured speed is from, and whether it says anything of this cluster."""
    note = measured.describe()
    there = (measured.world_size, measured.resolution, measured.effective_batch_size)
    here = (stage.world_size, stage.resolution, stage.effective_batch_size)
    if there == here and measured.backend != "gloo":
        return note
    cluster = f"{stage.instances} × {stage.instance_type}, {stage.world_size} GPUs"
    if stage.effective_batch_size is not None:
        cluster += f", {stage.resolution} px, batch {stage.effective_batch_size}"
    return f"{note}, not on {stage.name} ({cluster}): only an illustration"


def _show(priced: Estimate, asked: _Asked, as_json: bool) -> None:
    from sm_train.toolkit.output import write_json

    document = priced.as_dict()
    document["assumptions"] = [*asked.notes, *document["assumptions"]]
    if as_json:
        write_json(document)
        return
    from sm_train.toolkit.cost_view import show_cost

    show_cost(document, asked.region)
