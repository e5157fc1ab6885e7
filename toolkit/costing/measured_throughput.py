"""Measure a run's speed from its event lines."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.cost.instances import instance_type
from sm_train.cost.stage import program_that_ran
from sm_train.cost.throughput import Measurement, StageMeasurement
from sm_train.cost.timeline import MeanSpeed, mean_speed
from sm_train.toolkit.errors import UserError

if TYPE_CHECKING:
    from sm_train.toolkit.jobs.event_lines import Event

_WORTH_NAMING = 0.02
"""Share of the speed lost in stalls above which a measurement says so."""


def read_measured(path: Path) -> list[StageMeasurement]:
    """Measure the steady speed from the event lines of a log, or of each stage of a local run.

    Raises:
        UserError: the file does not exist or has no step event.
    """
    from sm_train.toolkit.jobs.event_lines import read_events
    from sm_train.toolkit.jobs.local_folder import find_local_run

    run = find_local_run(path)
    logs = [path] if run is None else run.stages
    if path.is_char_device() or path.is_block_device():
        raise UserError(f"--measured: {path}: is a device; give a job's log")
    try:
        return [measure_speed(read_events(log), str(log)) for log in logs]
    except FileNotFoundError:
        raise UserError(
            f"--measured: {path}: no event lines; give a job's log or the folder of a local run"
        ) from None


def read_measured_job(name: str, region: str, profile: str | None) -> StageMeasurement:
    """Measure the steady speed of the training job ``name`` from its events in CloudWatch.

    Raises:
        UserError: AWS refuses a request, or the job has no step event yet.
    """
    from sm_train.toolkit.aws.session import open_session
    from sm_train.toolkit.jobs.job_events import job_events

    try:
        return measure_speed(job_events(open_session(profile, region), name), name)
    except UserError as error:
        reason = str(error).removeprefix("--measured: ").removeprefix(f"{name}: ")
        raise UserError(
            f"--measured: {name}: not a local file; as a training job: {reason}",
            error.exit_code,
        ) from None


def read_measured_run(place: str, options: dict[str, Any]) -> StageMeasurement | None:
    """Measure the newest job of a run by the folder or the address where it stores checkpoints;
    None if that is no such place.

    Raises:
        UserError: the place cannot be read, or has no step event.
    """
    if not (place.startswith("s3://") or Path(place).is_dir()):
        return None
    from sm_train.toolkit.platforms.find_run import find_run
    from sm_train.toolkit.platforms.parse_target import log_target

    target = log_target(place)
    if target.place is None or target.is_read_as_files:
        return None
    run = find_run(place, options)
    return measure_speed(run.rank_0_events(run.newest_job()), place)


def measure_speed(events: Iterable[Event], source: str) -> StageMeasurement:
    """Measure the mean speed of the work that the last start among ``events`` began.

    Stalls count, and so do restarts of the same work; start-up, checkpoints and evaluation do not:
    see :func:`~sm_train.cost.timeline.mean_speed`.

    Raises:
        UserError: there is no step event.
    """
    start: Event | None = None
    of_the_work: list[Event] = []
    for event in events:
        if event["kind"] == "start" and (start is None or not _is_restart(start, event)):
            start, of_the_work = event, []
        of_the_work.append(event)
    speed = mean_speed(of_the_work)
    if start is None or speed is None:
        raise UserError(
            f"--measured: {source}: has no start and step events; give a job's log or the folder "
            "of a local run's stage"
        )
    return StageMeasurement(
        start["stage"],
        Measurement(
            label=(
                f"stage {start['stage']} ({start['resolution']} px, batch "
                f"{start['effective_batch_size']}, {start['world_size']} processes, "
                f"{start['backend']}; mean of {speed.intervals} intervals{_slower(speed)})"
            ),
            steps_per_second=speed.steps_per_second,
            world_size=start["world_size"],
            resolution=start["resolution"],
            effective_batch_size=start["effective_batch_size"],
            instance_type=_known_instance_type(start.get("instance_type")),
            low=speed.low,
            high=speed.high,
            on_cpu=_is_on_cpu(start),
            per_device_batch_size=start["per_device_batch_size"],
            gradient_accumulation_steps=start["gradient_accumulation_steps"],
            program=program_that_ran(start),
        ),
    )


def _slower(speed: MeanSpeed) -> str:
    """Return by how much stalls made the job slower than it usually is, if they did."""
    lost = 1 - speed.steps_per_second / speed.usual
    return (
        "" if lost < _WORTH_NAMING else f", {lost:.0%} slower than its usual {speed.usual:.3g} it/s"
    )


def _is_on_cpu(start: Event) -> bool:
    """Return whether the processes had no GPU: a single process uses no backend that shows it."""
    if start["backend"] != "none":
        return bool(start["backend"] == "gloo")
    return start.get("accelerator") is None and start.get("instance_type") is None


def _known_instance_type(name: Any) -> str | None:
    """Return the events' instance type if its figures are known, else None."""
    try:
        return instance_type(str(name)).name
    except ValueError:
        return None


def _is_restart(previous: Event, start: Event) -> bool:
    """Return whether ``start`` restarts the same work, so that both have the same speed."""
    keys = (
        *("stage", "world_size", "effective_batch_size", "resolution", "backend"),
        *("per_device_batch_size", "gradient_accumulation_steps", "instance_type"),
    )
    same_program = program_that_ran(previous) == program_that_ran(start)
    return same_program and all(previous.get(key) == start.get(key) for key in keys)
