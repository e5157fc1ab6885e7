"""Goes on with a run by what its last job left in S3, without the run file."""

from __future__ import annotations

from typing import Any

from sm_train.toolkit.costing.run_price import estimate_remaining
from sm_train.toolkit.costing.worst_case import remaining_fallback_costs
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.stage_state import current
from sm_train.toolkit.runs.resolve import Run, stages_without_logs
from sm_train.toolkit.submit.replicate import replicate_inputs
from sm_train.toolkit.submit.start_job import recorded_request, start_next_job
from sm_train.toolkit.submit.submission import choose_stages
from sm_train.toolkit.submit.submit import (
    check_budget,
    confirm,
    report_alarms,
    report_started,
    submit_next,
    what,
)
from sm_train.toolkit.terminal.console import bytes_bar


def unfinished_stage(session: Any, run: Run) -> str:
    """The first stage that is not done.

    Raises:
        UserError: all are.
    """
    stage = current(stages_without_logs(session, run))
    if stage is None:
        raise UserError(f"{run.name}: every stage is done; `sm-train sample` draws from its model")
    return stage.name


def resume_recorded(
    session: Any, run: Run, stage: str, *, chain: bool, yes: bool, as_json: bool
) -> None:
    """Start the stage's next job after a yes, at the place where the run was last."""
    assert run.record is not None
    [chosen] = choose_stages(run.config, stage)
    stages = stages_without_logs(session, run)
    jobs = sorted((job for one in stages for job in one.jobs), key=lambda job: job.created)
    place = run.places[jobs[-1].place % len(run.places)]
    start = submit_next(
        session, run, stages, chosen, cause="resume", chain=chain, place=place.number
    )
    check_budget(run.config, run.region)
    if not yes:
        [there] = choose_stages(place.config, stage)
        cost = estimate_remaining(
            place.config, place.region, there, start.from_step, stated=run.config
        )
        others = remaining_fallback_costs(run.config, run.region, stage, start.from_step)
        confirm(what(chosen, start), cost, others)
    with bytes_bar(f"copying to {place.region}") as progress:
        replicate_inputs(
            session, recorded_request(run.record, start), place.region, stages, progress
        )
    name = start_next_job(session, run.bucket, run.record, start)
    report_started(name, place.region, stage, as_json=as_json)
    report_alarms(session, run.config, run.region)
