"""Resumes a run: by its run file, or by its launch record in S3."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.cost.json_document import as_document
from sm_train.estimators.bundle.bundle import run_document
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.memory.sharding_choice import with_sharding
from sm_train.toolkit.planning.run_price import estimate_run, remaining_alternative_costs
from sm_train.toolkit.planning.scope import scope_rows
from sm_train.toolkit.planning.training_plans import described_plan, plan_problems
from sm_train.toolkit.platforms.find_run import run_target
from sm_train.toolkit.platforms.sagemaker.sagemaker_run import SageMakerRun, open_run
from sm_train.toolkit.platforms.target import Kind
from sm_train.toolkit.records.launch_record import LaunchRecord
from sm_train.toolkit.records.stage_state import current
from sm_train.toolkit.run_file.index_facts import with_stored_index
from sm_train.toolkit.run_file.run_file import RUN_FILE_ENDINGS, load
from sm_train.toolkit.runs.run_state import projected, stages_of
from sm_train.toolkit.submit.changes import KeyChange, changed_keys, recorded_document
from sm_train.toolkit.submit.plan_view import change_lines, plan_rows
from sm_train.toolkit.submit.planned_job import next_start
from sm_train.toolkit.submit.relocation import launch_where_last
from sm_train.toolkit.submit.replicate import replicate_inputs
from sm_train.toolkit.submit.run_bundle import bundle_of, commit_of
from sm_train.toolkit.submit.start_job import resolve_job_name, start_next_job
from sm_train.toolkit.submit.submission import choose_stages, prepare
from sm_train.toolkit.submit.submit import (
    StartCheck,
    check_budget,
    check_start,
    confirm,
    describe_start,
    report_alarms,
    report_started,
    submit,
)
from sm_train.toolkit.terminal.console import bytes_bar, note, write_line

if TYPE_CHECKING:
    import boto3


def resume(
    target: str,
    stage: str | None,
    options: dict[str, Any],
    *,
    auto_advance: bool | None,
    yes: bool,
    as_json: bool,
    take_over: bool,
    accept_components: bool,
    before_start: StartCheck = lambda *_: None,
) -> None:
    """Start the next job of the run that ``target`` names; ``options`` are the global ones.

    A run file's settings and this sm-train's training code are used if ``target`` is one, otherwise
    those that were submitted last. Without ``stage`` it is the first one that is not done. None for
    ``auto_advance`` keeps what the run was started with last.

    Raises:
        UserError: there is no such run or stage, the job cannot be started, or the user did not
            confirm.
    """
    run = open_run(target, options, where_newest=not take_over)
    if auto_advance is None:
        auto_advance = run.record is not None and run.record.auto_advance
    chosen = stage or unfinished_stage(run)
    names = [each.name for each in run.config.stages]
    if chosen not in names:
        raise UserError(f"--stage: {chosen!r} is not in the run; it has {', '.join(names)}")
    file = run_target(target)
    if accept_components and file.kind is not Kind.RUN_FILE:
        raise UserError("--accept-components: give the run file; it changes the job's settings")
    if file.kind is not Kind.RUN_FILE:
        resume_recorded(
            run,
            chosen,
            auto_advance=auto_advance,
            yes=yes,
            as_json=as_json,
            take_over=take_over,
            before_start=before_start,
        )
        return
    base = file.path.parent
    config = run.config
    if accept_components:
        model = config.model.model_copy(update={"accept_components": True})
        config = config.model_copy(update={"model": model})
    bundle, commit = bundle_of(config, base), commit_of(base)
    submit(
        prepare(config, chosen, bundle, run.region, datetime.now(), commit),
        options["profile"],
        cause="resume",
        auto_advance=auto_advance,
        yes=yes,
        as_json=as_json,
        take_over=take_over,
        before_start=before_start,
    )


def unfinished_stage(run: SageMakerRun) -> str:
    """Return the first stage that is not done.

    Raises:
        UserError: all are done.
    """
    stage = current(stages_of(run)[0])
    if stage is None:
        raise UserError(
            f"{run.name}: every stage is done; `sm-train sample` samples images from its model"
        )
    return stage.name


def resume_recorded(
    run: SageMakerRun,
    stage: str,
    *,
    auto_advance: bool,
    yes: bool,
    as_json: bool,
    take_over: bool,
    before_start: StartCheck = lambda *_: None,
) -> None:
    """Start the stage's next job after confirmation, in the cluster and region of the newest job.

    Raises:
        UserError: the job cannot be started, or the user did not confirm.
    """
    [chosen] = choose_stages(run.config, stage)
    session = run.session
    stages, warnings = stages_of(run)
    start = next_start(
        run.name, stages, chosen, cause="resume", auto_advance=auto_advance, take_over=take_over
    )
    launch = resolve_job_name(session, launch_where_last(run, stages, start))
    launch = replace(launch, record=replace(launch.record, auto_advance=auto_advance))
    plan, unknown = described_plan(session, launch.config)  # its price, before the projection
    problems = plan_problems(plan, launch.config, launch.region, None, run.now()) if plan else ()
    for level, message, fix in problems:
        if level == "error":
            raise UserError(f"cluster.training_plan: {message}; {fix}", ExitCode.PREFLIGHT)
    projection = projected(run, stages, run.now())
    _show_settings(run)
    scope = scope_rows(as_document(estimate_run(run.config, run.region)), run.config)
    for label, text in (*scope, *plan_rows(plan, unknown), ("the run", str(projection))):
        note(f"{label:<10}  {text}")
    for line in (*warnings, *check_budget(run.config, run.region, projection=projection)):
        write_line(f"warning: {line}", err=True)
    cost = projection.estimates[stage]
    check_start(before_start, session, launch.config, chosen, launch.request, cost)
    if not yes:
        alternatives = remaining_alternative_costs(run.config, run.region, stage, start.from_step)
        confirm(describe_start(chosen, start), cost, projection, alternatives)
    with bytes_bar(f"copying to {launch.region}") as progress:
        replicate_inputs(session, launch.request, launch.region, stages, progress)
    name = start_next_job(session, launch)
    report_started(name, launch.region, stage, as_json=as_json)
    report_alarms(session, run.config, run.region)


def _show_settings(run: SageMakerRun) -> None:
    """Say which settings the job gets, and name run files here that differ from them."""
    record, newest = run.record, run.found[-1]
    assert record is not None  # a run without one is not found by its name
    note(f"settings    as submitted with {newest.name} ({newest.created:%Y-%m-%d %H:%M})")
    for path, changes in _differing_files(run.session, run.name, record):
        note(f"{path} differs from them; `sm-train resume {path}` uses it:")
        for line in change_lines(changes):
            note(line)


def _differing_files(
    session: boto3.Session, name: str, record: LaunchRecord
) -> list[tuple[Path, list[KeyChange]]]:
    """Return the run files of the run in the current folder that differ from the record."""
    found = []
    recorded = recorded_document(record)
    for path in sorted(Path().iterdir()):
        if path.suffix not in RUN_FILE_ENDINGS or not path.is_file():
            continue
        try:
            config = with_sharding(load(path))
        except (UserError, OSError):
            continue  # no run file, or one that cannot be submitted as it is
        if config.name == name:
            document = run_document(with_stored_index(config, session))
            if changes := list(changed_keys(recorded, document)):
                found.append((path, changes))
    return found
