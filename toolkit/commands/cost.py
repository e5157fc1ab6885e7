"""``sm-train cost``: what a run costs, in dollars and days, before, during and after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.errors import ExitCode, UserError

if TYPE_CHECKING:
    from sm_train.toolkit.costing.command import Asked, Costing

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option("--stage", metavar="S", help="One stage of RUN.")
@click.option("--instance", metavar="T", help="Without RUN: instance type.")
@click.option("--instances", type=int, metavar="N", help="Without RUN: number of instances.")
@click.option("--its", type=float, metavar="X", help="Optimizer steps a second.")
@click.option("--steps", "max_steps", type=int, metavar="N", help="Optimizer steps.")
@click.option(
    "--measured",
    multiple=True,
    metavar="FILE|JOB",
    help="Take the it/s from event lines: a log, a local run's folder or a job. May be repeated.",
)
@click.option("--rescale-batch", is_flag=True, help="Carry an it/s of another batch by images/s.")
@click.option("--samples", type=int, metavar="N", help="Samples in the shards, to check epochs.")
@click.option("--assume", multiple=True, metavar="NAME=VALUE", help="Another figure of the model.")
@click.option("--learn", is_flag=True, help="Use what RUN's finished jobs showed (from S3).")
@click.option("--history", type=_FILE, metavar="FILE", help="The same from a downloaded file.")
@click.option("--region", metavar="R", help="AWS region of the prices.")
@click.option(
    "--purchase", default="on-demand", metavar="KIND", help="Or savings-plan-1y-no-upfront …"
)
@click.option("--prices", type=_FILE, metavar="FILE", help="Your own prices or discounts, as CSV.")
@click.option("--refresh", is_flag=True, help="Ask AWS for today's prices of the region first.")
@click.option(
    "--price-list",
    type=_FILE,
    multiple=True,
    metavar="FILE",
    help="Take prices from a downloaded AWS price list first.",
)
@click.option("--alternatives", is_flag=True, help="Other machines that could run RUN.")
@click.option("--deadline", metavar="TIME", help="Alternatives that take at most this, as 14d.")
@click.option("--budget", type=float, metavar="USD", help="Alternatives that cost at most this.")
@click.option(
    "--rows", type=click.IntRange(1), default=20, show_default=True, help="Alternatives shown."
)
@click.option("--compare", type=_FILE, metavar="RUN2", help="What changes if RUN becomes RUN2.")
@click.option("--actual", is_flag=True, help="What RUN's jobs really cost, and on what.")
@click.option("--explain", is_flag=True, help="Trace every number to its formula and inputs.")
@click.option("--html", type=_FILE, metavar="FILE", help="Write a one-page report.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV on standard output.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.pass_obj
def command(options: dict[str, Any], /, **given: Any) -> int | None:
    """Price RUN, or a cluster given by --instance, --instances, --its and --steps.

    Offline: prices are from a dated table, and each says its source. Only --refresh, --learn,
    --actual and --measured JOB ask AWS.
    """
    from sm_train.toolkit.costing.command import costing

    given["region"] = given["region"] or options["region"]
    asked = _asked(given, options["profile"])
    _one_output(given)
    try:
        if given["refresh"] or given["price_list"]:
            _read_prices(asked, given)
            if asked.run is None and asked.instance is None:
                return None
        question = costing(asked)
        if given["actual"]:
            _show_actual(question, asked, given)
        elif given["compare"]:
            _show_comparison(question, asked, given)
        elif given["alternatives"] or given["deadline"] or given["budget"] is not None:
            return _show_alternatives(question, given)
        else:
            _show_estimate(question, given)
    except ValueError as error:
        raise UserError(str(error)) from None
    return None


def _asked(given: dict[str, Any], profile: str | None) -> Asked:
    from dataclasses import fields

    from sm_train.toolkit.costing.command import Asked

    names = {field.name for field in fields(Asked)} - {"profile"}
    return Asked(profile=profile, **{name: given[name] for name in names})


def _one_output(given: dict[str, Any]) -> None:
    outputs = {"--explain": "explain", "--csv": "as_csv", "--json": "as_json"}
    chosen = [option for option, name in outputs.items() if given[name]]
    if len(chosen) > 1:
        raise UserError(f"{chosen[0]}: and {chosen[1]} both print the estimate; give one")
    asked = [f"--{name}" for name in ("compare", "actual", "alternatives") if given[name]]
    if len(asked) > 1:
        raise UserError(f"{asked[0]}: and {asked[1]} ask for different things; give one")
    if asked and given["run"] is None:
        raise UserError(f"{asked[0]}: belongs to a run file; give RUN too")


def _show_estimate(question: Costing, given: dict[str, Any]) -> None:
    from sm_train.toolkit.costing import view
    from sm_train.toolkit.terminal.console import write_json

    priced = question.estimate()
    document = question.document(priced)
    if given["html"]:
        from sm_train.toolkit.costing.html_report import write_report

        name = question.config.name if question.config else "cluster"
        write_report(given["html"], name, document, question.purchase.region)
        click.echo(f"Wrote {given['html']}", err=True)
    if given["as_json"]:
        write_json(document)
    elif given["as_csv"]:
        click.echo(view.as_csv(document), nl=False)
    elif given["explain"]:
        from sm_train.cost.explain import explain

        view.show_terms(explain(priced))
    else:
        view.show_cost(document, question.purchase.region)


def _show_comparison(question: Costing, asked: Asked, given: dict[str, Any]) -> None:
    from dataclasses import replace

    from sm_train.cost.comparison import compare
    from sm_train.toolkit.costing.command import costing
    from sm_train.toolkit.costing.view import show_comparison
    from sm_train.toolkit.terminal.console import write_json

    other = costing(replace(asked, run=given["compare"]))
    before, after = (one.document(one.estimate()) for one in (question, other))
    difference = compare(before, after)
    if given["as_json"]:
        write_json({"before": before, "after": after, "difference": difference})
    else:
        show_comparison(difference)


def _show_alternatives(question: Costing, given: dict[str, Any]) -> int:
    from sm_train.toolkit.costing.alternatives import limits, list_alternatives
    from sm_train.toolkit.costing.view import show_alternatives
    from sm_train.toolkit.terminal.console import write_json

    limit = limits(given["deadline"], given["budget"])
    found = list_alternatives(question, limit, ranged=given["rows"])
    if given["as_json"]:
        write_json({"alternatives": found.documents, "considered": found.considered})
    else:
        rows = found.documents[: given["rows"]]
        show_alternatives(rows, len(found.documents) - len(rows), found.sentence)
    if found.documents:
        return ExitCode.OK
    return ExitCode.OVER_BUDGET if given["budget"] is not None else ExitCode.PREFLIGHT


def _show_actual(question: Costing, asked: Asked, given: dict[str, Any]) -> None:
    from sm_train.toolkit.costing.actual import actual_cost
    from sm_train.toolkit.costing.view import show_actual
    from sm_train.toolkit.terminal.console import write_json

    document = actual_cost(question, asked.profile)
    if given["as_json"]:
        write_json(document)
    else:
        show_actual(document)


def _read_prices(asked: Asked, given: dict[str, Any]) -> None:
    from datetime import UTC, datetime

    from sm_train.toolkit.costing import price_table

    if given["price_list"]:
        table = price_table.import_price_lists(given["price_list"])
    if given["refresh"]:
        from sm_train.toolkit.aws.session import open_session
        from sm_train.toolkit.costing.command import region_of
        from sm_train.toolkit.terminal.console import stderr_console

        region = region_of(asked)
        session = open_session(asked.profile, region)
        with stderr_console().status(f"Asking AWS for the prices of {region}"):
            table = price_table.refresh(session, region, datetime.now(UTC).date())
    click.echo(f"{len(table.rows)} prices kept in {price_table.cache_path()}", err=True)
