"""The speeds that ``sm-train measure`` found, kept next to the run file and in the run's bucket.

``NAME.measured.json`` lies in the run file's folder: ``cost`` reads it without AWS, and a commit
shares it. ``s3://BUCKET/RUN/cost/measured.json`` has the same content for every laptop that submits
the run.

The same module measures the speed of a job or a log from its event lines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from sm_train.cost.throughput import Measurement, StageMeasurement
from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.launch_plan import compile_choice, pytorch_version
from sm_train.toolkit.aws.s3 import read_optional_object, write_object
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.planning.stored_values import as_record

if TYPE_CHECKING:
    import boto3


from typing import TYPE_CHECKING

from sm_train.cost.instances import instance_type
from sm_train.cost.stage import program_that_ran
from sm_train.cost.timeline import MeanSpeed, mean_speed

if TYPE_CHECKING:
    from sm_train.toolkit.records.job_logs import Event


_VERSION = 3


class DoctorSummary(TypedDict, total=False):
    level: str
    network_bytes_per_second: float | None
    slowdown: float | None
    sentence: str


"""The result of a cluster's test."""


@dataclass(frozen=True)
class MeasuredSpeed:
    """One measured cluster and batch of a stage.

    ``work`` is the digest of what only another measurement can account for (:func:`work_digest`).
    ``source`` is the name of the job, or of the machine; ``instances`` is None on a machine that is
    no known instance. Memory is in bytes of one GPU; ``gpu_memory_planned`` is the plan's.
    ``doctor`` has the level, network_bytes_per_second and slowdown of the cluster's test, None
    without one.
    """

    stage: str
    work: str
    measurement: Measurement
    source: str
    date: str
    instances: int | None
    steps: int
    images_per_second: float
    data_wait_share: float | None
    mfu: float | None
    gpu_memory_peak: int | None
    gpu_memory_planned: float | None
    input_kind: str
    doctor: DoctorSummary | None
    cost_usd: float | None

    @property
    def key(self) -> tuple[object, ...]:
        """What a newer measurement of the same thing has in common with this one."""
        measurement = self.measurement
        batch = (measurement.per_device_batch_size, measurement.gradient_accumulation_steps)
        return (
            self.work,
            measurement.program,
            measurement.instance_type,
            measurement.on_cpu,
            measurement.world_size,
            *batch,
        )


def work_digest(config: RunConfig, stage: StageSection) -> str:
    """Return a digest of what decides a step's time besides cluster, batch and program.

    The speed model converts between programs; that of a user's script is unknown, and part of it.
    """
    training, cluster = config.training, config.cluster
    settings = {
        "model": config.model.model_dump(
            mode="json", exclude={"components", "local_components", "license"}
        ),
        "entry": [config.entry, list(config.entry_args)],
        "resolution": stage.resolution,
        "vae_precision": training.vae_precision,
        "modulation": training.modulation,
        "optimizer": training.optimizer.name,
        "objective": config.objective_of(stage),
        "ema": training.ema_decay > 0,
        "image": [cluster.backend, cluster.image, pytorch_version(config)],
    }
    if config.entry is not None:
        settings["program"] = [
            stage.sharding,
            stage.activation_checkpointing,
            training.precision,
            training.reduce_dtype,
            compile_choice(config).compiled,
            training.text_encoders,
        ]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def measured_path(config: RunConfig, base: Path) -> Path:
    """Return the file of a run's measured speeds; ``base`` is the run file's folder."""
    return base / f"{config.name}.measured.json"


def measured_uri(config: RunConfig, region: str) -> str:
    """Return the URI of a run's measured speeds."""
    return f"s3://{staging_bucket(config, region)}/{config.name}/cost/measured.json"


def applicable(
    config: RunConfig, speeds: Iterable[MeasuredSpeed]
) -> tuple[list[StageMeasurement], list[str]]:
    """Return the measurements that apply to the run as it is, and why the others do not."""
    current = {work_digest(config, stage): stage for stage in config.stages}
    used, unused = [], []
    for speed in speeds:
        stage, measurement = current.get(speed.work), speed.measurement
        what = (
            f"the measured {measurement.steps_per_second:.3g} it/s of {speed.stage} ({speed.date})"
        )
        if stage is None:
            unused.append(
                f"{what} is not used: model, objective, resolution, optimizer, EMA, vae_precision, "
                "modulation or image have changed since; "
                "run `sm-train measure` again"
            )
        elif measurement.on_cpu or measurement.instance_type is None:
            where = "a CPU" if measurement.on_cpu else "a machine that is no known instance type"
            unused.append(
                f"{what} is not used: it was measured on {where}, not on "
                f"{config.cluster.instance_type}"
            )
        else:
            used.append(StageMeasurement("", measurement))
    return used, unused


