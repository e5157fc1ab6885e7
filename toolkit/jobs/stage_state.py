"""Where a run is: a pure function of its jobs, its checkpoints and its last words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from sm_train.toolkit.jobs.checkpoints import StoredCheckpoint
from sm_train.toolkit.jobs.live_events import Progress
from sm_train.toolkit.jobs.training_job import TrainingJob

LOG_DELAY_SECONDS = 300.0
"""What CloudWatch and clocks may add to a silence before it counts as the job's own."""

State = Literal[
    "waiting", "starting", "training", "stalled", "stopping", "stopped", "failed", "done"
]


@dataclass(frozen=True)
class StageState:
    """One stage of the run, with its jobs, the oldest first.

    ``step`` is the last that is known of, in a checkpoint or in a job's words; ``resumes_from`` is
    that of the newest whole checkpoint.
    """

    name: str
    max_steps: int
    state: State
    jobs: tuple[TrainingJob, ...]
    stored: StoredCheckpoint
    words: Progress

    @property
    def job(self) -> TrainingJob | None:
        """The one that is live, else the newest."""
        return live_or_newest(self.jobs)

    @property
    def resumes_from(self) -> int:
        return self.stored.step or 0

    @property
    def step(self) -> int:
        if self.state == "done":
            return self.max_steps
        return max(self.resumes_from, self.words.step or 0)

    @property
    def remaining_seconds(self) -> float | None:
        """Training time at the live speed."""
        left = self.max_steps - self.step
        speed = self.words.steps_per_second
        return left / speed if speed else (0.0 if left <= 0 else None)


def stage_state(
    name: str,
    max_steps: int,
    jobs: Sequence[TrainingJob],
    stored: StoredCheckpoint,
    words: Progress,
    *,
    now: datetime,
    stall_after: float,
) -> StageState:
    """``words`` are those of its job; ``stall_after`` is the run file's, in seconds."""
    job = live_or_newest(jobs)
    state: State = "waiting"
    if job is not None and job.live:
        state = _live(job, words, now, stall_after)
    elif job is not None and job.status == "Completed":
        # A job that heard SIGTERM of something else than a stop ends well, and early.
        early = stored.step is not None and stored.step < max_steps
        state = "stopped" if early else "done"
    elif job is not None:
        state = "failed" if job.status == "Failed" else "stopped"
    elif stored.final and (stored.step or 0) >= max_steps:
        state = "done"  # its jobs have been deleted
    return StageState(name, max_steps, state, tuple(jobs), stored, words)


def live_or_newest(jobs: Sequence[TrainingJob]) -> TrainingJob | None:
    """The job that counts of a stage's, which come the oldest first."""
    newest = jobs[-1] if jobs else None
    return next((job for job in reversed(jobs) if job.live), newest)


def _live(job: TrainingJob, words: Progress, now: datetime, stall_after: float) -> State:
    if job.status == "Stopping":
        return "stopping"
    if job.started is None or words.sign is None:
        return "starting"
    silent = now.timestamp() - words.sign
    stalled = silent > stall_after + LOG_DELAY_SECONDS and words.ended is None
    return "stalled" if stalled else "training"


def current(stages: Sequence[StageState]) -> StageState | None:
    """The first stage that is not done; None when all are."""
    return next((stage for stage in stages if stage.state != "done"), None)
