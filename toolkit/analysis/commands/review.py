"""``sm-train review``: how well a job used its time, and what to fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from sm_train.toolkit.command_base.command import command as sm_train_command


@sm_train_command(
    "sm-train review my-model",
    "sm-train review my-model --html review.html",
    "sm-train review local-runs/my-model",
)
@click.argument("targets", metavar="RUN|JOB|LOGS...", nargs=-1, required=True)
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a self-contained HTML page with charts.",
)
@click.option(
    "--run",
    "run_file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="RUN",
    help="Compare the logs against this run file's estimate.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print one CSV row per job.")
@click.option(
    "--export",
    "export_format",
    type=click.Choice(["tensorboard", "csv"]),
    help="Write metrics and evaluation images to files instead of a review.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    default=Path("exports"),
    show_default=True,
    help="Folder of --export; each job gets a folder in it.",
)
@click.pass_obj
def command(
    options: dict[str, Any],
    targets: tuple[str, ...],
    html: Path | None,
    run_file: Path | None,
    as_json: bool,
    as_csv: bool,
    export_format: str | None,
    out: Path,
) -> None:
    """Review how well jobs used their time, with evidence and suggested fixes; compare several.

    RUN and JOB are on SageMaker: their logs and metrics are read from CloudWatch. LOGS are a local
    run's folder or saved logs: a file, or a folder with one log per node.
    """
    from sm_train.toolkit.analysis.review.build import build_review, export
    from sm_train.toolkit.analysis.review.review_view import csv_table, show
    from sm_train.toolkit.base.errors import UserError
    from sm_train.toolkit.terminal.console import note, stderr_console, stdout_console, write_json

    if as_json and as_csv:
        raise UserError("--json: cannot be combined with --csv; both write to standard output")
    if export_format is not None:
        if as_json or as_csv or html or run_file:
            raise UserError("--export: cannot be combined with --json, --csv, --html or --run")
        for exported in export(
            targets,
            region=options["region"],
            profile=options["profile"],
            target_format=export_format,
            folder=out,
        ):
            stderr_console().print(
                f"wrote {exported.path}: {exported.scalars:,} values, {exported.images} images",
                markup=False,
            )
        return
    review = build_review(
        targets,
        region=options["region"],
        profile=options["profile"],
        run_file=run_file,
        with_samples=html is not None,
    )
    if html is not None:
        from sm_train.toolkit.analysis.review.review_page import write_page

        write_page(html, review)
        note(f"wrote {html}; open it in a browser")
    if as_json:
        write_json(review.document())
    elif as_csv:
        click.echo(csv_table(review), nl=False)
    else:
        show(review, stdout_console())
