"""``sm-train data-report``: a report on what data sets consist of."""

from __future__ import annotations

from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command


@sm_train_command(
    "sm-train data-report packed/",
    "sm-train data-report s3://photos/ s3://art/ --runs s3://my-runs > report.md",
    "sm-train data-report s3://photos/ --column license --where \"license <> 'CC0'\"",
)
@click.argument("destinations", metavar="DST...", nargs=-1, required=True)
@click.option(
    "--column",
    "columns",
    metavar="NAME",
    multiple=True,
    help="Count the samples by this column of the index; default: by each. Repeat it for several.",
)
@click.option(
    "--where",
    metavar="SQL",
    help="Report on the samples that fulfil this condition, as `data.where` does.",
)
@click.option(
    "--runs",
    metavar="PLACE",
    multiple=True,
    help="Name the runs in PLACE that trained on the data: a bucket, a run in it, or a folder of "
    "local runs. Repeat it for several.",
)
@click.pass_obj
def command(
    options: dict[str, Any],
    destinations: tuple[str, ...],
    columns: tuple[str, ...],
    where: str | None,
    runs: tuple[str, ...],
    as_json: bool,
) -> int:
    """Report what data sets consist of, as Markdown.

    DST is a pack, or a folder or S3 prefix of shards that has an index. The report has the sources
    of the images, counts by each column of the index such as contributor and license, dates, what
    packing filtered, and removals, in the order of the European Commission's template for the
    public summary of training content. Nothing is read of the shards.
    """
    from sm_train.entrypoints.storage.store import S3Access
    from sm_train.toolkit.base.errors import ExitCode
    from sm_train.toolkit.data_prep.lineage.data_report import (
        report_document,
        report_markdown,
        report_on,
    )
    from sm_train.toolkit.data_prep.lineage.recorded_runs import stages_in
    from sm_train.toolkit.data_prep.packing.shard_set import find_shard_set
    from sm_train.toolkit.terminal.console import write_json, write_line

    access = S3Access(options["profile"], options["region"])
    stages = stages_in(runs, access)
    sets = [
        report_on(find_shard_set(address, access), columns or None, where, stages)
        for address in destinations
    ]
    if as_json:
        write_json(report_document(sets))
    else:
        write_line(report_markdown(sets).rstrip("\n"))
    return ExitCode.OK
