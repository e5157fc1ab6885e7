"""``sm-train review``: was the time of a job well used, and what would mend it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("targets", metavar="RUN|JOB|LOGS...", nargs=-1, required=True)
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a page with charts, whole in one file.",
)
@click.option(
    "--run",
    "run_file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="RUN",
    help="The run file to whose estimate logs here are held.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.option("--csv", "as_csv", is_flag=True, help="Print a row for each job on standard output.")
@click.pass_obj
def command(
    options: dict[str, Any],
    targets: tuple[str, ...],
    html: Path | None,
    run_file: Path | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Say how well the time of jobs was used, with evidence and mends; several are compared.

    RUN and JOB are on SageMaker: their lines and metrics are read from CloudWatch. LOGS are a local
    run's folder, or logs that were saved: a file, or a folder with one for each machine.
    """
    from sm_train.toolkit.errors import UserError
    from sm_train.toolkit.review.build import build_review
    from sm_train.toolkit.review.document import as_document
    from sm_train.toolkit.review.view import csv_table, show
    from sm_train.toolkit.terminal.console import stderr_console, stdout_console, write_json

    if as_json and as_csv:
        raise UserError("--json: and --csv both go to standard output; give one")
    found = build_review(
        targets, region=options["region"], profile=options["profile"], run_file=run_file
    )
    if html is not None:
        from sm_train.toolkit.review.page import write_page

        write_page(html, as_document(found))
        stderr_console().print(f"wrote {html}; open it in a browser", markup=False)
    if as_json:
        write_json(as_document(found))
    elif as_csv:
        click.echo(csv_table(found), nl=False)
    elif html is None:
        show(found, stdout_console())
