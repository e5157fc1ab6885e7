"""The result of ``Job.status()``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.report_html.notebook import data_frame, html_table
from sm_train.toolkit.runs.status_view import RunStatus
from sm_train.toolkit.terminal.formatting import (
    format_duration,
    format_number,
    format_projection,
    format_usd,
)

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class StageProgress:
    """The progress of one stage. Unknown values are None.

    ``state`` is waiting, starting, training, stalled, stopping, stopped, failed or done.
    ``checkpoint_step`` is the step of the newest complete checkpoint, ``job`` the newest job's
    name and ``failure_reason`` SageMaker's.
    """

    name: str
    state: str
    step: int
    max_steps: int
    checkpoint_step: int | None
    steps_per_second: float | None
    loss: float | None
    remaining_seconds: float | None
    job: str | None
    failure_reason: str | None


@dataclass(frozen=True, repr=False)
class Status:
    """The state of a run at one moment.

    ``document`` is the document of ``status --json``. Dollars are None if a price is unknown.
    """

    document: RunStatus

    @property
    def run(self) -> str:
        """The run's name."""
        return self.document["run"]

    @property
    def state(self) -> str:
        """The state of the current stage; "done" if every stage is."""
        return self.document["state"]

    @property
    def stage(self) -> str | None:
        """The first stage that is not done; None if all are."""
        return self.document["stage"]

    @property
    def spent_usd(self) -> float | None:
        """Dollars billed so far."""
        return self.document["spent_usd"]

    @property
    def remaining_usd(self) -> float | None:
        """Dollars of what is left, at the speed that the jobs have shown."""
        return self.document["remaining_usd"]

    @property
    def projected_usd(self) -> float | None:
        """Dollars at the end of the run: spent and remaining."""
        return self.document["projected_usd"]

    @property
    def next_command(self) -> str | None:
        """The command to run next; None if the run is done."""
        return self.document["next_command"]

    @property
    def stages(self) -> tuple[StageProgress, ...]:
        """The stages in order."""
        return tuple(
            StageProgress(
                name=one["name"],
                state=one["state"],
                step=one["step"],
                max_steps=one["max_steps"],
                checkpoint_step=one["checkpoint_step"],
                steps_per_second=one["steps_per_second"],
                loss=one["loss"],
                remaining_seconds=one["remaining_seconds"],
                job=one["job"],
                failure_reason=next(
                    (job["failure_reason"] for job in one["jobs"] if job["name"] == one["job"]),
                    None,
                ),
            )
            for one in self.document["stages"]
        )

    def to_frame(self) -> pd.DataFrame:
        """Return a data frame with one row for each stage.

        Raises:
            Error: pandas is not installed (``pip install "sm-train[notebook]"``).
        """
        rows: list[dict[str, Any]] = [vars(stage) for stage in self.stages]
        return data_frame(rows)

    def __repr__(self) -> str:
        stage = f", stage {self.stage}" if self.stage else ""
        return f"Status({self.run!r}, {self.state}{stage}, spent {format_usd(self.spent_usd)})"

    def _repr_html_(self) -> str:
        rows = [
            [
                one.name,
                one.state,
                f"{one.step:,} of {one.max_steps:,}",
                "" if one.steps_per_second is None else format_number(one.steps_per_second),
                "" if one.remaining_seconds is None else format_duration(one.remaining_seconds),
                one.job or "",
            ]
            for one in self.stages
        ]
        notes = [format_projection(self.spent_usd, self.remaining_usd, self.projected_usd)]
        if self.next_command is not None:
            notes.append(f"next: {self.next_command}")
        columns = ("stage", "state", "step", "it/s", "remaining", "job")
        return html_table(columns, rows, caption=self.run, notes=notes)
