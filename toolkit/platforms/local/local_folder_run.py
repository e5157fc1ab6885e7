"""A run on this machine: a folder for each stage, with one job."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from sm_train.entrypoints.storage.storage import LocalFolder, Storage
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.base.errors import PreflightError
from sm_train.toolkit.platforms.adapters import Adapter
from sm_train.toolkit.platforms.placed_run import JobLogLine, LogOptions, PlacedRun
from sm_train.toolkit.platforms.target import Kind, RunPlace, Target
from sm_train.toolkit.records.checkpoints import StoredCheckpoint, local_checkpoints
from sm_train.toolkit.records.job_logs import LOG_NAME, JobLogs, file_stream, parse_event
from sm_train.toolkit.records.live_state import LiveState
from sm_train.toolkit.records.local_folder import (
    LocalRunFolder,
    final_model,
    find_local_run,
    finished_step,
    has_failure_file,
    read_live,
)
from sm_train.toolkit.records.run_job import JobPhase, Platform, RunJob, phase_table

_SOURCE = "the lock and the files of its folder (records/local_folder.py)"
_ENDS = ("Completed", "Failed", "Stopped")
LOCAL = Platform(
    "local",
    "this machine",
    phase_table(
        [
            JobPhase(
                "Training",
                "trains",
                is_billed=False,
                source=_SOURCE,
            ),
            *(JobPhase(name, "ended", is_billed=False, source=_SOURCE) for name in _ENDS),
        ]
    ),
    is_paid=False,
)

_POLL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class LocalFolderRun(PlacedRun):
    """A run in a ``folder`` on this machine."""

    folder: LocalRunFolder

    longest_pause: ClassVar[float] = 2.0
    has_log_per_node: ClassVar[bool] = False

    @cached_property
    def config(self) -> RunConfig:  # type: ignore[override]  # read when it is needed
        return self.folder.config()

    @property
    def is_only_place(self) -> bool:
        return True

    # ------------------------------------------------------------------ words

    @property
    def platform(self) -> Platform:
        return LOCAL

    @property
    def kind(self) -> str:
        return "a local run"

    @property
    def place(self) -> str:
        return f"on this machine, in {self.folder.target}"

    @property
    def origin(self) -> str:
        return f"settings of the local run {self.folder.stages[-1]}"

    @property
    def resume_command(self) -> str:
        return self.folder.start_command

    def diagnose_command(self, job: RunJob) -> str:
        return f"sm-train diagnose {shlex.quote(job.name)}"

    # ------------------------------------------------------------------ state

    def refreshed(self) -> Self:
        return replace(self)

    def with_config(self, config: RunConfig) -> Self:
        del config
        return self

    def jobs(self, now: datetime | None = None) -> list[RunJob]:
        del now
        is_training, folders = self.folder.is_training(), LocalRunFolder(self.folder.path).stages
        return [
            self._job(folder, is_live=is_training and folder == folders[-1]) for folder in folders
        ]

    def refreshed_job(self, job: RunJob) -> RunJob:
        """Return the newest job: its process trains one stage after the other."""
        return self.jobs()[-1]

    def _job(self, folder: Path, *, is_live: bool) -> RunJob:
        finished = finished_step(folder, self._max_steps(folder.name))
        status = "InProgress"
        if not is_live:
            ended = "Failed" if has_failure_file(folder) else "Stopped"
            status = ended if finished is None else "Completed"
        bundle = folder / "bundle"  # is absent for a moment when the stage starts again
        begin = _time(bundle if bundle.exists() else folder / LOG_NAME)
        return RunJob(
            str(folder),
            self.folder.path.name,
            folder.name,
            status,
            platform=LOCAL,
            region=self.region,
            created=begin,
            instances=("this machine", 1),
            nodes=tuple(sorted(path.name for path in folder.glob("nodes/*"))),
            checkpoint_uri=str(folder / "checkpoints"),
            secondary_status="Training" if is_live else status,
            started=begin,
            ended=None if is_live else _time(folder / LOG_NAME),
            reported_seconds=0.0,
            finished_step=finished,
        )

    def _max_steps(self, stage: str) -> int:
        """Return the steps of a stage; a damaged run file keeps nobody from stopping the run."""
        try:
            planned = {each.name: each.max_steps for each in self.config.stages}
        except PreflightError:
            planned = {}
        return planned.get(stage, 1)

    def live(self, job: RunJob) -> LiveState:
        return read_live(Path(job.name))

    def storage(self, job: RunJob) -> Storage:
        return LocalFolder(Path(job.checkpoint_uri))

    def stored(self, stage: StageSection, jobs: Sequence[RunJob]) -> StoredCheckpoint:
        folder = self.folder.path / stage.name
        return replace(
            local_checkpoints(folder / "checkpoints"),
            uri=str(folder / "checkpoints"),
            model=final_model(folder),
        )

    # ------------------------------------------------------------------ logs

    def job_logs(self, job: RunJob) -> JobLogs:
        log = Path(job.name) / LOG_NAME
        return JobLogs(job.name, job.status, [file_stream(log)] if log.exists() else [])

    def log_lines(self, job: RunJob, options: LogOptions) -> Iterator[JobLogLine]:
        for name in ("node", "since"):
            if getattr(options, name):
                raise self.not_available(name)
        return self._lines(options)

    def _lines(self, options: LogOptions) -> Iterator[JobLogLine]:
        """Yield the lines; to follow it until the run has ended, also those of later stages."""
        finished: set[Path] = set()
        while True:
            training = options.follow and self.folder.is_training()
            for stage in self.folder.stages[-1:] if not finished else self.folder.stages:
                if stage not in finished:
                    finished.add(stage)
                    yield from map(_parse_line, self._stage_lines(stage, follow=training))
            if not training:
                return
            time.sleep(_POLL_SECONDS)

    def _stage_lines(self, stage: Path, *, follow: bool) -> Iterator[str]:
        """Yield whole lines; with ``follow`` until the run ends or starts its next stage."""
        run = self.folder
        with (stage / LOG_NAME).open(encoding="utf-8", errors="replace") as log:
            partial = ""
            while True:
                # Read before the last look at the file, so that no line at the end is missed.
                ended = not follow or not run.is_training() or run.stages[-1] != stage
                while line := log.readline():
                    partial += line
                    if partial.endswith("\n"):
                        yield partial
                        partial = ""
                if ended:
                    if partial:
                        yield partial
                    return
                time.sleep(_POLL_SECONDS)

    # ------------------------------------------------------------------ actions

    def request_stop(self) -> tuple[RunJob, None]:
        """Make the run's process save a checkpoint and end, as Ctrl-C does."""
        self.folder.interrupt()
        job = self.jobs()[-1]
        return (replace(job, status="Stopping") if job.live else job), None


def _time(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)


def _parse_line(line: str) -> JobLogLine:
    message, event = line.rstrip("\n"), parse_event(line)
    if event is None:
        return JobLogLine(None, None, message)
    return JobLogLine(event["time"], f"algo-{event['node'] + 1}", message)


class _ThisMachine(Adapter):
    """Finds runs in folders on this machine."""

    def claim(self, path: Path) -> RunPlace | None:
        found = find_local_run(path)
        return None if found is None else RunPlace(str(found.path), found.stage, holds_logs=True)

    def find(self, target: Target, options: dict[str, Any]) -> PlacedRun | None:
        del options
        if target.kind is not Kind.RUN_FOLDER or (folder := find_local_run(target.path)) is None:
            return None
        return LocalFolderRun(
            target=str(folder.target), region="", stage=folder.stage, folder=folder
        )


ADAPTER = _ThisMachine()
