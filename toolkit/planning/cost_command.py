"""Runs ``sm-train cost``: one of its modes, from options to the printed result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import click
from sm_train.cost.comparison import compare
from sm_train.cost.explain import explain
from sm_train.toolkit.aws.session import open_session, resolve_region
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.base.wings import wing_module
from sm_train.toolkit.planning import comparison_view, cost_view, price_table
from sm_train.toolkit.planning.cost_result import price
from sm_train.toolkit.planning.estimate_inputs import (
    CostOptions,
    EstimateInputs,
    region_of,
    resolve_inputs,
    usage_errors,
)
from sm_train.toolkit.planning.scope import scope_rows
from sm_train.toolkit.terminal.console import note, stderr_console, write_json
from sm_train.toolkit.terminal.csv_text import format_csv
from sm_train.toolkit.terminal.text_table import terminal_width, text_table

_MODES = ("compare", "actual", "alternatives", "regions")


@dataclass(frozen=True)
class CostCommand(CostOptions):
    """All options of ``cost``, by the names of the command's."""

    refresh: bool = False
    alternatives: bool = False
    regions: bool = False
    deadline: str | None = None
    budget: float | None = None
    compare: Path | None = None
    actual: bool = False
    report: bool = False
    by: str | None = None
    since: str | None = None
    explain: bool = False
    html: Path | None = None
    as_csv: bool = False
    markdown: bool = False
    as_json: bool = False


def run_cost(options: CostCommand) -> int:
    """Print what the options ask for, and return the exit code.

    Raises:
        UserError: options contradict each other, a file cannot be used, or AWS refuses a request.
    """
    _check_exclusive(options)
    if options.report:
        _show_past_jobs(options)
        return ExitCode.OK
    with usage_errors():
        if options.refresh:
            _refresh_prices(options)
            if options.run is None and options.instance is None:
                return ExitCode.OK
        inputs = resolve_inputs(options)
        if options.actual:
            places = {"region": inputs.purchase.region, "profile": options.profile}
            analysis = wing_module("sm_train.toolkit.analysis.actual")
            analysis.show_actual_cost(inputs, options.run, places, as_json=options.as_json)
        elif options.compare is not None:
            _show_comparison(inputs, options)
        elif options.regions:
            _show_regions(inputs, options)
        elif options.alternatives or options.deadline or options.budget is not None:
            return _show_alternatives(inputs, options)
        else:
            _show_estimate(inputs, options)
    return ExitCode.OK


def _check_exclusive(options: CostCommand) -> None:
    outputs = {
        "--explain": options.explain,
        "--csv": options.as_csv,
        "--markdown": options.markdown,
        "--json": options.as_json,
    }
    chosen = [option for option, is_given in outputs.items() if is_given]
    if len(chosen) > 1:
        raise UserError(f"{chosen[0]}: and {chosen[1]} both print the estimate; give one")
    modes = [f"--{name}" for name in _MODES if getattr(options, name)]
    if len(modes) > 1:
        raise UserError(f"{modes[0]}: cannot be combined with {modes[1]}; give one")
    if modes and options.run is None:
        raise UserError(f"{modes[0]}: requires a run file; give RUN too")
    for name in ("by", "since"):
        if getattr(options, name) is not None and not options.report:
            raise UserError(f"--{name}: requires --report")
    for option in ("explain", "markdown", "html"):
        if options.report and getattr(options, option):
            raise UserError(f"--report: cannot be combined with --{option}; remove it")
    if options.report and (modes or options.run is not None):
        raise UserError("--report: totals the jobs of all runs; remove RUN and other modes")


def _show_estimate(inputs: EstimateInputs, options: CostCommand) -> None:
    cost = price(inputs)
    document = cost.document
    if options.html:
        from sm_train.toolkit.planning.html_report import write_report

        name = inputs.config.name if inputs.config else "cluster"
        write_report(options.html, name, document, inputs.purchase.region)
        note(f"Wrote {options.html}")
    if options.as_json:
        write_json(document)
    elif options.as_csv:
        click.echo(cost_view.as_csv(document), nl=False)
    elif options.markdown:
        click.echo(comparison_view.estimate_markdown(document, options.run or ""), nl=False)
    elif options.explain:
        region = inputs.purchase.region
        cost_view.show_explanation(document, region, explain(cost.estimate), cost.limits)
    else:
        scope = scope_rows(document, inputs.config) if inputs.config else []
        cost_view.show_cost(document, options.run, scope)


def _show_comparison(inputs: EstimateInputs, options: CostCommand) -> None:
    other = resolve_inputs(replace(options, run=str(options.compare)))
    before, after = (price(each).document for each in (inputs, other))
    document = {"before": before, "after": after, "difference": compare(before, after)}
    if options.as_json:
        write_json(document)
    elif options.markdown:
        names = str(options.run), str(options.compare)
        click.echo(comparison_view.comparison_markdown(document, *names), nl=False)
    else:
        comparison_view.show_comparison(document)


def _show_alternatives(inputs: EstimateInputs, options: CostCommand) -> int:
    from sm_train.toolkit.planning.run_alternatives import limits, list_alternatives

    result = list_alternatives(inputs, limits(options.deadline, options.budget))
    document = result.as_dict()
    if options.as_json:
        write_json(document)
    else:
        cost_view.show_alternatives(document, result.sentence)
    if result.documents:
        return ExitCode.OK
    return ExitCode.OVER_BUDGET if options.budget is not None else ExitCode.PREFLIGHT


def _show_regions(inputs: EstimateInputs, options: CostCommand) -> None:
    from sm_train.toolkit.planning.run_alternatives import list_regions

    rows = list_regions(inputs)
    if options.as_json:
        write_json({"regions": rows})
    else:
        cost_view.show_regions(rows)


def _show_past_jobs(options: CostCommand) -> None:
    from sm_train.toolkit.planning.past_jobs import (
        COLUMNS,
        past_jobs_document,
        reported_period,
        table_rows,
    )

    now = datetime.now(UTC)
    period = reported_period(options.since, now)
    region = resolve_region(options.region, None, options.profile)
    session = open_session(options.profile, region)
    by = options.by or "run"
    prices = price_table.price_table(options.prices)
    document = past_jobs_document(session, prices, by, period, now)
    if options.as_json:
        write_json(document)
    elif options.as_csv:
        total = document["total"] | {"month": "total"}
        click.echo(format_csv(COLUMNS, [*document["rows"], total]), nl=False)
    else:
        header = ("month", by.removeprefix("tag:"), "jobs", "GPU-hours", "cost", "price")
        for line in text_table(header, list(table_rows(document)), left=2, width=terminal_width()):
            click.echo(line)


def _refresh_prices(options: CostCommand) -> None:
    from sm_train.toolkit.planning.training_plans import plan_of
    from sm_train.toolkit.platforms.find_run import open_config

    region = region_of(options)
    session = open_session(options.profile, region)
    with stderr_console().status(f"Fetching the prices of {region}"):
        table = price_table.fetch_prices(session, region, datetime.now(UTC).date())
    note(f"{len(table.rows)} prices cached in {price_table.cache_path()}")
    if options.run is not None:
        places = {"region": region, "profile": options.profile}
        plan = plan_of(session, open_config(options.run, options.changes, places).config)
        if plan is not None:
            note(plan.describe(datetime.now(UTC)))
