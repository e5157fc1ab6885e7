"""``sm-train cost``: price a run in dollars and days, before, during and after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command
from sm_train.toolkit.command_base.options import InputFile, set_option


@sm_train_command(
    "sm-train cost run.yaml",
    "sm-train cost run.yaml --explain",
    "sm-train cost run.yaml --set stages.256px.max_steps=200000",
    "sm-train cost run.yaml --alternatives --deadline 14d",
    "sm-train cost run.yaml --measured local-runs/my-model",
    "sm-train cost run.yaml --compare other.yaml --markdown",
    "sm-train cost --report --by tag:team --since 2026-09-01",
    "sm-train cost --instance ml.p5.48xlarge --instances 4 --its 1.8 --steps 100000",
    option_groups={
        "Speed and steps": ("--its", "--steps", "--measured", "--rescale-batch"),
        "A cluster without RUN": ("--instance", "--instances"),
        "Prices": ("--purchase", "--prices", "--refresh"),
        "Assumptions": ("--assume", "--learn"),
        "Alternatives and comparisons": (
            "--alternatives",
            "--regions",
            "--deadline",
            "--budget",
            "--compare",
            "--actual",
        ),
        "Past jobs of all runs": ("--report", "--by", "--since"),
        "Output": ("--explain", "--html", "--csv", "--markdown", "--json"),
    },
)
@click.argument("run", metavar="[RUN]", required=False)
@click.option("--stage", metavar="S", help="Price one stage of RUN.")
@set_option
@click.option("--instance", metavar="T", help="Instance type, without RUN.")
@click.option("--instances", type=int, metavar="N", help="Number of instances, without RUN.")
@click.option("--its", type=float, metavar="X", help="Optimizer steps per second.")
@click.option("--steps", "max_steps", type=int, metavar="N", help="Number of optimizer steps.")
@click.option(
    "--measured",
    multiple=True,
    metavar="FILE|JOB",
    help="Take it/s from the events of a log, a local run's folder or a job. Repeatable.",
)
@click.option(
    "--rescale-batch", is_flag=True, help="Convert it/s of another batch size by images/s."
)
@click.option(
    "--assume",
    multiple=True,
    metavar="NAME=VALUE",
    help="Override a figure of the cost model. Repeatable.",
)
@click.option("--learn", is_flag=True, help="Use the history of RUN's finished jobs (from S3).")
@click.option(
    "--purchase",
    default="on-demand",
    metavar="KIND",
    help="Purchase option, e.g. savings-plan-1y-no-upfront.",
)
@click.option(
    "--prices", type=InputFile(), metavar="FILE", help="CSV with your own prices or discounts."
)
@click.option("--refresh", is_flag=True, help="Fetch the region's current prices from AWS first.")
@click.option("--alternatives", is_flag=True, help="List other clusters that can run RUN.")
@click.option("--regions", is_flag=True, help="List RUN's cost in every region.")
@click.option(
    "--deadline", metavar="TIME", help="List alternatives that take at most this time, e.g. 14d."
)
@click.option(
    "--budget", type=float, metavar="USD", help="List alternatives that cost at most this."
)
@click.option(
    "--compare", type=InputFile(), metavar="RUN2", help="Compare the estimate with that of RUN2."
)
@click.option(
    "--actual", is_flag=True, help="Show the actual cost of RUN's jobs and its breakdown."
)
@click.option("--report", is_flag=True, help="Total the past jobs of all runs by month.")
@click.option(
    "--by",
    metavar="GROUP",
    help="--report: tag:KEY, run (default), stage, instance-type, status or region.",
)
@click.option("--since", metavar="DATE", help="--report: from this day; default: three months.")
@click.option("--explain", is_flag=True, help="Show the formula and inputs of every number.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a self-contained HTML report.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV on standard output.")
@click.option("--markdown", is_flag=True, help="Print Markdown, for the comment on a pull request.")
@click.pass_obj
def command(options: dict[str, Any], /, **parameters: Any) -> int:
    """Price RUN, or a cluster given by --instance, --instances, --its and --steps.

    RUN is a run file, the folder of a local run, or the name of a submitted run, a stage or a job.

    Prices come from a dated table with a source for each. Only names of runs and jobs, --refresh,
    --learn and --actual send requests to AWS.
    """
    from sm_train.toolkit.planning.cost_command import CostCommand, run_cost

    globals_ = {name: options[name] for name in ("region", "profile")}
    return run_cost(CostCommand(**globals_, **parameters))
