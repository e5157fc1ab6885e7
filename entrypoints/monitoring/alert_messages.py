"""Formats a job's alerts: what they have in common, and what has to be looked up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.job_interface.job_config import JobConfig
from sm_train.entrypoints.job_interface.node_description import node_description
from sm_train.entrypoints.monitoring.alerts import Alert
from sm_train.entrypoints.monitoring.first_failure import Failure
from sm_train.entrypoints.monitoring.stall_detector import Culprit
from sm_train.entrypoints.monitoring.stragglers import Straggler
from sm_train.entrypoints.monitoring.timeouts import call_with_timeout
from sm_train.entrypoints.records.upload_notes import read_uploads

_DISK_TIMEOUT = 5.0


@dataclass(frozen=True)
class AlertFormatter:
    """Formats the alerts of a job of ``nodes`` nodes.

    ``checkpoints`` is this node's checkpoint folder, ``uploads`` whether it is copied to storage.
    ``machines`` returns node → the name that its administrator knows it by, as far as it is known.
    """

    config: JobConfig
    nodes: int
    checkpoints: Path
    uploads: bool = True
    machines: Callable[[], Mapping[int, str]] = dict

    def stall(self, symptom: str, culprit: Culprit, silent: float) -> Alert:
        """Return the alert for a stall after ``silent`` seconds."""
        kills = self.config.heartbeat.on_stall == "kill"
        job = os.environ.get("TRAINING_JOB_NAME")
        return self._alert(
            "stall",
            "training has stalled",
            symptom,
            level="critical" if kills else "warning",
            worst=self._describe_culprit(culprit),
            silent=silent,
            command=_command("resume" if kills else "stop", self.config.run, job),
        )

    def resumed(self, symptom: str, silent: float) -> Alert:
        """Return the alert that resolves a stall."""
        return self._alert("stall", "training resumed", symptom, silent=silent, resolved=True)

    def failure(self, failure: Failure) -> Alert:
        """Return the alert for the failure that ended the job; its key is the cause."""
        return self._alert(
            f"failure {failure.kind} {failure.node} {failure.rank}",
            "training has failed",
            failure.text,
            worst=self._place(failure.node, failure.rank),
            command=_command("resume", self.config.run),
        )

    def straggler(self, symptom: str, straggler: Straggler) -> Alert:
        """Return the alert for a rank or a node that the others wait for."""
        return self._alert(
            f"straggler {straggler.node} {straggler.rank}",
            "training waits for a straggler",
            symptom,
            level="warning",
            worst=self._place(straggler.node, straggler.rank),
        )

    def not_stored(self, symptom: str, node: int, *, resolved: bool = False) -> Alert:
        """Return the alert for checkpoints that a node does not upload, or that resolves it."""
        title = "checkpoints reach storage again" if resolved else "checkpoints are not stored"
        return self._alert(
            f"storage {node}",
            title,
            symptom,
            level="warning",
            worst=self._place(node, None),
            command=None if resolved else _command("status", self.config.run),
            resolved=resolved,
        )

    def not_saved(self, symptom: str, *, resolved: bool = False) -> Alert:
        """Return the alert for checkpoints that cannot be written, or that resolves it."""
        title = "checkpoints are written again" if resolved else "checkpoints cannot be written"
        command = None if resolved else _command("status", self.config.run)
        return self._alert("saves", title, symptom, command=command, resolved=resolved)

    def ended(self, step: int | None) -> Alert:
        """Return the alert for a job that finished or was stopped; ``step`` is None if unknown."""
        where = "at an unknown step" if step is None else f"at step {step}"
        return self._alert("end", "training has ended", where, level="info")

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
            run=self.config.run,
            stage=self.config.stage.name,
            symptom=symptom,
            time=time.time(),
            worst=worst,
            silent_seconds=silent,
            burned_usd=self.burned_usd(silent),
            last_checkpoint=call_with_timeout(_DISK_TIMEOUT, self._last_checkpoint, None),
            command=command,
            console=_console_url(),
            resolved=resolved,
        )

    def _describe_culprit(self, culprit: Culprit) -> str:
        place = self._place(culprit.node, culprit.rank)
        return f"{place}: {culprit.reason}" if place else culprit.reason

    def _place(self, node: int | None, rank: int | None) -> str:
        """Return the node with its machine, and the rank, as far as they are known."""
        names = []
        if node is not None:
            machine = self.machines().get(node)
            names.append(f"node {node} ({machine})" if machine else f"node {node}")
        if rank is not None:
            names.append(f"rank {rank}")
        return ", ".join(names)

    def burned_usd(self, seconds: float | None) -> float | None:
        """Return what all instances cost in ``seconds``; None if the price is unknown."""
        price = self.config.expected.usd_per_instance_hour
        if price is None or seconds is None:
            return None
        return price * self.nodes * seconds / 3600

    def _last_checkpoint(self) -> str | None:
        """Describe the newest checkpoint in this node's folder, and what it has uploaded."""
        uploads = read_uploads(self.checkpoints)
        if uploads.newest is None:
            return None
        name = uploads.folder_of(uploads.newest)
        if not self.uploads:
            return name
        if uploads.newest in uploads.uploaded:
            return f"{name}, uploaded"
        if not uploads.has_notes:
            return f"{name}; whether it is uploaded is unknown"
        uploaded = max(uploads.uploaded, default=None)
        stored = "none" if uploaded is None else uploads.folder_of(uploaded)
        return f"{name}, not uploaded; newest uploaded: {stored}"


def _command(purpose: str, run: str, job: str | None = None) -> str:
    """Return the command for a job of the platform that runs this one, or for ``run``."""
    description = node_description()
    if description is not None and purpose in description.commands:
        return description.commands[purpose]
    return f"sm-train {purpose} {job or run}"


def _console_url() -> str | None:
    """Return the job's page; the platform sets job and region in the container."""
    job, region = os.environ.get("TRAINING_JOB_NAME"), os.environ.get("AWS_REGION")
    if not job or not region:
        return None
    return f"https://{region}.console.aws.amazon.com/sagemaker/home?region={region}#/jobs/{job}"
