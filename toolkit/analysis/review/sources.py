"""Finds the logs to review: those of a run's jobs, a local run's folder, or saved logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.analysis.diagnose.diagnosis import Diagnosis, diagnose, diagnose_logs
from sm_train.toolkit.analysis.diagnose.log_files import log_files
from sm_train.toolkit.analysis.review.sample_images import SampleGrid, local_grids, stored_grids
from sm_train.toolkit.platforms.placed_run import PlacedRun
from sm_train.toolkit.records.job_logs import (
    LOG_NAME,
    LogStream,
    attempts,
    node_blocks,
)
from sm_train.toolkit.records.run_job import RunJob

LogBlocks = Callable[[], Iterator[tuple[str | None, bytes]]]
"""Yields (the node's name, whole lines)."""


@dataclass(frozen=True)
class ReviewSource:
    """One job to review, one attempt on a cluster, or one stage of a local run.

    ``job``, ``run`` and ``config`` are None for local logs.
    """

    name: str
    blocks: LogBlocks
    diagnose: Callable[[], Diagnosis]
    """Reads the complete logs."""
    sample_grids: Callable[[], list[SampleGrid]]
    job: RunJob | None = None
    run: PlacedRun | None = None

    @property
    def config(self) -> RunConfig | None:
        return None if self.run is None else self.run.config


def local_sources(path: Path) -> list[ReviewSource]:
    """Return one source for each stage of a local run, or one for the saved logs of a job.

    Raises:
        UserError: the path does not exist or contains no log.
    """
    stages = sorted(path.rglob(LOG_NAME), key=lambda log: log.stat().st_mtime)
    if stages:
        return [_file_source(log.parent, log_files([log])) for log in stages]
    return [_file_source(path, log_files([path]))]


def _file_source(path: Path, streams: list[LogStream]) -> ReviewSource:
    *earlier, last = attempts(streams)
    return ReviewSource(
        str(path),
        partial(node_blocks, streams),
        lambda: diagnose(last, earlier),
        lambda: local_grids(path),
    )


def run_sources(run: PlacedRun) -> list[ReviewSource]:
    """Return the jobs of a run that the user named, or all.

    Raises:
        UserError: there is none, or what its platform knows cannot be read.
    """
    return [
        ReviewSource(
            job.name,
            partial(run.event_blocks, job),
            partial(_diagnosis, run, job),
            partial(stored_grids, run.storage(job)),
            job,
            run,
        )
        for job in run.named_jobs()
    ]


def _diagnosis(run: PlacedRun, job: RunJob) -> Diagnosis:
    return diagnose_logs(run.job_logs(job))
