"""Starts a stage on Slurm or Kubernetes: the same plan and question as on SageMaker, then the
manifest's own command.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sm_train.cost.json_document import as_document
from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.entrypoints.clusters.node_record import Submitted, store_submitted
from sm_train.entrypoints.storage.storage import open_storage
from sm_train.entrypoints.storage.store import S3Access
from sm_train.estimators.bundle.bundle import ARCHIVE_NAME, run_document
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.manifests.manifest import Manifest, file_name
from sm_train.estimators.manifests.slurm import code_folder
from sm_train.estimators.manifests.stage_job import Target, off_sagemaker
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.session import open_session, resolve_region
from sm_train.toolkit.base.errors import AccessError, ExitCode, UserError
from sm_train.toolkit.checks.finding import Finding
from sm_train.toolkit.clusters.cluster_plan import ClusterPlan, show_cluster_plan
from sm_train.toolkit.clusters.node_records.cluster_run import ClusterRun
from sm_train.toolkit.clusters.node_records.find_cluster_run import cluster_run_of
from sm_train.toolkit.clusters.scheduler import require_scheduler, run_command
from sm_train.toolkit.clusters.scheduler_checks import scheduler_findings
from sm_train.toolkit.clusters.staged_manifest import CheckedManifest, checked_manifest, stage_code
from sm_train.toolkit.planning.history import recorded_history
from sm_train.toolkit.planning.run_price import estimate_run
from sm_train.toolkit.runs.remediation import StartJob
from sm_train.toolkit.runs.run_state import projected, stages_of
from sm_train.toolkit.submit.planned_job import next_start
from sm_train.toolkit.submit.relocation import require_run_data
from sm_train.toolkit.submit.submission import choose_stages
from sm_train.toolkit.submit.submit import confirm, describe_start, watcher_warnings
from sm_train.toolkit.terminal.console import (
    note,
    stderr_console,
    stdout_console,
    write_json,
    write_line,
)


@dataclass(frozen=True)
class PlannedClusterJob:
    """A stage that is to start on a cluster: its manifest, its plan, and what is unusual.

    ``file`` is where the manifest is written, which its commands name.
    """

    file: Path
    checked: CheckedManifest
    plan: ClusterPlan
    start: StartJob
    findings: tuple[Finding, ...]


def submit_to_cluster(
    file: Path,
    config: RunConfig,
    stage: str | None,
    target: Target,
    options: dict[str, Any],
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    take_over: bool,
) -> None:
    """Show plan and cost of a stage, ask, and start it; ``options`` are the global ones.

    Raises:
        UserError: it is running or done already, the run file or the cluster does not allow it, or
            the user did not confirm.
    """
    job = plan_cluster_job(file, config, stage, target, options, take_over=take_over)
    manifest = job.checked.manifest
    for line in job.checked.warnings:
        write_line(f"warning: {line}", err=True)
    shows_text = dry_run and not as_json
    show_cluster_plan(job.plan, stdout_console() if shows_text else stderr_console())
    if dry_run:
        if as_json:
            write_json(manifest.as_dict() | {"cost": as_document(job.plan.cost), "job": None})
        _refuse_errors(job.findings)
        return
    require_scheduler(manifest)
    _refuse_errors(job.findings)
    if waiting := run_command(manifest.queue_query):
        raise UserError(
            f"{job.plan.stage.name}: the cluster has {waiting.splitlines()[0]}; a stage has one "
            f"job at a time: `{manifest.commands['status']}` shows it, and if it has ended, "
            f"`{manifest.commands['resume']}` starts it again"
        )
    if (proposal := _sleepless_watcher(manifest)) is not None:
        for line in watcher_warnings(job.plan.cost, proposal):
            write_line(f"warning: {line}", err=True)
    if not yes:
        confirm(describe_start(job.plan.stage, job.start), job.plan.cost, job.plan.projection, [])
    _place_code(job.checked, options)
    write_atomic(job.file, manifest.text.encode())
    answer = run_command(manifest.commands["start"])
    last = answer.splitlines()[-1] if answer else manifest.program
    number = last.rpartition(" ")[2] if manifest.has_partitions else last
    _store_submitted(job, options)
    if as_json:
        write_json(manifest.as_dict() | {"cost": as_document(job.plan.cost), "job": number})
    note(f"Started {manifest.name}: {last}")
    for purpose in ("watch", "watch-on", "watch-off", "logs", "stop", "resume"):
        if purpose in manifest.commands:
            note(f"{purpose:9}  {manifest.commands[purpose].replace('-JOB.log', f'-{number}.log')}")


def _refuse_errors(findings: Sequence[Finding]) -> None:
    """Print what the scheduler says of a manifest, and refuse one with errors.

    Raises:
        UserError: there are errors (exit code 3).
    """
    for finding in findings:
        if finding.level != "error":
            text = f"{finding.where}: {finding.message}; {finding.fix}"
            write_line(f"{finding.level}: {text}", err=True)
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        lines = (f"{each.where}: {each.message}; {each.fix}" for each in errors)
        raise UserError("\n".join(lines), ExitCode.PREFLIGHT)


def _store_submitted(job: PlannedClusterJob, options: dict[str, Any]) -> None:
    """Store that the job was started, next to its checkpoints: it may wait before a node runs."""
    manifest, config = job.checked.manifest, job.checked.config
    if manifest.checkpoints is None:
        return
    submitted = Submitted(manifest.title.lower(), manifest.commands, time.time())
    run_file = json.dumps(run_document(off_sagemaker(config))).encode()
    access = S3Access(options["profile"], job.checked.region)
    try:
        with translate_aws_errors(manifest.checkpoints):
            store_submitted(open_storage(manifest.checkpoints, access), run_file, submitted)
    except (OSError, UserError) as error:
        write_line(
            f"warning: `status` knows the job once its nodes have started: {error}", err=True
        )


def plan_cluster_job(
    file: Path,
    config: RunConfig,
    stage: str | None,
    target: Target,
    options: dict[str, Any],
    *,
    take_over: bool,
) -> PlannedClusterJob:
    """Plan a stage's next job on a cluster, from its newest checkpoint if it has one.

    Raises:
        UserError: it is running or done already, or the run file does not fit the target.
    """
    region = resolve_region(options["region"], config.region, options["profile"])
    [chosen, *_] = choose_stages(config, stage)
    history = recorded_history(config, file.parent)
    manifest_file = file.parent / file_name(config, chosen, target)
    checked = checked_manifest(
        config,
        file.parent,
        chosen.name,
        target,
        region,
        str(manifest_file),
        history,
        take_over=take_over,
    )
    whole = estimate_run(config, region, history=history)
    start = StartJob(chosen.name, 1, 0, "submit", "", auto_advance=False)
    cost, projection = estimate_run(config, region, (chosen,), history), None
    run = _found_run(file, config, checked.manifest, options)
    if run is not None:
        stages, unread = stages_of(run)
        start = next_start(
            shlex.quote(str(file)),
            stages,
            chosen,
            cause="submit",
            auto_advance=False,
            take_over=take_over,
        )
        projection = projected(run, stages, run.now())
        cost = projection.estimates.get(chosen.name, cost)
        checked = replace(checked, warnings=(*checked.warnings, *unread))
    data_warnings = _data_warnings(checked, chosen, options)
    checked = replace(checked, warnings=(*checked.warnings, *data_warnings))
    plan = ClusterPlan(config, checked.manifest, chosen, start.from_step, cost, whole, projection)
    findings = tuple(scheduler_findings(checked.manifest, config, chosen.instances))
    return PlannedClusterJob(manifest_file, checked, plan, start, findings)


def _data_warnings(
    checked: CheckedManifest, stage: StageSection, options: dict[str, Any]
) -> list[str]:
    """Look for the data of a stage, as before a training job.

    Raises:
        UserError: they are missing or too few.
    """
    if checked.manifest.has_partitions and checked.config.slurm.data == "shared":
        return []  # in a folder of the nodes
    try:
        session = open_session(options["profile"], checked.region)
        require_run_data(session, checked.config, checked.region, stage.name)
    except AccessError as error:
        return [f"the data were not looked for: {error}"]
    return []


def _found_run(
    file: Path, config: RunConfig, manifest: Manifest, options: dict[str, Any]
) -> ClusterRun | None:
    """Return the run as its nodes have stored it; None if none has started yet.

    On Slurm, the folder that the nodes share is asked first, for which nobody needs an account.
    """
    try:
        return cluster_run_of(str(file), config, options)
    except AccessError:
        if not manifest.has_partitions:
            raise
        return None


def _sleepless_watcher(manifest: Manifest) -> str | None:
    """Return what would watch the job without this laptop; None if its manifest has that."""
    if manifest.watch_schedule is None:
        return "set budget.usd or a sink of alerts, with which the manifest has a watcher"
    return (
        "`watch-on`, which follows the start, adds a watcher"
        if "watch-on" in manifest.commands
        else None
    )


def _place_code(checked: CheckedManifest, options: dict[str, Any]) -> None:
    """Put the code where the nodes look for it: into the folder that they share, else into S3."""
    shared, bundle = checked.config.slurm.shared_folder, checked.bundle
    # sbatch runs here, so the folder that the nodes share is here, too, or can be made.
    if checked.manifest.has_partitions and shared and Path(shared).parent.is_dir():
        code = Path(code_folder(checked.config, bundle.sha256))
        code.mkdir(parents=True, exist_ok=True)
        write_atomic(code / ARCHIVE_NAME, bundle.archive)
        return
    stage_code(open_session(options["profile"], checked.region), checked.manifest, bundle)
