"""``sm_train.Job``: a submitted run or job, or a local run, and what can be known about it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.base.errors import JobFailedError
from sm_train.toolkit.base.settings import default_profile
from sm_train.toolkit.base.wings import wing_module

if TYPE_CHECKING:
    from sm_train.toolkit.analysis.diagnose.diagnosis import Diagnosis
    from sm_train.toolkit.analysis.metrics import Metrics
    from sm_train.toolkit.analysis.review.review_model import Review
    from sm_train.toolkit.platforms.placed_run import JobLogLine, PlacedRun
    from sm_train.toolkit.runs.run_status import Status


@dataclass(frozen=True)
class Job:
    """A run or one of its jobs on SageMaker, a run on Kubernetes or Slurm, or a local run.

    ``name`` is the name of a run, of a stage (``RUN--STAGE``) or of a job, a run file, the folder
    of a local run, or the place of a run's checkpoints in S3 or in a folder. A run stands for its
    newest job in :meth:`logs`, and for all of its jobs in :meth:`metrics` and :meth:`review`.
    ``region`` and ``profile`` are for AWS; without them they come from where the command line takes
    them: ``SM_TRAIN_*``, the configuration file, AWS's own configuration.

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
        from sm_train.toolkit.runs.run_status import read_status

        return read_status(self._find())

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
        from sm_train.toolkit.platforms.placed_run import LogOptions

        found = self._find()
        options = LogOptions(since, node, follow, logging.getLogger("sm_train").warning)
        return found.log_lines(found.newest_job(), options)

    def metrics(self) -> Metrics:
        """Return the metrics of the logged steps: loss, it/s, images/s, MFU, learning rate."""
        read = wing_module("sm_train.toolkit.analysis.metrics").read_metrics
        metrics: Metrics = read(self.name, region=self.region, profile=self.profile)
        return metrics

    def review(self, *, html: str | Path | None = None) -> Review:
        """Review how well the time was used, with evidence and suggested fixes.

        Args:
            html: Also write a self-contained page with charts to this file
                (the extra ``report``).

        Returns:
            A review of each job: ``figures``, ``verdicts`` (worst first) and ``charts``. In a
            notebook the verdicts are shown as a table.
        """
        review: Review = wing_module("sm_train.toolkit.analysis.review.build").build_review(
            [self.name],
            region=self.region,
            profile=self.profile,
            run_file=None,
            with_samples=html is not None,
        )
        if html is not None:
            wing_module("sm_train.toolkit.analysis.review.review_page").write_page(
                Path(html), review
            )
        return review

    def diagnose(self) -> Diagnosis:
        """Find out why the job failed: cause, first failing rank, evidence and suggested fix."""
        module = wing_module("sm_train.toolkit.analysis.diagnose.diagnose_target")
        diagnosis: Diagnosis = module.diagnose_targets([self.name], self._options)
        return diagnosis

    def stop(self, *, wait: bool = False) -> str:
        """Stop the run's live job after it has saved a checkpoint.

        SageMaker grants 120 seconds for the checkpoint. No watcher restarts the run. A local run
        stops as with Ctrl-C; nodes of a cluster read the request with their next heartbeat.

        Args:
            wait: Return when the job has ended.

        Returns:
            SageMaker's status of the job: "Stopping", or "Stopped" at the end.

        Raises:
            PreflightError: a local run trains on another machine or in another program's thread.
        """
        from sm_train.toolkit.runs.stop import stop

        result = stop(self._find(), wait=wait)
        if result.warning is not None:
            warnings.warn(result.warning, stacklevel=2)
        return result.status

    def wait(self) -> str:
        """Wait until the job, or the run's newest job, has ended.

        Returns:
            SageMaker's status of the job: "Completed" or "Stopped".

        Raises:
            JobFailedError: the job failed; :meth:`diagnose` tells why.
        """
        from sm_train.toolkit.runs.stop import ended

        job = ended(self._find())
        if job.status == "Failed":
            reason = job.failure_reason or "failed; diagnose() returns the cause"
            raise JobFailedError(f"{job.name}: {reason}")
        return job.status

    @property
    def _options(self) -> dict[str, Any]:
        return {"region": self.region, "profile": self.profile}

    def _find(self) -> PlacedRun:
        from sm_train.toolkit.platforms.find_run import find_run

        return find_run(self.name, self._options)
