"""``sm_train.Job``: a submitted run or job, or a local run, and what can be known about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.errors import JobFailedError, UserError

if TYPE_CHECKING:
    from sm_train.toolkit.api.metrics import Metrics
    from sm_train.toolkit.api.status import Status
    from sm_train.toolkit.aws.cloudwatch_logs import LogEntry
    from sm_train.toolkit.diagnose.diagnosis import Diagnosis
    from sm_train.toolkit.review.model import Review


@dataclass(frozen=True)
class Job:
    """A run or one of its jobs on SageMaker, or a local run.

    ``name`` is the name of a job or a run, a run file, or the folder of a local run. A run stands
    for its newest job in :meth:`logs`, and for all of its jobs in :meth:`metrics` and
    :meth:`review`. ``region`` and ``profile`` are for AWS; without them the environment names them.
    :meth:`metrics`, :meth:`review` and :meth:`diagnose` accept local runs; the others ask AWS.

    Every method raises :class:`sm_train.Error`: a UsageError if there is no such run or job, an
    AccessError without valid credentials.
    """

    name: str
    region: str | None = None
    profile: str | None = None

    def status(self) -> Status:
        """Return the state of the run: its stages, its cost so far and its projected cost."""
        from sm_train.toolkit.api.status import Status
        from sm_train.toolkit.runs.resolve import open_run, read_state
        from sm_train.toolkit.runs.status_view import as_document

        self._require_aws("status")
        session, run = open_run(self.name, self._options)
        return Status(as_document(read_state(session, run)))

    def logs(
        self, *, follow: bool = False, node: int | None = None, since: float = 0.0
    ) -> Iterator[LogEntry]:
        """Return the log lines of the job from all nodes, in order of time.

        Args:
            follow: Wait for new lines until the job has ended.
            node: Only the lines of the node ``algo-N``, counted from 1.
            since: Only lines since this time, in Unix seconds.

        Returns:
            An iterator of entries with ``time`` (Unix seconds), ``node`` and ``message``. Messages
            that begin with ``SMT`` are machine-readable events.
        """
        from sm_train.toolkit.runs.logs import read_logs
        from sm_train.toolkit.runs.resolve import open_run

        self._require_aws("logs")
        session, run = open_run(self.name, self._options)
        return read_logs(session, run, self.name, since=since, node=node, follow=follow)

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
            from sm_train.toolkit.review.page import write_page

            write_page(Path(html), as_document(review, with_images=True))
        return review

    def diagnose(self) -> Diagnosis:
        """Find out why the job failed: cause, first failing rank, evidence and suggested fix."""
        from sm_train.toolkit.diagnose.targets import diagnose_targets

        return diagnose_targets([self.name], region=self.region, profile=self.profile)

    def stop(self, *, wait: bool = False) -> str:
        """Stop the run's live job after it has saved a checkpoint.

        SageMaker grants 120 seconds for the checkpoint. No watcher restarts the run.

        Args:
            wait: Return when the job has ended.

        Returns:
            SageMaker's status of the job: "Stopping", or "Stopped" at the end.
        """
        from sm_train.toolkit.runs.resolve import open_run
        from sm_train.toolkit.runs.stop import stop_run

        self._require_aws("stop")
        session, run = open_run(self.name, self._options)
        return stop_run(session, run, wait=wait).status

    def wait(self) -> str:
        """Wait until the job, or the run's newest job, has ended.

        Returns:
            SageMaker's status of the job: "Completed" or "Stopped".

        Raises:
            JobFailedError: the job failed; :meth:`diagnose` tells why.
        """
        from sm_train.toolkit.runs.resolve import open_run
        from sm_train.toolkit.runs.stop import named_job, wait_for_end

        self._require_aws("wait")
        session, run = open_run(self.name, self._options)
        job = wait_for_end(session, named_job(session, run, self.name))
        if job.status == "Failed":
            raise JobFailedError(f"{job.name}: {job.failure_reason or 'failed without a reason'}")
        return job.status

    @property
    def _options(self) -> dict[str, Any]:
        return {"region": self.region, "profile": self.profile}

    def _require_aws(self, method: str) -> None:
        """Refuse ``method`` of a local run.

        Raises:
            UserError: ``name`` is a folder.
        """
        if Path(self.name).is_dir():
            raise UserError(
                f"{self.name}: is a local run; {method}() needs a job on SageMaker; "
                "metrics(), review() and diagnose() accept local runs"
            )
