"""What is known about a run at one moment: ``sm_train.Status`` and the document of ``status``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sm_train.entrypoints.records.upload_lag import StorageLag
from sm_train.toolkit.platforms.placed_run import PlacedRun
from sm_train.toolkit.records.stage_state import StageState, State
from sm_train.toolkit.report_html.notebook import data_frame, html_table
from sm_train.toolkit.runs.next_command import next_command
from sm_train.toolkit.runs.run_state import RunState, read_state
from sm_train.toolkit.terminal.formatting import (
    format_duration,
    format_number,
    format_projection,
    format_usd,
)
from sm_train.toolkit.terminal.json_record import record_document

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class JobStatus:
    """A training job of a stage."""

    name: str
    region: str
    status: str
    secondary_status: str
    failure_reason: str | None
    billable_seconds: float


@dataclass(frozen=True)
class IncompleteCheckpoint:
    """A checkpoint's folder that no job resumes from."""

    folder: str
    reason: str


@dataclass(frozen=True)
class StageStatus:
    """The progress of one stage. Unknown values are None.

    ``checkpoint_step`` is the step of the newest complete checkpoint, ``storage_lag`` how far
    storage is behind the checkpoints that the job logged, and ``job`` the name of the live job,
    else of the newest.
    """

    name: str
    state: State
    max_steps: int
    step: int
    checkpoint_step: int | None
    storage_lag: StorageLag | None
    steps_per_second: float | None
    loss: float | None
    remaining_seconds: float | None
    remaining_usd: float | None
    seconds_since_activity: float | None
    effective_share: float | None
    jobs: tuple[JobStatus, ...]
    job: str | None
    incomplete_checkpoints: tuple[IncompleteCheckpoint, ...]

    @property
    def failure_reason(self) -> str | None:
        """SageMaker's reason for the failure of ``job``."""
        return next((job.failure_reason for job in self.jobs if job.name == self.job), None)


@dataclass(frozen=True, repr=False, kw_only=True)
class Status:
    """The state of a run at one moment.

    ``state`` is that of the current stage, "done" if every stage is; ``stage`` is the first one
    that is not done. Dollars are None if a price is unknown: those billed so far, those of what is
    left at the speed that the jobs have shown, and their sum. ``next_command`` is what to run next,
    None if there is nothing to do. ``warnings`` say what endangers the run or wastes money. A local
    run has no region and costs nothing.
    """

    run: str
    region: str | None
    state: State
    stage: str | None
    spent_usd: float | None
    remaining_usd: float | None
    projected_usd: float | None
    next_command: str | None
    stages: tuple[StageStatus, ...]
    warnings: tuple[str, ...] = ()

    @property
    def document(self) -> dict[str, Any]:
        """The document of ``status --json``: these fields."""
        return record_document(self)

    def to_frame(self) -> pd.DataFrame:
        """Return a data frame with one row for each stage.

        Raises:
            Error: pandas is not installed (the extra ``notebook``).
        """
        left_out = ("jobs", "incomplete_checkpoints", "storage_lag")
        rows = [
            {name: value for name, value in vars(stage).items() if name not in left_out}
            | {"failure_reason": stage.failure_reason}
            for stage in self.stages
        ]
        return data_frame(rows)

    def __repr__(self) -> str:
        stage = f", stage {self.stage}" if self.stage else ""
        return f"Status({self.run!r}, {self.state}{stage}, spent {format_usd(self.spent_usd)})"

    def _repr_html_(self) -> str:
        rows = [
            [
                stage.name,
                stage.state,
                f"{stage.step:,} of {stage.max_steps:,}",
                "" if stage.steps_per_second is None else format_number(stage.steps_per_second),
                "" if stage.remaining_seconds is None else format_duration(stage.remaining_seconds),
                stage.job or "",
            ]
            for stage in self.stages
        ]
        notes = [format_projection(self.spent_usd, self.remaining_usd, self.projected_usd)]
        if self.next_command is not None:
            notes.append(f"next: {self.next_command}")
        columns = ("stage", "state", "step", "it/s", "remaining", "job")
        return html_table(columns, rows, caption=self.run, notes=notes)


def read_status(run: PlacedRun) -> Status:
    """Read the status of a run on any platform.

    Raises:
        UserError: what its platform knows cannot be read.
    """
    return status_of(read_state(run))


def status_of(state: RunState) -> Status:
    """Return the status of a run whose state has been read."""
    stage = state.current
    now, left = state.now.timestamp(), state.projection.stages
    return Status(
        run=state.run.name,
        region=state.run.region or None,
        state=stage.state if stage else "done",
        stage=stage.name if stage else None,
        **state.projection.as_dict(),
        next_command=next_command(state.run, stage),
        stages=tuple(_stage_status(stage, now, left[stage.name]) for stage in state.stages),
        warnings=state.warnings,
    )


def _stage_status(stage: StageState, now: float, remaining_usd: float | None) -> StageStatus:
    """Return the status of a stage; ``now`` is in Unix seconds by the clock of its events."""
    job, progress = stage.job, stage.progress
    activity = progress.last_activity
    return StageStatus(
        name=stage.name,
        state=stage.state,
        max_steps=stage.max_steps,
        step=stage.step,
        checkpoint_step=stage.stored.step,
        storage_lag=stage.lag,
        steps_per_second=progress.steps_per_second,
        loss=progress.loss,
        remaining_seconds=stage.remaining_seconds,
        remaining_usd=remaining_usd,
        seconds_since_activity=None if activity is None else max(0.0, now - activity),
        effective_share=stage.effective_share(datetime.fromtimestamp(now, UTC)),
        jobs=tuple(
            JobStatus(
                job.name,
                job.region,
                job.status,
                job.secondary_status,
                job.failure_reason or None,
                job.billable_seconds(datetime.fromtimestamp(now, UTC)),
            )
            for job in stage.jobs
        ),
        job=job.name if job else None,
        incomplete_checkpoints=tuple(
            IncompleteCheckpoint(folder, reason) for folder, reason in stage.stored.skipped
        ),
    )
