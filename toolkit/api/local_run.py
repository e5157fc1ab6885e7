"""The result of ``Run.local()``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sm_train.toolkit.api.job import Job
from sm_train.toolkit.submit.train_locally import LocalStage


@dataclass(frozen=True, repr=False)
class LocalRun:
    """A finished local run: its ``folder`` and what each trained stage left."""

    folder: Path
    stages: tuple[LocalStage, ...]

    @property
    def model(self) -> Path | None:
        """The folder of the last stage's model, for :func:`sm_train.sample`; None without one."""
        return self.stages[-1].model

    @property
    def job(self) -> Job:
        """The run as a job: its status, log, metrics, review and diagnosis."""
        return Job(str(self.folder))

    def __repr__(self) -> str:
        names = ", ".join(stage.name for stage in self.stages)
        return f"LocalRun({str(self.folder)!r}, stages {names})"
