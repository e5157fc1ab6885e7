"""A fourth platform in one file: a directory with a JSON file for each job.

``run.json`` is the run file, ``jobs/STAGE-0001.json`` what the platform states about a job,
``jobs/STAGE-0001.log`` its log, and ``jobs/STAGE-0001.stop`` a request to stop it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from sm_train.entrypoints.storage.storage import LocalFolder, Storage
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.platforms.adapters import Adapter
from sm_train.toolkit.platforms.placed_run import JobLogLine, LogOptions, PlacedRun
from sm_train.toolkit.platforms.target import RunPlace, Target
from sm_train.toolkit.records.checkpoints import StoredCheckpoint, local_checkpoints
from sm_train.toolkit.records.job_logs import JobLogs, file_stream, read_events
from sm_train.toolkit.records.live_state import LiveState, fold_events
from sm_train.toolkit.records.run_job import JobPhase, Platform, RunJob, phase_table

PLATFORM = Platform(
    "json",
    "a folder of JSON files",
    phase_table(
        [
            JobPhase("Training", "trains", is_billed=True, source="its JSON file"),
            JobPhase("Done", "ended", is_billed=False, source="its JSON file"),
        ]
    ),
)


@dataclass(frozen=True, kw_only=True)
class JsonRun(PlacedRun):
    config: RunConfig
    folder: Path

    @property
    def platform(self) -> Platform:
        return PLATFORM

    @property
    def place(self) -> str:
        return f"in {self.folder}"

    @property
    def resume_command(self) -> str:
        return f"submit-json {self.folder}"

    def refreshed(self) -> Self:
        return replace(self)

    def jobs(self, now: datetime | None = None) -> list[RunJob]:
        return [self._job(path) for path in sorted(self.folder.glob("jobs/*.json"))]

    def _job(self, path: Path) -> RunJob:
        facts = json.loads(path.read_bytes())
        begin = datetime.fromtimestamp(facts["started"], UTC)
        ended = facts.get("ended")
        return RunJob(
            path.stem,
            self.name,
            path.stem.rpartition("-")[0],
            "Stopping" if path.with_suffix(".stop").exists() and not ended else facts["status"],
            platform=PLATFORM,
            region=self.region,
            created=begin,
            instances=(facts["type"], facts["nodes"]),
            nodes=("algo-1",),
            checkpoint_uri=str(self.folder / "checkpoints" / path.stem.rpartition("-")[0]),
            secondary_status="Done" if ended else "Training",
            started=begin,
            ended=datetime.fromtimestamp(ended, UTC) if ended else None,
        )

    def _log(self, job: RunJob) -> Path:
        return self.folder / "jobs" / f"{job.name}.log"

    def live(self, job: RunJob) -> LiveState:
        return fold_events(("algo-1", event) for event in read_events(self._log(job)))

    def storage(self, job: RunJob) -> Storage:
        return LocalFolder(Path(job.checkpoint_uri))

    def stored(self, stage: StageSection, jobs: Sequence[RunJob]) -> StoredCheckpoint:
        return local_checkpoints(self.folder / "checkpoints" / stage.name)

    def log_lines(self, job: RunJob, options: LogOptions) -> Iterator[JobLogLine]:
        for line in self._log(job).read_text().splitlines():
            yield JobLogLine(None, "algo-1", line)

    def job_logs(self, job: RunJob) -> JobLogs:
        return JobLogs(job.name, job.status, [file_stream(self._log(job))])

    def request_stop(self) -> tuple[RunJob, None]:
        job = self.newest_job()
        self._log(job).with_suffix(".stop").touch()
        return self.refreshed_job(job), None


class _JsonFolders(Adapter):
    def claim(self, path: Path) -> RunPlace | None:
        is_run = (path / "run.json").is_file() and (path / "jobs").is_dir()
        return RunPlace(str(path)) if is_run else None

    def find(self, target: Target, options: dict[str, Any]) -> PlacedRun | None:
        place = None if target.place is None else self.claim(Path(target.place.root))
        return None if place is None else _open(Path(place.root))

    def runs_in(self, place: str, options: dict[str, Any]) -> list[PlacedRun]:
        return [_open(path.parent) for path in sorted(Path(place).glob("*/run.json"))]


def _open(folder: Path) -> JsonRun:
    config = RunConfig.model_validate_json((folder / "run.json").read_bytes())
    return JsonRun(target=str(folder), config=config, region="us-east-1", folder=folder)


ADAPTER = _JsonFolders()
