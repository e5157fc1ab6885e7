"""Goes on with a run by what its last job left in S3, without the run file."""

from __future__ import annotations

from typing import Any

from sm_train.toolkit.errors import UserError
from sm_train.toolkit.following import Run, read_state
from sm_train.toolkit.sending import (
    confirm,
    mind_budget,
    next_job,
    tell_alarms,
    tell_started,
    what,
)
from sm_train.toolkit.starting import repeat
from sm_train.toolkit.submission import choose_stages, price_of_rest


def unfinished_stage(session: Any, run: Run) -> str:
    """The first stage that is not done.

    Raises:
        UserError: all are.
    """
    stage = read_state(session, run).current
    if stage is None:
        raise UserError(f"{run.name}: every stage is done; `sm-train sample` draws from its model")
    return stage.name


def resume_recorded(
    session: Any, run: Run, stage: str, *, chain: bool, yes: bool, as_json: bool
) -> None:
    """Start the stage's next job after a yes."""
    assert run.record is not None
    [chosen] = choose_stages(run.config, stage)
    start = next_job(session, run.config, chosen, run.bucket, cause="resume", chain=chain)
    mind_budget(run.config, run.region)
    if not yes:
        confirm(what(chosen, start), price_of_rest(run.config, run.region, chosen, start.from_step))
    name = repeat(session, run.bucket, run.record, start)
    tell_started(name, run.region, stage, as_json=as_json)
    tell_alarms(session, run.config, run.region)
