"""The history of a run's finished jobs, which improves later estimates.

Stored in S3 as ``s3://BUCKET/RUN/cost/history.json``, so that every laptop with access to the run's
bucket can use it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.cost.assumptions import Observed
from sm_train.cost.throughput import Measurement, StageMeasurement
from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.aws.s3 import read_optional_object, write_object
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.planning.measured_speeds import applicable, read_measured_file
from sm_train.toolkit.planning.stored_values import as_record

if TYPE_CHECKING:
    import boto3

_VERSION = 3


@dataclass(frozen=True)
class History:
    """Observed figures, and measured speeds with the newest last."""

    observed: Observed
    measurements: tuple[Measurement, ...]

    def stage_measurements(self) -> list[StageMeasurement]:
        """Return the speeds without a stage: they apply to every stage that they match."""
        return [StageMeasurement("", measurement) for measurement in self.measurements]


def with_speeds(history: History | None, speeds: Sequence[StageMeasurement]) -> History | None:
    """Return ``history`` with the speeds that `measure` recorded."""
    if not speeds:
        return history
    history = history or History(Observed(jobs=0, gpu_hours=0.0, failures=0), ())
    measured = tuple(speed.measurement for speed in speeds)
    return replace(history, measurements=(*history.measurements, *measured))


def recorded_history(config: RunConfig, base: Path) -> History | None:
    """Return the speeds recorded next to the run file in ``base`` that apply; None without any.

    Raises:
        UserError: the record is damaged.
    """
    speeds, _ = applicable(config, read_measured_file(config, base))
    return with_speeds(None, speeds)


def history_uri(config: RunConfig, region: str) -> str:
    """Return the URI of a run's history."""
    return f"s3://{staging_bucket(config, region)}/{config.name}/cost/history.json"


def write_history(session: boto3.Session, uri: str, history: History) -> None:
    """Store ``history`` at ``uri``.

    Raises:
        UserError: AWS refuses the request.
    """

    document = {
        "version": _VERSION,
        "observed": asdict(history.observed),
        "measurements": [asdict(measurement) for measurement in history.measurements],
    }
    content = json.dumps(document, indent=1).encode()
    write_object(session, uri, content, "history", "application/json")


def read_history(session: boto3.Session, uri: str) -> History | None:
    """Read the history at ``uri``; None if there is none yet.

    Raises:
        UserError: AWS refuses the request, or the object is damaged.
    """

    content = read_optional_object(session, uri, "history")
    return None if content is None else _parse(content, uri)


def _parse(content: bytes, source: str) -> History:
    try:
        document = json.loads(content)
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']}, this sm-train reads {_VERSION}")
        return History(
            as_record(document["observed"], Observed),
            tuple(as_record(fields, Measurement) for fields in document["measurements"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{source}: damaged ({error}); `sm-train cost --actual RUN` rewrites it"
        ) from None
