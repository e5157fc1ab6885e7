"""What a run's jobs really cost, held against the estimate, and kept for the next one."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from sm_train.cost.actual_cost import FinishedJob, as_document, measurements, observed
from sm_train.cost.assumptions import Assumptions, learned
from sm_train.cost.estimate import Estimate, estimate
from sm_train.cost.stage import CostStage
from sm_train.cost.timeline import Timeline
from sm_train.toolkit.aws.session import open_session
from sm_train.toolkit.costing.command import Costing
from sm_train.toolkit.costing.history import History, history_uri, write_history
from sm_train.toolkit.costing.stages import stages_to_price
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.job_events import read_jobs
from sm_train.toolkit.jobs.training_job import jobs_of_run


def actual_cost(question: Costing, profile: str | None) -> dict[str, Any]:
    """The document of ``cost --actual``; keeps what the jobs teach beside the run in S3.

    Raises:
        UserError: the run has no job yet, or AWS refuses.
    """
    config, region = question.config, question.purchase.region
    assert config is not None
    session = open_session(profile, region)
    found = jobs_of_run(session, config.name)
    if not found:
        raise UserError(f"--actual: no training job of run {config.name} in {region}; submit one")
    jobs = read_jobs(session, found, question.prices, datetime.now(UTC))
    history = History(observed(jobs), tuple(measurements(jobs)))
    uri = history_uri(config, region)
    document = as_document(jobs, _expected(question, jobs), _remaining(question, jobs, history))
    try:
        write_history(session, uri, history)
    except UserError as error:
        # What was asked for is known all the same.
        return document | {"history": None, "warnings": [f"not kept for later estimates: {error}"]}
    return document | {"history": uri, "warnings": []}


def _remaining(question: Costing, jobs: list[FinishedJob], history: History) -> dict[str, Estimate]:
    """The estimate of what each stage has still to do, at the speed that its jobs showed."""
    assert question.config is not None
    assumed = learned(question.assumed, history.observed)
    names = {stage.name for stage in question.stages}
    found = {}
    for stage in stages_to_price(question.config, history.measured(), rescale_batch=True):
        left = stage.max_steps - max((line.last_step for line in _lines(jobs, stage)), default=0)
        if left > 0 and stage.name in names:
            found[stage.name] = _estimate(question, stage, left, assumed)
    return found


def _expected(question: Costing, jobs: list[FinishedJob]) -> dict[str, Estimate]:
    """Each stage's estimate for the iterations that its jobs did."""
    found = {}
    for stage in question.stages:
        lines = _lines(jobs, stage)
        done = max((line.last_step for line in lines), default=0)
        done -= min((line.first_step for line in lines), default=0)
        if done > 0:
            found[stage.name] = _estimate(question, stage, done, question.assumed)
    return found


def _lines(jobs: list[FinishedJob], stage: CostStage) -> list[Timeline]:
    return [job.timeline for job in jobs if job.stage == stage.name and job.timeline]


def _estimate(
    question: Costing, stage: CostStage, max_steps: int, assumed: Assumptions
) -> Estimate:
    part = replace(stage, max_steps=max_steps)
    return estimate([part], question.purchase, assumed=assumed, prices=question.prices)
