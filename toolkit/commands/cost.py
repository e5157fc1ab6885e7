"""``sm-train cost``: what a run costs, in dollars and days."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.errors import UserError

if TYPE_CHECKING:
    from sm_train.cost.estimate import Estimate
    from sm_train.cost.stage import Stage
    from sm_train.toolkit.measured import Measured


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
    as_json: bool,
) -> None:
    """Price RUN, or a cluster given by --instance, --instances, --its and --iterations.

    Offline: prices are from a dated table, and each says its source.
    """
    from sm_train.cost.estimate import estimate

    speed = None
    if measured is not None:
        from sm_train.toolkit.measured import read_measured

        if its is not None:
            raise UserError("--its: and --measured both give the it/s; give one")
        speed = read_measured(measured)
    capacity = "on-demand"
    try:
        if run is not None:
            for name, value in (("--instance", instance), ("--instances", instances)):
                if value is not None:
                    raise UserError(f"{name}: {value} and RUN both name the cluster; give one")
            stages, region, capacity = _from_run(run, stage, its, iterations, speed, options)
        else:
            stages = [_from_options(instance, instances, its, iterations, speed)]
            region = options["region"] or "us-east-1"
        priced = estimate(stages, region=region, capacity=capacity)
    except ValueError as error:
        raise UserError(str(error)) from None
    notes = [_note(one, speed) for one in stages if speed and one.throughput_source == "measured"]
    _show(priced, region, notes, as_json)


def _from_options(
    instance: str | None,
    instances: int | None,
    its: float | None,
    iterations: int | None,
    measured: Measured | None,
) -> Stage:
    from sm_train.cost.stage import Stage

    if instance is None:
        raise UserError("RUN or --instance: give a run file, or an instance type and its figures")
    if instances is None:
        raise UserError("--instances: is missing; give the number of instances")
    if iterations is None:
        raise UserError("--iterations: is missing; give the number of optimizer steps")
    if its is None and measured is None:
        raise UserError("--its: is missing; give optimizer steps a second, or --measured FILE")
    _positive("--its", its)
    return Stage(
        name="run",
        resolution=measured.resolution if measured else None,
        instance_type=instance,
        instances=instances,
        per_gpu_batch=None,
        accumulation=1,
        iterations=iterations,
        iterations_per_second=measured.iterations_per_second if measured else its,
        throughput_source="measured" if measured else "option",
    )


def _positive(name: str, value: float | None) -> None:
    import math

    if value is not None and not (value > 0 and math.isfinite(value)):
        raise UserError(f"{name}: {value} must be a positive number")


def _from_run(
    run: Path,
    name: str | None,
    its: float | None,
    iterations: int | None,
    measured: Measured | None,
    options: dict[str, Any],
) -> tuple[list[Stage], str, str]:
    from dataclasses import replace

    from sm_train.estimators.plan import cost_stages
    from sm_train.estimators.run_file import load_run
    from sm_train.toolkit.aws import resolve_region

    config = load_run(run)
    stages = [stage for stage in cost_stages(config) if name in (None, stage.name)]
    if not stages:
        names = ", ".join(stage.name for stage in config.stages)
        raise UserError(f"--stage: {name!r} is not in {run}; it has {names}")
    for option, value in (("--its", its), ("--iterations", iterations)):
        _positive(option, value)
        if value is not None and len(stages) > 1:
            raise UserError(f"{option}: {value} belongs to one stage; name it with --stage")
    if its is not None:
        stages = [replace(stages[0], iterations_per_second=its, throughput_source="option")]
    if iterations is not None:
        stages = [replace(stages[0], iterations=iterations)]
    if measured is not None:
        stages = [_with_measured(stage, measured, alone=len(stages) == 1) for stage in stages]
        if not any(stage.throughput_source == "measured" for stage in stages):
            raise UserError(f"--measured: is of stage {measured.stage!r}, which is not in {run}")
    region = resolve_region(options["region"], config.region, options["profile"])
    return stages, region, config.cluster.capacity


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


def _note(stage: Stage, measured: Measured) -> str:
    """Where a measured speed is from, and whether it says anything of this cluster."""
    note = measured.describe()
    same = (measured.world_size, measured.resolution) == (stage.world_size, stage.resolution)
    if same and measured.backend != "gloo":
        return note
    gpus = f"{stage.instances} × {stage.instance_type}, {stage.world_size} GPUs"
    return f"{note}, not on {stage.name} ({gpus}): only an illustration"


def _show(priced: Estimate, region: str, notes: list[str], as_json: bool) -> None:
    from sm_train.toolkit.output import write_json

    document = priced.as_dict()
    document["assumptions"] = [*notes, *document["assumptions"]]
    if as_json:
        write_json(document)
        return
    from sm_train.toolkit.cost_view import show_cost

    show_cost(document, region)
