"""What a run's event lines say of its speed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from sm_train.cost.instances import instance_types
from sm_train.cost.throughput import Measurement
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.events import Event, read_events

_ENOUGH = 10
"""Intervals from which deciles mean something."""


@dataclass(frozen=True)
class Measured:
    """A measured speed and the name of the stage that it was measured on."""

    stage: str
    measurement: Measurement


def read_measured(path: Path) -> Measured:
    """The steady speed in the event lines of ``path``, a log or a local run's folder.

    Raises:
        UserError: no such file, or no step in it.
    """
    try:
        return measured_in(read_events(path), str(path))
    except FileNotFoundError:
        raise UserError(f"--measured: {path}: no event lines there") from None


def read_measured_job(name: str, region: str, profile: str | None) -> Measured:
    """The steady speed in the event lines of the training job ``name``, from CloudWatch.

    Raises:
        UserError: AWS refuses, or the job has said nothing yet.
    """
    from sm_train.toolkit.aws.session import open_session
    from sm_train.toolkit.jobs.job_events import job_events

    try:
        return measured_in(job_events(open_session(profile, region), name), name)
    except UserError as error:
        reason = str(error).removeprefix("--measured: ").removeprefix(f"{name}: ")
        raise UserError(
            f"--measured: {name}: no such file here, and as a training job: {reason}",
            error.exit_code,
        ) from None


def measured_in(events: Iterable[Event], place: str) -> Measured:
    """The steady speed of the last start among ``events``.

    The first interval pays for start-up and is left out where there are others.

    Raises:
        UserError: no step among them.
    """
    start: Event | None = None
    speeds: list[float] = []
    for event in events:
        if event["kind"] == "start" and (start is None or not _goes_on(start, event)):
            start, speeds = event, []
        elif event["kind"] == "step" and event["steps_per_second"]:
            speeds.append(float(event["steps_per_second"]))
    if start is None or not speeds:
        raise UserError(
            f"--measured: {place}: holds no start and step events; give a job's log or the folder "
            "of a local run's stage"
        )
    steady = speeds[1:] or speeds
    deciles = quantiles(steady, n=10, method="inclusive") if len(steady) >= _ENOUGH else None
    return Measured(
        start["stage"],
        Measurement(
            label=(
                f"stage {start['stage']} ({start['resolution']} px, batch "
                f"{start['effective_batch_size']}, {start['world_size']} processes, "
                f"{start['backend']}; median of {len(steady)} intervals)"
            ),
            steps_per_second=median(steady),
            world_size=start["world_size"],
            resolution=start["resolution"],
            effective_batch_size=start["effective_batch_size"],
            instance_type=_known_type(start.get("instance_type")),
            low=deciles[0] if deciles else None,
            high=deciles[-1] if deciles else None,
            on_cpu=start["backend"] == "gloo",
        ),
    )


def _known_type(name: Any) -> str | None:
    """The instance type that the lines name; those of a type without figures name none."""
    return name if name in {machine.name for machine in instance_types()} else None


def _goes_on(before: Event, start: Event) -> bool:
    """Whether ``start`` is a restart of the same work, whose intervals belong together."""
    same = ("stage", "world_size", "effective_batch_size", "resolution", "backend")
    return all(before[key] == start[key] for key in same)
