"""``sm_train.Job``: a submitted run or job, or a local run, and what can be known about it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.errors import JobFailedError
from sm_train.toolkit.jobs.local_folder import find_local_run
from sm_train.toolkit.settings import default_profile

if TYPE_CHECKING:
    from sm_train.toolkit.api.metrics import Metrics
    from sm_train.toolkit.api.status import Status
    from sm_train.toolkit.diagnose.diagnosis import Diagnosis
    from sm_train.toolkit.jobs.local_folder import LocalRunFolder
    from sm_train.toolkit.review.review_model import Review


@dataclass(frozen=True)
class JobLogLine:
    """A line of a job's log: ``time`` in Unix seconds, ``node`` such as ``algo-1``.

    Both are None for a line of a local run that is not an event: its log is that of all nodes.
    """

    time: float | None
    node: str | None
    message: str


@dataclass(frozen=True)
class Job:
    """A run or one of its jobs on SageMaker, or a local run.

    ``name`` is the name of a run, of a stage (``RUN--STAGE``) or of a job, a run file, or the
    folder of a local run. A run stands
    for its newest job in :meth:`logs`, and for all of its jobs in :meth:`metrics` and
    :meth:`review`. ``region`` and ``profile`` are for AWS; without them they come from where the
    command line takes them: ``SM_TRAIN_*``, the configuration file, AWS's own configuration.

    Every method raises :class:`sm_train.Error`: a UsageError if there is no such run or job, an
    AccessError without valid credentials.
    """

    name: str
    region: str | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "profile", self.profile or default_profile())

    def status(self) -> Status:
        """Return the state of the run: its stages, its cost so far and its projected cost.

        A local run has no region and costs nothing.
        """
        from sm_train.toolkit.api.status import Status
        from sm_train.toolkit.runs.run_state import read_state
        from sm_train.toolkit.runs.status_view import as_document
        from sm_train.toolkit.targets.resolved_run import open_run

        if (local := self._local) is not None:
            from sm_train.toolkit.runs.local_view import local_document

            return Status(local_document(local))
        session, run = open_run(self.name, self._options)
        return Status(as_document(read_state(session, run)))

    def logs(
        self, *, follow: bool = False, node: int | None = None, since: float = 0.0
    ) -> Iterator[JobLogLine]:
        """Return the log lines of the job from all nodes, in order of time.

        Args:
            follow: Wait for new lines until the job has ended.
            node: Only the lines of the node ``algo-N``, counted from 1. Not for local runs.
            since: Only lines since this time, in Unix seconds. Not for local runs.

        Returns:
            An iterator of lines with ``time`` (Unix seconds), ``node`` and ``message``. Messages
            that begin with ``SMT`` are machine-readable events.
        """
        if (local := self._local) is not None:
            from sm_train.toolkit.runs.local_view import reject_options

            reject_options(local, node=node, since=since)
            return _local_lines(local, follow=follow)
        from sm_train.toolkit.runs.logs import read_logs
        from sm_train.toolkit.targets.resolved_run import open_run

        session, run = open_run(self.name, self._options)
        entries = read_logs(session, run, since=since, node=node, follow=follow)
        return (JobLogLine(one.time, one.node, one.message) for one in entries)

    def metrics(self) -> Metrics:
        """Return the metrics of the logged steps: loss, it/s, images/s, MFU, learning rate."""
        from sm_train.toolkit.api.metrics import read_metrics

        return read_metrics(self.name, region=self.region, profile=self.profile)

    def review(self, *, html: str | Path | None = None) -> Review:
        """Review how well the time was used, with evidence and suggested fixes.

        Args:
            html: Also write a self-contained page with charts to this file
                (``pip install "sm-train[report]"``).

        Returns:
            A review of each job: ``figures``, ``verdicts`` (worst first) and ``charts``. In a
            notebook the verdicts are shown as a table.
        """
        from sm_train.toolkit.review.build import build_review
        from sm_train.toolkit.review.document import as_document

        review = build_review(
            [self.name],
            region=self.region,
            profile=self.profile,
            run_file=None,
            with_samples=html is not None,
        )
        if html is not None:
            from sm_train.toolkit.review.review_page import write_page

            write_page(Path(html), as_document(review, with_images=True))
        return review

    def diagnose(self) -> Diagnosis:
        """Find out why the job failed: cause, first failing rank, evidence and suggested fix."""
        from sm_train.toolkit.diagnose.targets import diagnose_targets

        return diagnose_targets([self.name], self._options)

    def stop(self, *, wait: bool = False) -> str:
        """Stop the run's live job after it has saved a checkpoint.

        SageMaker grants 120 seconds for the checkpoint. No watcher restarts the run. A local run
        stops as with Ctrl-C.

        Args:
            wait: Return when the job has ended.

        Returns:
            SageMaker's status of the job: "Stopping", or "Stopped" at the end.

        Raises:
            PreflightError: a local run trains on another machine or in another program's thread.
        """
        if (local := self._local) is not None:
            from sm_train.toolkit.runs.local_view import stop_local

            return stop_local(local, wait=wait)
        from sm_train.toolkit.runs.stop import stop_run
        from sm_train.toolkit.targets.resolved_run import open_run

        session, run = open_run(self.name, self._options)
        result = stop_run(session, run, wait=wait)
        if result.warning is not None:
            warnings.warn(result.warning, stacklevel=2)
        return result.job.status

    def wait(self) -> str:
        """Wait until the job, or the run's newest job, has ended.

        Returns:
            SageMaker's status of the job: "Completed" or "Stopped".

        Raises:
            JobFailedError: the job failed; :meth:`diagnose` tells why.
        """
        if (local := self._local) is not None:
            return _wait_for_local(local)
        from sm_train.toolkit.runs.stop import wait_for_end
        from sm_train.toolkit.targets.resolved_run import newest_job, open_run

        session, run = open_run(self.name, self._options)
        job = wait_for_end(session, newest_job(session, run))
        if job.status == "Failed":
            raise JobFailedError(f"{job.name}: {job.failure_reason or 'failed without a reason'}")
        return job.status

    @property
    def _options(self) -> dict[str, Any]:
        return {"region": self.region, "profile": self.profile}

    @property
    def _local(self) -> LocalRunFolder | None:
        return find_local_run(self.name)


def _local_lines(run: LocalRunFolder, *, follow: bool) -> Iterator[JobLogLine]:
    from sm_train.toolkit.jobs.events import parse_event
    from sm_train.toolkit.runs.local_view import log_lines

    for line in log_lines(run, follow=follow):
        message, event = line.rstrip("\n"), parse_event(line)
        if event is None:
            yield JobLogLine(None, None, message)
        else:
            yield JobLogLine(event["time"], f"algo-{event['node'] + 1}", message)


def _wait_for_local(run: LocalRunFolder) -> str:
    from sm_train.toolkit.runs.local_view import local_job_status

    run.wait()
    status = local_job_status(run)
    if status == "Failed":
        raise JobFailedError(f"{run.target}: failed; diagnose() returns the cause")
    return status
