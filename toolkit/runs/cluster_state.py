"""Reads the state of a run on a cluster: stages, cost and what endangers it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from sm_train.entrypoints.job_records.attempts import clock_findings, named
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.clusters.cluster_job import ClusterJob
from sm_train.toolkit.clusters.cluster_logs import read_live
from sm_train.toolkit.clusters.cluster_run import ClusterRun
from sm_train.toolkit.costing.projection import project
from sm_train.toolkit.jobs.live_events import lag_of, progress_of, shown_speed
from sm_train.toolkit.jobs.live_state import LiveState
from sm_train.toolkit.jobs.stage_state import StageState, current, stage_state
from sm_train.toolkit.runs.run_state import RunState


def read_cluster_state(run: ClusterRun) -> RunState:
    """Read the state of the run, with the newest events of each stage's newest attempt.

    Raises:
        UserError: the place cannot be read.
    """
    now = datetime.now(UTC)
    stages, live = [], {}
    for stage in run.config.stages:
        jobs = run.jobs(stage.name, now.timestamp())
        live[stage.name] = read_live(run, jobs[-1]) if jobs else LiveState()
        stages.append(_stage(run, stage, jobs, live[stage.name], now))
    unfinished = current(stages)
    return RunState(
        run,
        tuple(stages),
        project(run.config, run.region, stages, now),
        now,
        live[unfinished.name] if unfinished else LiveState(),
        tuple(node_warnings(stages, now)),
    )


def _stage(
    run: ClusterRun,
    stage: StageSection,
    jobs: list[ClusterJob],
    live: LiveState,
    now: datetime,
) -> StageState:
    stored = run.stored(stage.name)
    state = stage_state(
        stage.name,
        stage.max_steps,
        jobs,
        stored,
        progress_of(live),
        now=now,
        stall_after=run.config.heartbeat.max_timeout,
        own_script=run.config.entry is not None,
    )
    shown = shown_speed(jobs, state.progress, partial(read_live, run))
    lag = lag_of(live, stored.step, run.config.checkpoint.every_steps, now.timestamp())
    return replace(state, shown=shown, lag=lag)


def node_warnings(stages: Sequence[StageState], now: datetime) -> list[str]:
    """Return warnings of live attempts: nodes without heartbeats, and clocks that are wrong."""
    warnings = []
    for stage in stages:
        job = stage.jobs[-1] if stage.jobs else None
        if isinstance(job, ClusterJob) and job.live:
            lost = [start for start in job.starts if start.is_lost(now.timestamp())]
            if lost:
                minutes = (now.timestamp() - max(start.seen for start in lost)) / 60
                warnings.append(f"no heartbeat of {named(lost)} for {minutes:.0f} minutes")
            warnings += clock_findings(job.starts)
    return warnings
