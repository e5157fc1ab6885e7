"""``sm-train check``: finds errors and waste before money is spent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sm_train.toolkit.base.errors import AccessError, ExitCode, UserError
from sm_train.toolkit.base.wings import wing_module
from sm_train.toolkit.command_base.command import command as sm_train_command
from sm_train.toolkit.command_base.options import TARGETS_BY_NAME, set_option

if TYPE_CHECKING:
    from sm_train.toolkit.checks.finding import Finding
    from sm_train.toolkit.checks.storage import Progress
    from sm_train.toolkit.platforms.find_run import OpenedConfig


@sm_train_command(
    "sm-train check run.yaml --offline",
    "sm-train check run.yaml",
    "sm-train check run.yaml --offline --index packed/index.parquet --json",
)
@click.argument("run")
@set_option
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
@click.option(
    "--to",
    "target",
    type=click.Choice(list(TARGETS_BY_NAME)),
    metavar="TARGET",
    help="Also let the scheduler of slurm, kubernetes, pytorchjob or hyperpod-eks check the "
    "manifest: limits and its own dry run.",
)
@click.pass_obj
def command(
    options: dict[str, Any],
    run: str,
    changes: tuple[str, ...],
    offline: bool,
    index: Path | None,
    components: str | None,
    target: str | None,
    as_json: bool,
) -> int:
    """Check RUN for errors and waste; exit with 3 if there is an error.

    RUN is a run file, the folder of a local run, or the name of a submitted run, a stage or a job.
    Relative paths in settings that no run file here holds start from this folder.

    Checks the run file, the estimate, the shards in data.local or --index and the components in
    model.local_components, and, unless --offline is given, the AWS account: role, quotas, buckets,
    shards, components, existing checkpoints.
    docs/checks.md describes every finding.
    """
    from sm_train.toolkit.api.run import Run
    from sm_train.toolkit.checks.check_report import document, show
    from sm_train.toolkit.terminal.console import note, stderr_console, write_json

    opened = _open(run, changes, options, as_json)
    if opened.origin is not None:
        note(opened.origin)
    region = options["region"] or opened.region
    checked = Run(opened.config, opened.folder, region, options["profile"])
    refused: AccessError | None = None
    try:
        with _listing_progress(offline) as progress:
            checks = checked.check(
                offline=offline, index=index, components=components, progress=progress
            )
    except AccessError as error:
        # Without an account, the checks that need none still count.
        if components is not None and components.startswith("s3://"):
            raise
        refused, checks = error, checked.check(offline=True, index=index, components=components)
    findings = [*checks.findings, *_of_scheduler(opened, target, region, options)]
    if as_json:
        write_json(document(findings))
    else:
        show(findings, stderr_console(shows_results=True))
    if refused is not None:
        raise UserError(f"{refused}; only the offline checks ran", refused.exit_code)
    is_fit = not any(finding.level == "error" for finding in findings)
    return ExitCode.OK if is_fit else ExitCode.PREFLIGHT


def _of_scheduler(
    opened: OpenedConfig, target: str | None, region: str | None, options: dict[str, Any]
) -> list[Finding]:
    """Return what the scheduler of a cluster finds in the manifests of all stages."""
    if target is None:
        return []
    from sm_train.toolkit.aws.session import resolve_region

    where = resolve_region(region, opened.config.region, options["profile"])
    findings: list[Finding] = wing_module(
        "sm_train.toolkit.clusters.scheduler_checks"
    ).findings_of_stages(opened.config, opened.folder, TARGETS_BY_NAME[target], where)
    return findings


def _open(
    run: str, changes: tuple[str, ...], options: dict[str, Any], as_json: bool
) -> OpenedConfig:
    """Open the settings; what is wrong in a run file is part of the JSON document, too."""
    from sm_train.estimators.config.load import RunFileError
    from sm_train.toolkit.memory.sharding_choice import with_sharding
    from sm_train.toolkit.platforms.find_run import OpenedConfig, open_recorded, run_target
    from sm_train.toolkit.platforms.target import Kind
    from sm_train.toolkit.run_file.run_file import load_or_problems

    target = run_target(run)
    if target.kind is not Kind.RUN_FILE:
        return open_recorded(target, changes, options)
    try:
        return OpenedConfig(
            with_sharding(load_or_problems(target.path, changes)), target.path.parent
        )
    except RunFileError as error:
        if as_json:
            from sm_train.toolkit.checks.check_report import document
            from sm_train.toolkit.checks.run_file import run_file_findings
            from sm_train.toolkit.terminal.console import write_json

            write_json(document(list(run_file_findings(target.path, error))))
        raise UserError(str(error)) from None


@contextmanager
def _listing_progress(offline: bool) -> Iterator[Progress]:
    """Yield a callback that shows the number of listed objects, on a terminal only."""
    if offline or not sys.stderr.isatty():
        yield lambda count: None
        return
    from sm_train.toolkit.terminal.console import stderr_console

    with stderr_console().status("querying AWS") as status:
        yield lambda count: status.update(f"listing shards: {count:,} objects")
