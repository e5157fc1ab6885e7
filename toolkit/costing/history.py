"""What a run's finished jobs teach the next estimate, kept beside the run in S3.

One small JSON object, ``s3://BUCKET/RUN/cost/history.json``: any laptop that may read the run's
bucket estimates with it, and none has to keep anything.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.cost.assumptions import Observed
from sm_train.cost.throughput import Measurement
from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.costing.throughput import Measured
from sm_train.toolkit.errors import UserError

if TYPE_CHECKING:
    import boto3

_VERSION = 1


@dataclass(frozen=True)
class History:
    """What was observed, and the speeds that were measured, the newest last."""

    observed: Observed
    measurements: tuple[Measurement, ...]

    def measured(self) -> list[Measured]:
        """The speeds, which belong to whatever stage they fit."""
        return [Measured("", one) for one in self.measurements]


def history_uri(config: RunConfig, region: str) -> str:
    """Where the history of a run is kept."""
    return f"s3://{staging_bucket(config, region)}/{config.name}/cost/history.json"


def write_history(session: boto3.Session, uri: str, history: History) -> None:
    """Keep ``history`` at ``uri``, whole or not at all."""
    from sm_train.toolkit.aws.errors import translate_aws_errors

    bucket, key = uri.removeprefix("s3://").split("/", 1)
    document = {
        "version": _VERSION,
        "observed": asdict(history.observed),
        "measurements": [asdict(one) for one in history.measurements],
    }
    with translate_aws_errors(f"history: {uri}"):
        session.client("s3").put_object(
            Bucket=bucket,
            Key=key,
            Body=json.dumps(document, indent=1).encode(),
            ContentType="application/json",
        )


def read_history(session: boto3.Session, uri: str) -> History | None:
    """The history at ``uri``; None where none was kept yet.

    Raises:
        UserError: AWS refuses, or the object is damaged.
    """
    from botocore.exceptions import ClientError
    from sm_train.toolkit.aws.errors import translate_aws_errors

    bucket, key = uri.removeprefix("s3://").split("/", 1)
    with translate_aws_errors(f"history: {uri}"):
        try:
            content = session.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
        except ClientError as error:
            if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
                return None
            raise
    return _parse(content, uri)


def read_history_file(path: Path) -> History:
    """A history that was downloaded.

    Raises:
        UserError: no such file, or a damaged one.
    """
    try:
        return _parse(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise UserError(f"--history: {path}: no such file") from None


def _parse(content: bytes, place: str) -> History:
    try:
        document = json.loads(content)
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']}, this sm-train reads {_VERSION}")
        return History(
            Observed(**document["observed"]),
            tuple(Measurement(**one) for one in document["measurements"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--history: {place}: damaged ({error}); `sm-train cost --actual RUN` writes it anew"
        ) from None
