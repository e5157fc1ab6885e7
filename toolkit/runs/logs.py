"""Reads the log of a run's job, or of a local run, once or continuously."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.common.events import PREFIX
from sm_train.toolkit.aws.cloudwatch_logs import search
from sm_train.toolkit.clusters.cluster_logs import LogReader, follow_lines
from sm_train.toolkit.clusters.cluster_run import ClusterRun
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.event_lines import LOG_NAME, parse_event
from sm_train.toolkit.jobs.local_folder import LocalRunFolder
from sm_train.toolkit.jobs.log_tail import follow_log, streams_of
from sm_train.toolkit.targets.resolved_run import FoundRun, newest_job
from sm_train.toolkit.terminal.printable import printable

_LOGGER = logging.getLogger("sm_train")
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class JobLogLine:
    """A line of a job's log: ``time`` in Unix seconds, ``node`` such as ``algo-1``.

    Both are None for a line of a local run that is not an event: its log is that of all nodes.
    """

    time: float | None
    node: str | None
    message: str


def read_logs(
    run: FoundRun,
    *,
    since: float = 0.0,
    node: int | None = None,
    follow: bool = False,
    on_error: Callable[[str], None] = _LOGGER.warning,
) -> Iterator[JobLogLine]:
    """Return the lines of the job that the user named, or of the newest, since a Unix time.

    Of a local run they are those of the newest stage, or of the one that the user named. Lines of
    a cluster have the time of the last event before them.
    ``on_error`` is called with each failed poll of ``follow``.

    Raises:
        UserError: the run has no job, AWS returns an error, or ``since`` or ``node`` are given for
            a local run.
    """
    if isinstance(run, LocalRunFolder):
        reject_options(run, node=node, since=since)
        return _local_lines(run, follow=follow)
    if isinstance(run, ClusterRun):
        return _cluster_lines(run, node=node, since=since, follow=follow)
    job = newest_job(run.session, run.run)
    if follow:
        entries = follow_log(run.session, job, since, on_error, node=node)
    else:
        entries = iter(search(run.session, streams_of(job, node), region=job.region, since=since))
    return (JobLogLine(entry.time, entry.node, entry.message) for entry in entries)


def _cluster_lines(
    run: ClusterRun, *, node: int | None, since: float, follow: bool
) -> Iterator[JobLogLine]:
    job = run.newest_jobs(time.time())[-1]
    if follow:
        lines = follow_lines(run, job, node=node, since=since)
    else:
        lines = LogReader(run, node=node, since=since).poll(job)
    return (JobLogLine(line.time, line.node, line.message) for line in lines)


def reject_options(run: LocalRunFolder | ClusterRun, **options: object) -> None:
    """Refuse options that apply to jobs on SageMaker only.

    Raises:
        UserError: one of them is given.
    """
    for name, value in options.items():
        if value:
            kind = "a local run, with one log of all nodes"
            if isinstance(run, ClusterRun):
                kind = f"a run on {run.platform}"
            raise UserError(
                f"--{name.replace('_', '-')}: applies to jobs on SageMaker; {run.target} is {kind}"
            )


def print_line(line: JobLogLine, *, raw: bool, as_json: bool, with_node: bool) -> None:
    """Print a line. Event lines repeat a readable line, so they are skipped unless ``raw``."""
    text = line.message.rstrip("\n")
    if PREFIX + "{" in text and not raw:
        return
    shown = printable(f"{line.node} | {text}" if with_node else text)
    if as_json:
        shown = json.dumps({"time": line.time, "node": line.node, "message": text})
    sys.stdout.write(shown + "\n")
    sys.stdout.flush()


def _local_lines(run: LocalRunFolder, *, follow: bool) -> Iterator[JobLogLine]:
    """Yield the lines; with ``follow`` until the run has ended, also those of later stages."""
    finished: set[Path] = set()
    while True:
        training = follow and run.is_training()
        for stage in run.stages[-1:] if not finished else run.stages:
            if stage not in finished:
                finished.add(stage)
                yield from map(_parse_line, _stage_lines(run, stage, follow=training))
        if not training:
            return
        time.sleep(_POLL_SECONDS)


def _parse_line(line: str) -> JobLogLine:
    message, event = line.rstrip("\n"), parse_event(line)
    if event is None:
        return JobLogLine(None, None, message)
    return JobLogLine(event["time"], f"algo-{event['node'] + 1}", message)


def _stage_lines(run: LocalRunFolder, stage: Path, *, follow: bool) -> Iterator[str]:
    """Yield whole lines; with ``follow`` until the run ends or starts its next stage."""
    with (stage / LOG_NAME).open(encoding="utf-8", errors="replace") as log:
        partial = ""
        while True:
            # Read before the last look at the file, so that no line at the end is missed.
            ended = not follow or not run.is_training() or run.stages[-1] != stage
            while line := log.readline():
                partial += line
                if partial.endswith("\n"):
                    yield partial
                    partial = ""
            if ended:
                if partial:
                    yield partial
                return
            time.sleep(_POLL_SECONDS)
