"""``sm-train cost``: price a run in dollars and days, before, during and after it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.commands._command import command as sm_train_command
from sm_train.toolkit.commands._options import InputFile, set_option
from sm_train.toolkit.errors import ExitCode, UserError

if TYPE_CHECKING:
    from sm_train.toolkit.costing.cost_command import CostOptions, EstimateInputs


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
        "Speed and steps": ("--its", "--steps", "--measured", "--rescale-batch", "--samples"),
        "A cluster without RUN": ("--instance", "--instances"),
        "Prices": ("--purchase", "--prices", "--refresh", "--price-list"),
        "Assumptions": ("--assume", "--learn", "--history"),
        "Alternatives and comparisons": (
            "--alternatives",
            "--regions",
            "--deadline",
            "--budget",
            "--rows",
            "--compare",
            "--actual",
        ),
        "Past jobs of all runs": ("--report", "--by", "--since", "--month"),
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
    "--samples",
    type=int,
    metavar="N",
    help="Number of samples in the shards, to count epochs.",
)
@click.option(
    "--assume",
    multiple=True,
    metavar="NAME=VALUE",
    help="Override a figure of the cost model. Repeatable.",
)
@click.option("--learn", is_flag=True, help="Use the history of RUN's finished jobs (from S3).")
@click.option("--history", type=InputFile(), metavar="FILE", help="Use a downloaded history.")
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
@click.option(
    "--price-list",
    type=InputFile(),
    multiple=True,
    metavar="FILE",
    help="Import a downloaded AWS price list first. Repeatable.",
)
@click.option("--alternatives", is_flag=True, help="List other clusters that can run RUN.")
@click.option("--regions", is_flag=True, help="List RUN's cost in every region.")
@click.option(
    "--deadline", metavar="TIME", help="List alternatives that take at most this time, e.g. 14d."
)
@click.option(
    "--budget", type=float, metavar="USD", help="List alternatives that cost at most this."
)
@click.option(
    "--rows",
    metavar="N",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Number of alternatives shown.",
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
@click.option("--month", metavar="YYYY-MM", help="--report: this month only.")
@click.option("--explain", is_flag=True, help="Show the formula and inputs of every number.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a self-contained HTML report.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV on standard output.")
@click.option("--markdown", is_flag=True, help="Print Markdown, for the comment on a pull request.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.pass_obj
def command(options: dict[str, Any], /, **parameters: Any) -> int | None:
    """Price RUN, or a cluster given by --instance, --instances, --its and --steps.

    RUN is a run file, the folder of a local run, or the name of a submitted run, a stage or a job.

    Prices come from a dated table with a source for each. Only names of runs and jobs, --refresh,
    --learn and --actual send requests to AWS.
    """
    from sm_train.toolkit.costing.cost_command import resolve_inputs, usage_errors

    cost_options = _cost_options(parameters, options)
    _check_exclusive(parameters)
    if parameters["report"]:
        _show_report(cost_options, parameters)
        return None
    with usage_errors():
        if parameters["refresh"] or parameters["price_list"]:
            _update_prices(cost_options, parameters)
            if cost_options.run is None and cost_options.instance is None:
                return None
        inputs = resolve_inputs(cost_options)
        if parameters["actual"]:
            _show_actual(inputs, cost_options, parameters)
        elif parameters["compare"]:
            _show_comparison(inputs, cost_options, parameters)
        elif parameters["regions"]:
            _show_regions(inputs, parameters)
        elif (
            parameters["alternatives"] or parameters["deadline"] or parameters["budget"] is not None
        ):
            return _show_alternatives(inputs, parameters)
        else:
            _show_estimate(inputs, parameters)
    return None


def _cost_options(parameters: dict[str, Any], options: dict[str, Any]) -> CostOptions:
    from dataclasses import fields

    from sm_train.toolkit.costing.cost_command import CostOptions

    globals_ = {name: options[name] for name in ("region", "profile")}
    names = {field.name for field in fields(CostOptions)} - globals_.keys()
    return CostOptions(**globals_, **{name: parameters[name] for name in names})


def _check_exclusive(parameters: dict[str, Any]) -> None:
    outputs = {
        "--explain": "explain",
        "--csv": "as_csv",
        "--markdown": "markdown",
        "--json": "as_json",
    }
    chosen = [option for option, name in outputs.items() if parameters[name]]
    if len(chosen) > 1:
        raise UserError(f"{chosen[0]}: and {chosen[1]} both print the estimate; give one")
    modes = [
        f"--{name}" for name in ("compare", "actual", "alternatives", "regions") if parameters[name]
    ]
    if len(modes) > 1:
        raise UserError(f"{modes[0]}: cannot be combined with {modes[1]}; give one")
    if modes and parameters["run"] is None:
        raise UserError(f"{modes[0]}: requires a run file; give RUN too")
    for name in ("by", "since", "month"):
        if parameters[name] is not None and not parameters["report"]:
            raise UserError(f"--{name}: requires --report")
    for option in ("explain", "markdown", "html"):
        if parameters["report"] and parameters[option]:
            raise UserError(f"--report: cannot be combined with --{option}; remove it")
    if parameters["report"] and (modes or parameters["run"] is not None):
        raise UserError("--report: totals the jobs of all runs; remove RUN and other modes")


def _show_estimate(inputs: EstimateInputs, parameters: dict[str, Any]) -> None:
    from sm_train.toolkit.costing import cost_view
    from sm_train.toolkit.costing.cost_result import price
    from sm_train.toolkit.costing.scope import scope_rows
    from sm_train.toolkit.terminal.console import note, write_json

    cost = price(inputs)
    document = cost.document
    if parameters["html"]:
        from sm_train.toolkit.costing.html_report import write_report

        name = inputs.config.name if inputs.config else "cluster"
        write_report(parameters["html"], name, document, inputs.purchase.region)
        note(f"Wrote {parameters['html']}")
    if parameters["as_json"]:
        write_json(document)
    elif parameters["as_csv"]:
        click.echo(cost_view.as_csv(document), nl=False)
    elif parameters["markdown"]:
        from sm_train.toolkit.costing.comparison_view import estimate_markdown

        click.echo(estimate_markdown(document, str(parameters["run"] or "")), nl=False)
    elif parameters["explain"]:
        from sm_train.cost.explain import explain

        cost_view.show_explanation(document, inputs.purchase.region, explain(cost.estimate))
    else:
        run = parameters["run"]
        scope = scope_rows(document, inputs.config) if inputs.config else []
        cost_view.show_cost(document, None if run is None else str(run), scope)


def _show_comparison(
    inputs: EstimateInputs, cost_options: CostOptions, parameters: dict[str, Any]
) -> None:
    from dataclasses import replace

    from sm_train.cost.comparison import compare
    from sm_train.toolkit.costing.comparison_view import comparison_markdown, show_comparison
    from sm_train.toolkit.costing.cost_command import resolve_inputs
    from sm_train.toolkit.costing.cost_result import price
    from sm_train.toolkit.terminal.console import write_json

    other = resolve_inputs(replace(cost_options, run=str(parameters["compare"])))
    before, after = (price(each).document for each in (inputs, other))
    document = {"before": before, "after": after, "difference": compare(before, after)}
    if parameters["as_json"]:
        write_json(document)
    elif parameters["markdown"]:
        names = (str(parameters[name]) for name in ("run", "compare"))
        click.echo(comparison_markdown(document, *names), nl=False)
    else:
        show_comparison(document)


def _show_alternatives(inputs: EstimateInputs, parameters: dict[str, Any]) -> int:
    from sm_train.toolkit.costing.cost_view import show_alternatives
    from sm_train.toolkit.costing.run_alternatives import limits, list_alternatives
    from sm_train.toolkit.terminal.console import write_json

    limit = limits(parameters["deadline"], parameters["budget"])
    result = list_alternatives(inputs, limit)
    document = result.as_dict()
    if parameters["as_json"]:
        write_json(document)
    else:
        show_alternatives(document, parameters["rows"], result.sentence)
    if result.documents:
        return ExitCode.OK
    return ExitCode.OVER_BUDGET if parameters["budget"] is not None else ExitCode.PREFLIGHT


def _show_regions(inputs: EstimateInputs, parameters: dict[str, Any]) -> None:
    from sm_train.toolkit.costing.cost_view import show_regions
    from sm_train.toolkit.costing.run_alternatives import list_regions
    from sm_train.toolkit.terminal.console import write_json

    rows = list_regions(inputs)
    if parameters["as_json"]:
        write_json({"regions": rows})
    else:
        show_regions(rows)


def _show_actual(
    inputs: EstimateInputs, cost_options: CostOptions, parameters: dict[str, Any]
) -> None:
    from sm_train.toolkit.aws.session import open_session
    from sm_train.toolkit.costing.actual import actual_cost
    from sm_train.toolkit.costing.cost_view import show_actual
    from sm_train.toolkit.runs.run_state import read_state
    from sm_train.toolkit.targets.resolved_run import run_of_config
    from sm_train.toolkit.terminal.console import write_json
    from sm_train.toolkit.watch.controller import failed_on_infrastructure

    assert inputs.config is not None
    config, region = inputs.config, inputs.purchase.region
    session = open_session(cost_options.profile, region)
    document = actual_cost(
        inputs,
        session,
        failed_on_infrastructure,
        lambda: read_state(session, run_of_config(session, config, region)).projection,
    )
    if parameters["as_json"]:
        write_json(document)
    else:
        show_actual(document)


def _show_report(cost_options: CostOptions, parameters: dict[str, Any]) -> None:
    from datetime import UTC, datetime

    from sm_train.toolkit.aws.session import open_session, resolve_region
    from sm_train.toolkit.costing.cost_report import COLUMNS, report, reported_period, table_rows
    from sm_train.toolkit.costing.price_table import price_table
    from sm_train.toolkit.terminal.console import write_json
    from sm_train.toolkit.terminal.csv_text import format_csv
    from sm_train.toolkit.terminal.text_table import terminal_width, text_table

    now = datetime.now(UTC)
    period = reported_period(parameters["since"], parameters["month"], now)
    region = resolve_region(cost_options.region, None, cost_options.profile)
    session = open_session(cost_options.profile, region)
    by = parameters["by"] or "run"
    document = report(session, price_table(cost_options.prices), by, period, now)
    if parameters["as_json"]:
        write_json(document)
    elif parameters["as_csv"]:
        total = document["total"] | {"month": "total"}
        click.echo(format_csv(COLUMNS, [*document["rows"], total]), nl=False)
    else:
        header = ("month", by.removeprefix("tag:"), "jobs", "GPU-hours", "cost", "price")
        for line in text_table(header, list(table_rows(document)), left=2, width=terminal_width()):
            click.echo(line)


def _update_prices(cost_options: CostOptions, parameters: dict[str, Any]) -> None:
    from datetime import UTC, datetime

    from sm_train.toolkit.costing import price_table
    from sm_train.toolkit.terminal.console import note

    if parameters["price_list"]:
        table = price_table.import_price_lists(parameters["price_list"])
    if parameters["refresh"]:
        from sm_train.toolkit.aws.session import open_session
        from sm_train.toolkit.costing.cost_command import region_of
        from sm_train.toolkit.terminal.console import stderr_console

        region = region_of(cost_options)
        session = open_session(cost_options.profile, region)
        with stderr_console().status(f"Fetching the prices of {region}"):
            table = price_table.fetch_prices(session, region, datetime.now(UTC).date())
    note(f"{len(table.rows)} prices cached in {price_table.cache_path()}")
