"""Where a canary runs: as real jobs on SageMaker, or on emulated nodes of this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.base.errors import ExitCode
from sm_train.toolkit.planning.spent import usd_per_hour
from sm_train.toolkit.probes.doctor.canary import CanaryJob
from sm_train.toolkit.probes.doctor.canary_run import STAGE
from sm_train.toolkit.probes.short_jobs.short_job import ShortJobs
from sm_train.toolkit.records.checkpoints import (
    local_checkpoints,
    output_keys,
    stored_checkpoints,
    stored_encryption,
)
from sm_train.toolkit.records.job_logs import LOG_NAME, job_events, parse_events
from sm_train.toolkit.records.run_job import RunJob
from sm_train.toolkit.records.training_job import USER, describe_job, refresh, server_time, stop_job

_LOCAL_CHECKPOINT_STEPS = 5
_ARCHIVES = (".tar.gz", ".tgz", ".tar")


class SageMakerPlatform:
    """Jobs on SageMaker, submitted as ``sm-train submit`` does."""

    def __init__(self, jobs: ShortJobs) -> None:
        self._jobs, self._session = jobs, jobs.session
        self._job: RunJob | None = None

    def start(self, config: RunConfig) -> None:
        self._job = self._jobs.start(config, "canary")

    def read(self) -> CanaryJob:
        assert self._job is not None
        job = self._job = refresh(self._session, self._job)
        output = None if job.live else output_keys(self._session, job)
        stored = stored_checkpoints(self._session, job.checkpoint_uri, job.region)
        return CanaryJob(
            name=job.name,
            status=f"{job.status} ({job.secondary_status})" if job.live else job.status,
            reason=job.failure_reason,
            live=job.live,
            events=tuple(job_events(self._session, job.name, job.region)),
            stored=stored,
            encryption=(
                (None, None) if stored.step is None else stored_encryption(self._session, stored)
            ),
            created=job.created.timestamp(),
            started=_timestamp(job.started),
            ended=_timestamp(job.ended),
            phases=_phases(job),
            billable_seconds=None if job.live else job.billable_seconds(server_time(self._session)),
            reported=_reported(describe_job(self._session, job.name, job.region) or {}),
            model_files=None if output is None else len(output),
            model_archives=None if output is None else _count_archives(output),
        )

    def stop(self) -> None:
        job = self._job and refresh(self._session, self._job)
        if job is not None and job.live and job.status != "Stopping":
            stop_job(self._session, job, USER, usd_per_hour=usd_per_hour(job))

    def now(self) -> float:
        return server_time(self._session).timestamp()


_REPORTED = (
    *("TrainingJobStatus", "SecondaryStatus", "CreationTime", "TrainingStartTime"),
    *("TrainingEndTime", "LastModifiedTime", "TrainingTimeInSeconds", "BillableTimeInSeconds"),
)


def _reported(description: Mapping[str, Any]) -> dict[str, str]:
    """Return what DescribeTrainingJob says of times; what it does not say is missing."""
    found = {name: str(description[name]) for name in _REPORTED if name in description}
    phases = description.get("SecondaryStatusTransitions") or ()
    found["SecondaryStatusTransitions"] = "; ".join(
        f"{each['Status']} {each['StartTime']}–{each.get('EndTime', '')}" for each in phases
    )
    return found


def _count_archives(keys: list[str]) -> int:
    return sum(key.endswith(_ARCHIVES) for key in keys)


def _timestamp(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


def _phases(job: RunJob) -> tuple[tuple[str, float], ...]:
    """Return SageMaker's secondary statuses with the seconds that each took."""
    return tuple(
        (name, (until - begin).total_seconds())
        for (name, begin), (_, until) in pairwise(job.phases)
    )


class LocalPlatform:
    """Emulated nodes on this machine, run by ``sm-train submit --local``."""

    def __init__(self, *, base: Path, nodes: int, processes: int, output: Path) -> None:
        """Keep the run's files in ``output``; the run file's folders are relative to ``base``."""
        self._base = base.absolute()
        self._nodes, self._processes, self._output = nodes, processes, output
        self._process: subprocess.Popen[bytes] | None = None
        self._attempt = 0
        self._created = self._ended = 0.0
        self._skipped_lines = 0

    @property
    def _log(self) -> Path:
        return self._output / STAGE / LOG_NAME

    def start(self, config: RunConfig) -> None:
        self._output.mkdir(parents=True, exist_ok=True)
        file = self._output / "canary.yaml"
        document = config.model_dump(mode="json")
        if config.data.local is not None:
            document["data"]["local"] = str(self._base / config.data.local)
        # A GPU of the cluster takes 50 steps within seconds, a CPU within minutes.
        document["checkpoint"]["every_steps"] = _LOCAL_CHECKPOINT_STEPS
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
        self._skipped_lines = len(self._log_lines())
        self._attempt += 1
        self._created, self._ended = time.time(), 0.0
        command = [sys.executable, "-m", "sm_train.toolkit", "submit", str(file), "--local"]
        command += ["--nodes", str(self._nodes), "--processes", str(self._processes)]
        with (self._output / "canary.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--output", str(self._output)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C is for the canary, which stops it
            )

    def read(self) -> CanaryJob:
        assert self._process is not None
        code = self._process.poll()
        if code is not None and not self._ended:
            self._ended = time.time()
        events = tuple(parse_events(self._log_lines()[self._skipped_lines :]))
        reason = ""
        if code not in (None, ExitCode.OK, ExitCode.TERMINATED):
            reason = f"exit code {code}: see {self._output / 'canary.log'}"
        model = self._output / STAGE / "nodes" / "algo-1" / "model"
        files = [path for path in model.rglob("*") if path.is_file()] if code is not None else []
        return CanaryJob(
            name=f"local-{self._attempt:04d}",
            status=_local_status(code),
            reason=reason,
            live=code is None,
            events=events,
            stored=local_checkpoints(self._output / STAGE / "checkpoints"),
            created=self._created,
            started=self._created,
            ended=self._ended or None,
            model_files=len(files),
            model_archives=sum(path.name.endswith(_ARCHIVES) for path in files),
        )

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def now(self) -> float:
        return time.time()

    def _log_lines(self) -> list[str]:
        if not self._log.exists():
            return []
        return self._log.read_text(encoding="utf-8", errors="replace").splitlines()


def _local_status(code: int | None) -> str:
    if code is None:
        return "InProgress"
    if code == ExitCode.OK:
        return "Completed"
    return "Stopped" if code == ExitCode.TERMINATED else "Failed"