_MAX_BYTES = 2**24


def recorded_speeds(
    session: boto3.Session, config: RunConfig, region: str
) -> list[StageMeasurement]:
    """Read the measurements in the run's bucket that apply to it as it is.

    A record that cannot be read counts as none: `submit` and `cost` report it.
    """
    try:
        speeds, _ = applicable(config, read_measured_object(session, config, region))
    except UserError:
        return []
    return speeds


def read_measured_file(config: RunConfig, base: Path) -> tuple[MeasuredSpeed, ...]:
    """Read the measured speeds next to the run file; none if there is no file.

    Raises:
        UserError: the file is damaged.
    """
    path = measured_path(config, base)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)  # at most: the path may be a device
    except FileNotFoundError:
        return ()
    if len(content) > _MAX_BYTES:
        raise UserError(f"{path}: more than 16 MiB; remove it and measure again")
    return _parse(content, str(path))


def read_measured_object(
    session: boto3.Session, config: RunConfig, region: str
) -> tuple[MeasuredSpeed, ...]:
    """Read the measured speeds in the run's bucket; none if there are none yet.

    Raises:
        UserError: AWS refuses the request, or the object is damaged.
    """

    uri = measured_uri(config, region)
    content = read_optional_object(session, uri, "measured speeds")
    return () if content is None else _parse(content, uri)


def add_to_file(config: RunConfig, base: Path, speeds: Sequence[MeasuredSpeed]) -> Path:
    """Add ``speeds`` to the file next to the run file; return its path."""
    path = measured_path(config, base)
    write_atomic(path, _document(_merged(read_measured_file(config, base), speeds)))
    return path


def add_to_bucket(
    session: boto3.Session, config: RunConfig, region: str, speeds: Sequence[MeasuredSpeed]
) -> str:
    """Add ``speeds`` to those in the run's bucket; return their URI.

    Raises:
        UserError: AWS refuses a request.
    """

    uri = measured_uri(config, region)
    content = _document(_merged(read_measured_object(session, config, region), speeds))
    write_object(session, uri, content, "measured speeds", "application/json")
    return uri


def as_document(speed: MeasuredSpeed) -> dict[str, Any]:
    """Return a measured speed as JSON."""
    return asdict(speed)


def _merged(
    earlier: Sequence[MeasuredSpeed], newer: Sequence[MeasuredSpeed]
) -> list[MeasuredSpeed]:
    """Return all speeds; a newer measurement replaces an earlier one of the same thing."""
    return list({speed.key: speed for speed in (*earlier, *newer)}.values())


def _document(speeds: Sequence[MeasuredSpeed]) -> bytes:
    document = {"version": _VERSION, "speeds": [as_document(speed) for speed in speeds]}
    return f"{json.dumps(document, indent=1)}\n".encode()


def _parse(content: bytes, source: str) -> tuple[MeasuredSpeed, ...]:
    try:
        document = json.loads(content)
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']}, this sm-train reads {_VERSION}")
        return tuple(as_record(speed, MeasuredSpeed) for speed in document["speeds"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{source}: damaged ({error}); remove it, and `sm-train measure` writes it again"
        ) from None


_WORTH_NAMING = 0.02
"""Share of the speed lost in stalls above which a measurement says so."""


def read_measured(path: Path) -> list[StageMeasurement]:
    """Measure the steady speed from the event lines of a log, or of each stage of a local run.

    Raises:
        UserError: the file does not exist or has no step event.
    """
    from sm_train.toolkit.records.job_logs import read_events
    from sm_train.toolkit.records.local_folder import find_local_run

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
    from sm_train.toolkit.records.job_logs import job_events

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
    from sm_train.toolkit.platforms.find_run import find_run, log_target

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
