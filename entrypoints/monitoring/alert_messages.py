"""Writes a job's alerts: what is the same in all of them, and what can be looked up."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.common.checkpoint_layout import MARKER, step_folders
from sm_train.entrypoints.common.job_config import JobConfig
from sm_train.entrypoints.monitoring.alerts import Alert
from sm_train.entrypoints.monitoring.stall_detector import Culprit
from sm_train.entrypoints.monitoring.timeouts import call_with_timeout

_DISK_SECONDS = 5.0


@dataclass(frozen=True)
class AlertFormatter:
    """``nodes`` machines cost money together; ``checkpoints`` is the folder of theirs."""

    settings: JobConfig
    nodes: int
    checkpoints: Path

    def stall(self, symptom: str, blamed: Culprit, silent: float) -> Alert:
        """``silent`` is in seconds."""
        ends = self.settings.heartbeat.on_stall == "kill"
        job = os.environ.get("TRAINING_JOB_NAME")
        return self._alert(
            "stall",
            "training has stalled",
            symptom,
            level="critical" if ends else "warning",
            worst=_worst(blamed),
            silent=silent,
            command=self._resume if ends else f"sm-train stop {job or self.settings.run}",
        )

    def goes_on(self, symptom: str, silent: float) -> Alert:
        """The stall is over."""
        return self._alert("stall", "training goes on", symptom, silent=silent, resolved=True)

    def failure(self, symptom: str, node: int, rank: int | None) -> Alert:
        """A process failed or died, and the job with it."""
        return self._alert(
            "failure",
            "training has failed",
            symptom,
            worst=f"node {node}" if rank is None else f"node {node}, rank {rank}",
            command=self._resume,
        )

    def ended(self, step: int) -> Alert:
        """The last step was taken, or somebody asked for a stop."""
        return self._alert("end", "training has ended", f"at step {step}", level="info")

    @property
    def _resume(self) -> str:
        return f"sm-train resume {self.settings.run}"

    def _alert(
        self,
        key: str,
        title: str,
        symptom: str,
        *,
        level: str = "critical",
        worst: str | None = None,
        silent: float | None = None,
        command: str | None = None,
        resolved: bool = False,
    ) -> Alert:
        return Alert(
            key=key,
            level=level,
            title=title,
            run=self.settings.run,
            stage=self.settings.stage.name,
            symptom=symptom,
            time=time.time(),
            worst=worst,
            silent_seconds=silent,
            burned_usd=self.burned(silent),
            last_checkpoint=call_with_timeout(_DISK_SECONDS, self._last_checkpoint, None),
            command=command,
            console=_console(),
            resolved=resolved,
        )

    def burned(self, seconds: float | None) -> float | None:
        """Dollars of all machines in so much time."""
        price = self.settings.expected.usd_per_instance_hour
        if price is None or seconds is None:
            return None
        return price * self.nodes * seconds / 3600

    def _last_checkpoint(self) -> str | None:
        folders = step_folders(self.checkpoints)
        return next((folder.name for folder in folders if (folder / MARKER).exists()), None)


def _worst(blamed: Culprit) -> str:
    names = [f"node {blamed.node}"] if blamed.node is not None else []
    names += [f"rank {blamed.rank}"] if blamed.rank is not None else []
    return f"{', '.join(names)}: {blamed.reason}" if names else blamed.reason


def _console() -> str | None:
    """The job's page; the platform names job and region to the container."""
    job, region = os.environ.get("TRAINING_JOB_NAME"), os.environ.get("AWS_REGION")
    if not job or not region:
        return None
    return f"https://{region}.console.aws.amazon.com/sagemaker/home?region={region}#/jobs/{job}"
