"""Measures on this machine with the processes of a local run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.planning.measured_speeds import MeasuredSpeed
from sm_train.toolkit.probes.measuring.measurement_plan import PlannedMeasurement
from sm_train.toolkit.probes.measuring.measurement_result import read_result
from sm_train.toolkit.records.job_logs import read_events
from sm_train.toolkit.records.local_folder import DEFAULT_FOLDER, finished_step
from sm_train.toolkit.submit.run_bundle import bundle_of
from sm_train.toolkit.submit.train_locally import run_locally
from sm_train.toolkit.terminal.console import stderr_console


@dataclass(frozen=True)
class LocalMeasurer:
    """Measures ``stage`` of ``config``, whose run file is in ``base``, on this machine."""

    config: RunConfig
    stage: StageSection
    base: Path

    def folder(self, planned: PlannedMeasurement) -> Path:
        """Return the folder of a measurement's log, below the current folder."""
        return DEFAULT_FOLDER / planned.config.name / planned.stage.name

    def is_done(self, planned: PlannedMeasurement) -> bool:
        """Return whether an earlier command has measured this."""
        return finished_step(self.folder(planned), planned.stage.max_steps) is not None

    def measure(self, planned: PlannedMeasurement) -> MeasuredSpeed:
        """Train the measurement's steps, unless an earlier command has; return their speed.

        Raises:
            UserError: it cannot start, or a process failed.
        """
        folder = self.folder(planned)
        if not self.is_done(planned):
            run_locally(
                planned.config,
                bundle_of(planned.config, self.base),
                base=self.base,
                stage=None,
                nodes=planned.stage.instances,
                processes=1,
                output=folder.parent,
                image=None,
                console=stderr_console(),
            )
        return read_result(
            self.config,
            self.stage,
            planned,
            read_events(folder),
            source="this machine",
            date=f"{datetime.now(UTC):%Y-%m-%d}",
            cost_usd=None,
        )
