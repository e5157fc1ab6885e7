"""The speeds that ``sm-train measure`` found, kept next to the run file and in the run's bucket.

``NAME.measured.json`` lies in the run file's folder: ``cost`` reads it without AWS, and a commit
shares it. ``s3://BUCKET/RUN/cost/measured.json`` has the same content for every laptop that submits
the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from sm_train.cost.throughput import Measurement, StageMeasurement
from sm_train.entrypoints.common.atomic_write import write_atomic
from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.launch_plan import compile_choice, pytorch_version
from sm_train.toolkit.aws.s3 import read_optional_object, write_object
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.stored_values import as_record

if TYPE_CHECKING:
    import boto3

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
