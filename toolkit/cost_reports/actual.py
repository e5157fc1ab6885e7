"""The actual cost of a run's jobs compared with the estimate, and stored for later estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from sm_train.cost.actual_cost import FinishedJob, as_document, measurements, observed
from sm_train.cost.estimate import Estimate, estimate
from sm_train.cost.stage import CostStage
from sm_train.cost.timeline import Timeline
from sm_train.toolkit.clusters.cluster_logs import rank_0_events
from sm_train.toolkit.clusters.cluster_run import ClusterRun
from sm_train.toolkit.costing.estimate_inputs import EstimateInputs
from sm_train.toolkit.costing.history import History, history_uri, write_history
from sm_train.toolkit.diagnose.targets import diagnose_attempts
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.job_events import job_events, read_jobs
from sm_train.toolkit.jobs.training_job import TrainingJob, jobs_of_run
from sm_train.toolkit.runs.cluster_state import read_cluster_state
from sm_train.toolkit.runs.run_state import read_state
from sm_train.toolkit.targets.resolved_run import run_of_config
from sm_train.toolkit.watch.controller import failed_on_infrastructure

if TYPE_CHECKING:
    import boto3


def actual_cost(
    inputs: EstimateInputs,
    session: boto3.Session,
    training_jobs: Sequence[TrainingJob] | None,
) -> dict[str, Any]:
    """Return the document of ``cost --actual``, and store what the jobs showed in S3.

    ``training_jobs`` are the run's, None if they have not been listed.

    Raises:
        UserError: the run has no job yet, or AWS refuses a request.
    """
    config, region = inputs.config, inputs.purchase.region
    assert config is not None
    if training_jobs is None:
        training_jobs = jobs_of_run(session, config.name)
    if not training_jobs:
        raise UserError(f"--actual: no training job of run {config.name} in {region}; submit one")
    jobs = read_jobs(
        training_jobs,
        lambda job: job_events(session, job.name, job.region),
        inputs.prices,
        datetime.now(UTC),
        partial(failed_on_infrastructure, session),
    )
    history = History(observed(jobs), tuple(measurements(jobs)))
    uri = history_uri(config, region)
    stored: dict[str, Any]
    try:
        write_history(session, uri, history)
        stored = {"history": uri, "warnings": []}
    except UserError as error:
        # The comparison itself does not depend on the upload.
        stored = {"history": None, "warnings": [f"not stored for later estimates: {error}"]}
    names = {stage.name for stage in inputs.stages}
    # After the upload: the projection rests on what is stored.
    projection = read_state(session, run_of_config(session, config, region)).projection
    left = {name: usd for name, usd in projection.stages.items() if name in names}
    return as_document(jobs, _expected(inputs, jobs), left) | stored


def actual_cost_on_cluster(inputs: EstimateInputs, run: ClusterRun) -> dict[str, Any]:
    """Return the document of ``cost --actual`` for a run on a cluster.

    The hours are those in which its nodes sent heartbeats, the price is that of the run's machine.
    Nothing is stored: other runs may not share the place of its checkpoints.

    Raises:
        UserError: no node has stored a record, or the place cannot be read.
    """
    now = datetime.now(UTC)
    attempts = run.newest_jobs(now.timestamp())
    jobs = read_jobs(
        attempts,
        partial(rank_0_events, run),
        inputs.prices,
        now,
        lambda job: bool(diagnose_attempts(run, job.name).retryable),
    )
    names = {stage.name for stage in inputs.stages}
    projection = read_cluster_state(run).projection
    left = {name: usd for name, usd in projection.stages.items() if name in names}
    document = as_document(jobs, _expected(inputs, jobs), left)
    return document | {"history": None, "warnings": []}


def _expected(inputs: EstimateInputs, jobs: list[FinishedJob]) -> dict[str, Estimate]:
    """Estimate each stage for the steps that its jobs ran."""
    estimates = {}
    for stage in inputs.stages:
        timelines = _timelines(jobs, stage)
        done = max((timeline.last_step for timeline in timelines), default=0)
        done -= min((timeline.first_step for timeline in timelines), default=0)
        if done > 0:
            shortened = replace(stage, max_steps=done)
            estimates[stage.name] = estimate(
                [shortened], inputs.purchase, assumed=inputs.assumptions, prices=inputs.prices
            )
    return estimates


def _timelines(jobs: list[FinishedJob], stage: CostStage) -> list[Timeline]:
    return [job.timeline for job in jobs if job.stage == stage.name and job.timeline]
