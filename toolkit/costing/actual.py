"""The actual cost of a run's jobs compared with the estimate, and stored for later estimates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from sm_train.cost.actual_cost import FinishedJob, as_document, measurements, observed
from sm_train.cost.assumptions import Assumptions, learned
from sm_train.cost.estimate import Estimate, estimate
from sm_train.cost.stage import CostStage
from sm_train.cost.timeline import Timeline
from sm_train.toolkit.aws.session import open_session
from sm_train.toolkit.costing.command import EstimateInputs
from sm_train.toolkit.costing.history import History, history_uri, write_history
from sm_train.toolkit.costing.stages import stages_to_price
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.job_events import read_jobs
from sm_train.toolkit.jobs.training_job import TrainingJob, jobs_of_run

if TYPE_CHECKING:
    import boto3


def actual_cost(
    inputs: EstimateInputs,
    profile: str | None,
    failed_on_infrastructure: Callable[[boto3.Session, TrainingJob], bool],
) -> dict[str, Any]:
    """Return the document of ``cost --actual``, and store what the jobs showed in S3.

    ``failed_on_infrastructure`` diagnoses a failed job.

    Raises:
        UserError: the run has no job yet, or AWS refuses a request.
    """
    config, region = inputs.config, inputs.purchase.region
    assert config is not None
    session = open_session(profile, region)
    training_jobs = jobs_of_run(session, config.name)
    if not training_jobs:
        raise UserError(f"--actual: no training job of run {config.name} in {region}; submit one")
    jobs = read_jobs(
        session,
        training_jobs,
        inputs.prices,
        datetime.now(UTC),
        partial(failed_on_infrastructure, session),
    )
    history = History(observed(jobs), tuple(measurements(jobs)))
    uri = history_uri(config, region)
    document = as_document(jobs, _expected(inputs, jobs), _remaining(inputs, jobs, history))
    try:
        write_history(session, uri, history)
    except UserError as error:
        # The comparison itself does not depend on the upload.
        warning = f"not stored for later estimates: {error}"
        return document | {"history": None, "warnings": [warning]}
    return document | {"history": uri, "warnings": []}


def _remaining(
    inputs: EstimateInputs, jobs: list[FinishedJob], history: History
) -> dict[str, Estimate]:
    """Estimate the remaining steps of each stage at the speed that its jobs showed."""
    assert inputs.config is not None
    assumptions = learned(inputs.assumptions, history.observed)
    names = {stage.name for stage in inputs.stages}
    estimates = {}
    for stage in stages_to_price(inputs.config, history.stage_measurements(), rescale_batch=True):
        last_steps = (timeline.last_step for timeline in _timelines(jobs, stage))
        left = stage.max_steps - max(last_steps, default=0)
        if left > 0 and stage.name in names:
            estimates[stage.name] = _estimate(inputs, stage, left, assumptions)
    return estimates


def _expected(inputs: EstimateInputs, jobs: list[FinishedJob]) -> dict[str, Estimate]:
    """Estimate each stage for the steps that its jobs ran."""
    estimates = {}
    for stage in inputs.stages:
        timelines = _timelines(jobs, stage)
        done = max((timeline.last_step for timeline in timelines), default=0)
        done -= min((timeline.first_step for timeline in timelines), default=0)
        if done > 0:
            estimates[stage.name] = _estimate(inputs, stage, done, inputs.assumptions)
    return estimates


def _timelines(jobs: list[FinishedJob], stage: CostStage) -> list[Timeline]:
    return [job.timeline for job in jobs if job.stage == stage.name and job.timeline]


def _estimate(
    inputs: EstimateInputs, stage: CostStage, max_steps: int, assumptions: Assumptions
) -> Estimate:
    shortened = replace(stage, max_steps=max_steps)
    return estimate([shortened], inputs.purchase, assumed=assumptions, prices=inputs.prices)
