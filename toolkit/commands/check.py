"""``sm-train check``: finds errors and waste before money is spent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.commands._command import command as sm_train_command
from sm_train.toolkit.errors import AccessError, ExitCode, UserError

if TYPE_CHECKING:
    from sm_train.estimators.config.schema import RunConfig
    from sm_train.toolkit.checks.storage import Progress


@sm_train_command(
    "sm-train check run.yaml --offline",
    "sm-train check run.yaml",
    "sm-train check run.yaml --offline --index packed/index.parquet --json",
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--offline", is_flag=True, help="Skip the checks that need AWS.")
@click.option(
    "--index",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="An index.parquet to use instead of the shards on this machine.",
)
@click.option(
    "--components",
    metavar="MODEL",
    help="Also check the run with this model: a folder, s3://… or a Hub ID[@REVISION].",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.pass_obj
def command(
    options: dict[str, Any],
    run: Path,
    offline: bool,
    index: Path | None,
    components: str | None,
    as_json: bool,
) -> int:
    """Check RUN for errors and waste; exit with 3 if there is an error.

    Checks the run file, the estimate, the shards in data.local or --index and the components in
    model.local_components, and, unless --offline is given, the AWS account: role, quotas, buckets,
    shards, components, existing checkpoints.
    docs/checks.md describes every finding.
    """
    from dataclasses import replace
    from datetime import UTC, datetime

    from sm_train.toolkit.aws.session import open_session, resolve_region
    from sm_train.toolkit.checks.finding import Subject
    from sm_train.toolkit.checks.preflight import offline_findings, online_findings
    from sm_train.toolkit.checks.report import document, is_ok, show
    from sm_train.toolkit.costing.run_price import estimate_run
    from sm_train.toolkit.terminal.console import stderr_console, write_json

    if offline and components is not None and components.startswith("s3://"):
        raise UserError("--components: s3://… needs AWS; remove --offline")
    config = _load(run, as_json)
    region = resolve_region(options["region"], config.region, options["profile"])
    subject = Subject(config, region, estimate_run(config, region), run.parent, index)
    subject = replace(subject, components=components)
    today = datetime.now(UTC).date()
    refused: AccessError | None = None
    try:
        if offline:
            findings = offline_findings(subject, today)
        else:
            session = open_session(options["profile"], region)
            with _listing_progress() as progress:
                findings = online_findings(subject, session, today, progress)
    except AccessError as error:
        # Without an account, the checks that need none still count.
        refused, findings = error, offline_findings(subject, today)
    if as_json:
        write_json(document(findings))
    else:
        show(findings, stderr_console(shows_results=True))
    if refused is not None:
        raise UserError(f"{refused}; only the offline checks ran", refused.exit_code)
    return ExitCode.OK if is_ok(findings) else ExitCode.PREFLIGHT


def _load(run: Path, as_json: bool) -> RunConfig:
    from sm_train.estimators.config.load import RunFileError
    from sm_train.toolkit.run_file import load_or_problems

    try:
        return load_or_problems(run)
    except RunFileError as error:
        if as_json:
            from sm_train.toolkit.checks.report import document
            from sm_train.toolkit.checks.run_file import run_file_findings
            from sm_train.toolkit.terminal.console import write_json

            write_json(document(list(run_file_findings(run, error))))
        raise UserError(str(error)) from None


@contextmanager
def _listing_progress() -> Iterator[Progress]:
    """Yield a callback that shows the number of listed objects, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from sm_train.toolkit.terminal.console import stderr_console

    with stderr_console().status("querying AWS") as status:
        yield lambda count: status.update(f"listing shards: {count:,} objects")
