"""The actual cost of a run's jobs compared with the estimate, and stored for later estimates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sm_train.cost.actual_cost import FinishedJob, as_document, measurements, observed
from sm_train.cost.estimate import Estimate, estimate
from sm_train.cost.stage import CostStage
from sm_train.cost.timeline import Timeline
from sm_train.toolkit.costing.estimate_inputs import EstimateInputs
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.platforms.placed_run import PlacedRun
from sm_train.toolkit.runs.finished_jobs import read_jobs
from sm_train.toolkit.runs.run_state import read_state


def actual_cost(inputs: EstimateInputs, run: PlacedRun) -> dict[str, Any]:
    """Return the document of ``cost --actual``, and store what the jobs showed next to the run's
    code, if that has a bucket of its own.

    Raises:
        UserError: the run has no job yet, or its platform refuses a request.
    """
    assert inputs.config is not None
    run = run.with_config(inputs.config)
    named = {job.name for job in run.named_jobs()}
    state = read_state(run)
    jobs = read_jobs(run, run.jobs(state.now), inputs.prices, state.now)
    stored = {"history": None, "warnings": []} | _store(run, jobs)
    jobs = [job for job in jobs if job.name in named]
    stages = {stage.name for stage in inputs.stages}
    left = {name: usd for name, usd in state.projection.stages.items() if name in stages}
    return as_document(jobs, _expected(inputs, jobs), left) | stored


def _store(run: PlacedRun, jobs: list[FinishedJob]) -> dict[str, Any]:
    """Store what the jobs showed for later estimates; the comparison does not depend on it."""
    try:
        uri = run.store_history(observed(jobs), measurements(jobs))
    except UserError as error:
        return {"warnings": [f"not stored for later estimates: {error}"]}
    return {"history": uri}


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
