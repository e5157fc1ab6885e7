"""Finds the logs to review: CloudWatch for a run or job, a local run's folder, or saved logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.aws.cloudwatch_logs import search
from sm_train.toolkit.aws.session import session_in_region
from sm_train.toolkit.clusters.cluster_run import ClusterRun
from sm_train.toolkit.diagnose.diagnosis import Diagnosis, diagnose
from sm_train.toolkit.diagnose.job_logs import diagnose_job, log_streams
from sm_train.toolkit.diagnose.log_files import attempts, log_files
from sm_train.toolkit.diagnose.log_scanner import whole_lines
from sm_train.toolkit.diagnose.matches import LogStream
from sm_train.toolkit.diagnose.targets import diagnose_attempts
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.event_lines import LOG_NAME
from sm_train.toolkit.jobs.run_job import RunJob
from sm_train.toolkit.jobs.training_job import jobs_of_run
from sm_train.toolkit.review.sample_images import SampleGrid, local_grids, s3_grids, stored_grids
from sm_train.toolkit.targets.resolved_run import ResolvedRun, RunOnSageMaker

if TYPE_CHECKING:
    import boto3

_FILTER_PATTERN = '?"SMT " ?"NCCL version" ?"NET/" ?"Using network"'
"""CloudWatch's filter for the lines a review uses: events and about 1 % of NCCL's lines."""

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
    run: ResolvedRun | ClusterRun | None = None

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
        _file_blocks(streams),
        lambda: diagnose(last, earlier),
        lambda: local_grids(path),
    )


def sagemaker_sources(found: RunOnSageMaker) -> list[ReviewSource]:
    """Return all jobs of a run, or the job or those of the stage that the user named.

    Raises:
        UserError: there is no such job, or AWS rejects a request.
    """
    session, run = found.session, found.run
    jobs = jobs_of_run(session, run.name)
    jobs = [job for job in jobs if run.is_named(job)]
    if not jobs:
        raise UserError(f"{run.name}: has no jobs yet; run `sm-train submit` first")
    return [
        ReviewSource(
            job.name,
            _cloudwatch_blocks(session, job),
            partial(diagnose_job, session_in_region(session, job.region), job.name),
            partial(s3_grids, session_in_region(session, job.region), job.checkpoint_uri),
            job,
            run,
        )
        for job in jobs
    ]


def cluster_sources(run: ClusterRun) -> list[ReviewSource]:
    """Return the attempts of the stage that the user named, or of all stages.

    Raises:
        UserError: no node has stored a record, or the place cannot be read.
    """
    return [
        ReviewSource(
            job.name,
            _file_blocks(log_streams(run, job)),
            partial(diagnose_attempts, run, job.name),
            partial(stored_grids, run.storage(job.stage)),
            job,
            run,
        )
        for job in run.newest_jobs(time.time())
    ]


def _cloudwatch_blocks(session: boto3.Session, job: RunJob) -> LogBlocks:
    def blocks() -> Iterator[tuple[str | None, bytes]]:
        for entry in search(session, f"{job.name}/", region=job.region, pattern=_FILTER_PATTERN):
            yield entry.node, entry.message.encode("utf-8", "replace")

    return blocks


def _file_blocks(streams: Iterable[LogStream]) -> LogBlocks:
    def blocks() -> Iterator[tuple[str | None, bytes]]:
        for stream in streams:
            for block in whole_lines(stream.blocks()):
                yield stream.node, block

    return blocks
