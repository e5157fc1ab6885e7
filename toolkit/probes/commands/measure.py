"""``sm-train measure``: measure a stage's it/s in short jobs, before the run is paid for."""

from __future__ import annotations

from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command
from sm_train.toolkit.command_base.options import RunFile


@sm_train_command(
    "sm-train measure run.yaml --dry-run",
    "sm-train measure run.yaml --stage 512px",
    "sm-train measure run.yaml --instances 1,2 --sweep batch=8,16,32",
    "sm-train measure run.yaml --synthetic --yes",
    "sm-train measure run.yaml --local",
    option_groups={
        "What is measured": ("--stage", "--instances", "--steps", "--sweep", "--synthetic"),
        "Where": ("--local", "--max-runtime"),
    },
)
@click.argument("run", type=RunFile())
@click.option("--stage", metavar="S", help="The stage to measure; default: the run file's first.")
@click.option(
    "--instances",
    metavar="N,N",
    help="Cluster sizes; default: the smallest that has the memory, and twice as many.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    help="Measured steps; a tenth as many come before them as warm-up.",
)
@click.option(
    "--sweep",
    multiple=True,
    metavar="KEY=N,N",
    help="Also measure other values of `batch` (per GPU) or `accumulation`, on the smallest "
    "cluster. Repeatable.",
)
@click.option(
    "--synthetic",
    is_flag=True,
    help="Train on JPEG images that the job generates, instead of the run's shards.",
)
@click.option("--local", is_flag=True, help="Measure on this machine, as `submit --local` trains.")
@click.option(
    "--max-runtime",
    metavar="TIME",
    help="Time limit of each job, e.g. 30m; default: from the predicted speed.",
)
@click.option("--dry-run", is_flag=True, help="Show the jobs and their price; start nothing.")
@click.option("--yes", "-y", is_flag=True, help="Start without asking.")
@click.pass_obj
def command(options: dict[str, Any], /, **parameters: Any) -> None:
    """Measure a stage of RUN in short jobs on its own instance type, and record its speed.

    Each job has a time limit, which is shown with its price before anything starts. They run one
    after the other, the smallest cluster first. `cost` and `submit` then use the measured speed;
    other cluster sizes follow from it by the communication that they add.

    The speeds are recorded in NAME.measured.json next to RUN: commit it. Interrupt the command at
    any time; the same command continues with its jobs.
    """
    from sm_train.toolkit.probes.measuring.measure_command import MeasureOptions, measure

    globals_ = {name: options[name] for name in ("region", "profile")}
    measure(MeasureOptions(**globals_, **parameters))
