"""Starts the job of a short run, waits for its end, and reads its events."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.planning.price_table import price_table
from sm_train.toolkit.planning.spent import job_usd
from sm_train.toolkit.records.job_logs import Event, cause_of, job_events
from sm_train.toolkit.records.run_job import RunJob
from sm_train.toolkit.records.training_job import job_logs, jobs_of_run, refresh
from sm_train.toolkit.submit.planned_job import plan_job, start_planned
from sm_train.toolkit.submit.run_bundle import bundle_of, commit_of
from sm_train.toolkit.submit.submission import prepare
from sm_train.toolkit.submit.submit import session_for_jobs
from sm_train.toolkit.terminal.confirmation import ask
from sm_train.toolkit.terminal.console import bytes_bar, note, write_line
from sm_train.toolkit.terminal.formatting import format_days, format_usd

if TYPE_CHECKING:
    import boto3

T = TypeVar("T")

POLL_SECONDS = 10.0

_LOG_ATTEMPTS = 6
"""Times that a completed job's log is read until its end is there: CloudWatch is late."""


@dataclass(frozen=True)
class ShortJobs:
    """The jobs of short runs in ``region``; ``base`` is the folder of the run file."""

    session: boto3.Session
    region: str
    base: Path
    profile: str | None

    @classmethod
    def open(cls, config: RunConfig, base: Path, region: str, profile: str | None) -> ShortJobs:
        """Open a session.

        Raises:
            UserError: the role, credentials or a bucket is missing.
        """
        session, _ = session_for_jobs(config, profile, region)
        return cls(session, region, base, profile)

    def start(self, run: RunConfig, cause: str) -> RunJob:
        """Start the only stage of a short run as `submit` does, from its newest checkpoint.

        Raises:
            UserError: something is missing, or AWS returns an error.
        """
        [stage] = run.stages
        bundle, commit = bundle_of(run, self.base), commit_of(self.base)
        submission = prepare(run, stage.name, bundle, self.region, datetime.now(), commit)
        # A session compares every request that it sends with the one of its first trainer.
        session, bucket = session_for_jobs(run, self.profile, self.region)
        planned = plan_job(submission, session, bucket, cause=cause, auto_advance=False)
        with bytes_bar(f"copying to {self.region}") as progress:
            name = start_planned(planned, progress)
        return next(job for job in jobs_of_run(self.session, run.name) if job.name == name)

    def wait(
        self,
        job: RunJob,
        on_interrupt: str,
        read: Callable[[], RunJob] | None = None,
    ) -> RunJob:
        """Wait for the end of a job and report each change of its status.

        Ctrl-C leaves it running; ``on_interrupt`` is a sentence about how to continue or stop it.
        ``read`` returns a job that belongs to no stage as it is now.
        """
        note(f"Following {job.name}; Ctrl-C leaves it running")
        try:
            return poll(
                read or (lambda: refresh(self.session, job)),
                lambda now: not now.live,
                lambda now: now.secondary_status or now.status,
                self._describe,
                note,
            )
        except KeyboardInterrupt:
            limit = (
                "" if job.max_runtime is None else f", for at most {format_days(job.max_runtime)}"
            )
            note(f"{job.name} keeps running and is billed{limit}. {on_interrupt}")
            raise

    def _describe(self, job: RunJob) -> str:
        seconds = job.billable_seconds(datetime.now(UTC))
        spent = format_usd(job_usd(job, price_table(), seconds))
        status = job.secondary_status or job.status
        return f"{job.name}: {status}, {format_days(seconds)} billed, {spent}"

    def events(self, job: RunJob, last: str = "end") -> list[Event]:
        """Return the events of rank 0; those of a completed job up to the kind ``last``, which may
        come late.
        """
        for attempt in range(_LOG_ATTEMPTS):
            if attempt:
                time.sleep(POLL_SECONDS)
            events = list(job_events(self.session, job.name, job.region))
            if job.status != "Completed" or any(event["kind"] == last for event in events):
                break
        return events

    def failure(self, job: RunJob) -> str:
        """Return why a job failed, and what to do."""
        cause, action = job.failure_reason or "no reason given", ""
        with contextlib.suppress(UserError):
            if found := cause_of(job_logs(self.session, job.name)):
                cause = f"{found.title} ({found.cause})"
                action = f"; {found.action}" if found.action else ""
        return f"{job.name}: failed: {cause}{action}; `sm-train diagnose {job.name}` shows more"


def confirm(price_line: str, *, yes: bool) -> None:
    """Show what short jobs cost, and ask unless ``yes``.

    Raises:
        UserError: the user did not confirm.
    """
    write_line(price_line, err=True)
    if not yes:
        ask("Start it?")


def poll(
    read: Callable[[], T],
    is_over: Callable[[T], bool],
    state: Callable[[T], str],
    describe: Callable[[T], str],
    report: Callable[[str], None],
    seconds: float = POLL_SECONDS,
) -> T:
    """Read a job until ``is_over`` is true of it; report it whenever its ``state`` changes."""
    reported = None
    while True:
        job = read()
        if (current := state(job)) != reported:
            report(describe(job))
            reported = current
        if is_over(job):
            return job
        time.sleep(seconds)
