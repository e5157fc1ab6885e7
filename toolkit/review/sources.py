"""Where a review reads: CloudWatch for a run or a job, a local run's folder, or saved logs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.aws.cloudwatch_logs import search
from sm_train.toolkit.diagnose.hits import LogStream
from sm_train.toolkit.diagnose.log_files import log_files
from sm_train.toolkit.diagnose.log_scanner import whole_lines
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.events import LOG_NAME
from sm_train.toolkit.jobs.training_job import TrainingJob, jobs_of_run
from sm_train.toolkit.runs.resolve import resolve_run

_PATTERN = '?"SMT " ?"NCCL version" ?"NET/" ?"Using network"'
"""CloudWatch's filter for the lines that are wanted: of a hundred lines of NCCL's about one is."""


@dataclass(frozen=True)
class ReviewSource:
    """One job to review, or one stage of a local run.

    ``blocks`` gives (the node's name, whole lines); ``job`` and ``config`` are None for what lies
    here.
    """

    name: str
    blocks: Callable[[], Iterator[tuple[str | None, bytes]]]
    job: TrainingJob | None = None
    config: RunConfig | None = None


def here(path: Path) -> list[ReviewSource]:
    """What lies at ``path``: each stage of a local run, or saved logs of one job.

    Raises:
        UserError: nothing is there, or no log.
    """
    stages = sorted(path.rglob(LOG_NAME), key=lambda log: log.stat().st_mtime)
    if stages:
        return [ReviewSource(str(log.parent), _reader(log_files([log]))) for log in stages]
    return [ReviewSource(str(path), _reader(log_files([path])))]


def on_sagemaker(session: Any, target: str, region: str) -> list[ReviewSource]:
    """The job ``target``, or all jobs of the run that it names.

    Raises:
        UserError: there is none, or AWS refuses.
    """
    run = resolve_run(session, target, region)
    jobs = jobs_of_run(session, run.name)
    jobs = [job for job in jobs if job.name == target] or jobs
    if not jobs:
        raise UserError(f"{target}: nothing was submitted yet; `sm-train submit` it first")
    return [ReviewSource(job.name, _follower(session, job), job, run.config) for job in jobs]


def _follower(session: Any, job: TrainingJob) -> Callable[[], Iterator[tuple[str | None, bytes]]]:
    def blocks() -> Iterator[tuple[str | None, bytes]]:
        for said in search(session, f"{job.name}/", region=job.region, pattern=_PATTERN):
            yield said.node, said.message.encode("utf-8", "replace")

    return blocks


def _reader(streams: Iterable[LogStream]) -> Callable[[], Iterator[tuple[str | None, bytes]]]:
    def blocks() -> Iterator[tuple[str | None, bytes]]:
        for stream in streams:
            for block in whole_lines(stream.blocks()):
                yield stream.node, block

    return blocks
