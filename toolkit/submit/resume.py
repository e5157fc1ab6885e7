"""Goes on with a run by what its last job left in S3, without the run file."""

from __future__ import annotations

from typing import Any

from sm_train.toolkit.costing.run_price import price_of_rest
from sm_train.toolkit.costing.worst_case import rest_elsewhere
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.stage_state import current
from sm_train.toolkit.runs.resolve import Run, stages_in_silence
from sm_train.toolkit.submit.replicate import bring
from sm_train.toolkit.submit.start_job import recorded_request, repeat
from sm_train.toolkit.submit.submission import choose_stages
from sm_train.toolkit.submit.submit import (
    confirm,
    mind_budget,
    next_job,
    tell_alarms,
    tell_started,
    what,
)
from sm_train.toolkit.terminal.console import bytes_bar


def unfinished_stage(session: Any, run: Run) -> str:
    """The first stage that is not done.

    Raises:
        UserError: all are.
    """
    stage = current(stages_in_silence(session, run))
    if stage is None:
        raise UserError(f"{run.name}: every stage is done; `sm-train sample` draws from its model")
    return stage.name


def resume_recorded(
    session: Any, run: Run, stage: str, *, chain: bool, yes: bool, as_json: bool
) -> None:
    """Start the stage's next job after a yes, at the place where the run was last."""
    assert run.record is not None
    [chosen] = choose_stages(run.config, stage)
    stages = stages_in_silence(session, run)
    jobs = sorted((job for one in stages for job in one.jobs), key=lambda job: job.created)
    place = run.places[jobs[-1].place % len(run.places)]
    start = next_job(session, run, stages, chosen, cause="resume", chain=chain, place=place.number)
    mind_budget(run.config, run.region)
    if not yes:
        [there] = choose_stages(place.config, stage)
        cost = price_of_rest(place.config, place.region, there, start.from_step, stated=run.config)
        others = rest_elsewhere(run.config, run.region, stage, start.from_step)
        confirm(what(chosen, start), cost, others)
    with bytes_bar(f"copying to {place.region}") as progress:
        bring(session, recorded_request(run.record, start), place.region, stages, progress)
    name = repeat(session, run.bucket, run.record, start)
    tell_started(name, place.region, stage, as_json=as_json)
    tell_alarms(session, run.config, run.region)
