"""The state of a run's stages: a pure function of jobs, checkpoints and the newest events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from sm_train.entrypoints.records.upload_lag import StorageLag
from sm_train.toolkit.records.checkpoints import StoredCheckpoint
from sm_train.toolkit.records.live_state import Progress, ShownSpeed
from sm_train.toolkit.records.run_job import LOST, RunJob

State = Literal[
    "waiting",
    "starting",
    "training",
    "restarting",
    "stalled",
    "stopping",
    "stopped",
    "failed",
    "lost",
    "no-results",
    "done",
]
"""``stalled``: a live job has been silent for longer than its phase allows.
``lost``: no node of a job on Kubernetes or Slurm sends heartbeats, and none reported its end.
``no-results``: the newest job is completed, and storage holds nothing that it made."""


@dataclass(frozen=True)
class StageState:
    """One stage of the run with its jobs, oldest first.

    ``step`` is the newest one known from checkpoints and events; ``resumes_from`` is that of the
    newest complete checkpoint.
    """

    name: str
    max_steps: int
    state: State
    jobs: tuple[RunJob, ...]
    stored: StoredCheckpoint
    progress: Progress
    shown: ShownSpeed | None = None
    """The newest speed that its jobs have shown."""
    lag: StorageLag | None = None
    """How far storage is behind the checkpoints that the newest job logged; None if it is not."""
    platform: str | None = None
    """The name of the platform that the run is on."""
    not_written: str | None = None
    """How many checkpoints the newest job could not write since the newest complete one, and why;
    None if it could."""

    @property
    def job(self) -> RunJob | None:
        """The live job, else the newest."""
        return live_or_newest(self.jobs)

    @property
    def resumes_from(self) -> int:
        return self.stored.step or 0

    @property
    def other_platform(self) -> str | None:
        """The platform that wrote the newest checkpoint, unless the newest job is on it.

        None also if a training job resumed from that checkpoint: its user has said that the other
        platform's job has ended.
        """
        own = self.jobs[-1].platform.name if self.jobs else self.platform
        resumed = any(job.from_step == self.stored.step for job in self.jobs)
        return None if self.stored.platform == own or resumed else self.stored.platform

    @property
    def step(self) -> int:
        if self.state == "done":
            return self.max_steps
        return max(self.resumes_from, self.progress.step or 0)

    @property
    def measured_speed(self) -> float | None:
        """The newest speed that its jobs have shown, in steps per second."""
        shown = None if self.shown is None else self.shown.steps_per_second
        return self.progress.measured_speed or shown

    def effective_share(self, now: datetime) -> float | None:
        """Return the share of the time that its jobs have run in which they made the steps that
        count; None without a measured speed.

        Start-up, restores, checkpoints, and steps that were lost and made again are the rest.
        """
        ran = sum(
            ((job.ended or now) - job.started).total_seconds()
            for job in self.jobs
            if job.started is not None
        )
        if not self.measured_speed or ran <= 0 or not self.step:
            return None
        return min(1.0, self.step / self.measured_speed / ran)

    @property
    def remaining_seconds(self) -> float | None:
        """Training time left at the newest speed that was measured."""
        remaining = max(0, self.max_steps - self.step)
        speed = self.measured_speed
        return remaining / speed if speed else (0.0 if remaining <= 0 else None)


def stage_state(
    name: str,
    max_steps: int,
    jobs: Sequence[RunJob],
    stored: StoredCheckpoint,
    progress: Progress,
    *,
    now: datetime,
    stall_after: float,
    own_script: bool = False,
) -> StageState:
    """Return the stage's state; ``progress`` is its job's, ``stall_after`` the run file's timeout
    in seconds.

    A stage is done only with evidence: its final model, or a stored checkpoint of at least
    ``max_steps``. A run's own script (``own_script``) may end at any step; evidence is what it
    leaves at the end, or a checkpoint if it logged that nothing stopped it.
    """
    job = live_or_newest(jobs)
    state: State = "waiting"
    if job is not None and job.live:
        state = _live_state(job, stored, progress, now, stall_after)
    elif job is not None and job.status == "Completed":
        state = _completed_state(stored, progress, max_steps, own_script=own_script)
        state = "done" if (job.finished_step or 0) >= max_steps else state
    elif job is not None and job.secondary_status == LOST:
        state = "lost"
    elif job is not None:
        state = "failed" if job.status == "Failed" else "stopped"
    elif stored.final and (own_script or (stored.step or 0) >= max_steps):
        state = "done"  # its jobs have been deleted
    speed = None if job is None else progress.measured_speed
    shown = ShownSpeed(job, speed) if job is not None and speed else None
    return StageState(name, max_steps, state, tuple(jobs), stored, progress, shown)


def _completed_state(
    stored: StoredCheckpoint, progress: Progress, max_steps: int, *, own_script: bool
) -> State:
    """Return the state after SageMaker's ``Completed``, which only says that the program exited
    with 0: a job that gets SIGTERM without a stop request completes early.
    """
    if own_script:
        saved = stored.step is not None and (
            stored.step >= max_steps or progress.ended == _NOT_STOPPED
        )
        is_done = stored.final or stored.output or saved
    else:
        # The final model of fewer steps is that of a shorter stage.
        is_done = stored.final if stored.step is None else stored.step >= max_steps
    if is_done:
        return "done"
    return "no-results" if stored.step is None else "stopped"


_NOT_STOPPED = "done"
"""The reason in the ``end`` event of a program that nothing stopped."""


def live_or_newest(jobs: Sequence[RunJob]) -> RunJob | None:
    """Return the live one of a stage's jobs (oldest first), else the newest."""
    newest = jobs[-1] if jobs else None
    return next((job for job in reversed(jobs) if job.live), newest)


def _live_state(
    job: RunJob, stored: StoredCheckpoint, progress: Progress, now: datetime, stall_after: float
) -> State:
    """Return the state of a live job: what its silence means is a fact of its phase.

    While the platform replaces a machine, or waits for capacity, a job is silent for hours, and it
    remains silent while it restores its checkpoint.
    """
    phase = job.phase
    limit = None if phase.limit is None else max(phase.limit.total_seconds(), stall_after)
    in_phase = job.seconds_in_phase(now) - job.platform.log_delay
    is_overdue = limit is not None and in_phase > limit
    if job.status == "Stopping":
        return "stopping"
    if job.started is None:
        return "starting"
    if progress.last_activity is None:
        if not is_overdue or phase.silence not in ("prepares", "trains"):
            return "starting"
        # Its log may not be readable: what it stores is a sign of life, too.
        return "training" if (stored.step or 0) > (job.from_step or 0) else "stalled"
    if phase.silence in ("waits", "prepares"):
        return "stalled" if is_overdue else "restarting"
    if phase.silence != "trains":
        return "training"
    last_sign = max(progress.last_activity, job.phase_since.timestamp())
    silent = now.timestamp() - last_sign - job.platform.log_delay
    # After its end a program stores its model, for as long as it has to begin to train.
    longest = stall_after if progress.ended is None else limit
    return "stalled" if longest is not None and silent > longest else "training"


def current(stages: Sequence[StageState]) -> StageState | None:
    """Return the first stage that is not done; None if all are."""
    return next((stage for stage in stages if stage.state != "done"), None)
