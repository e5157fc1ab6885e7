"""IAM policies for the commands that make and change data sets, for those who run no training jobs.

A test runs the commands against a server that enforces these policies. Permissions to start jobs
of SageMaker Processing (``--on sagemaker``) are not part of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.iam import (
    Condition,
    Permission,
    PolicyDocument,
    RunScope,
    allow,
    key_permissions,
    policy_document,
)

DATA_COMMANDS = {
    "pack": "reads the sources, writes the data set",
    "index": "reads the shards, writes the index",
    "enrich": "reads the sources or the data set, writes the destination",
    "remove": "rewrites shards and deletes the old ones",
    "lineage": "reads the data set, and what the runs' jobs recorded",
    "stream": "shows, fills and flushes the functions that pack images as they arrive",
}
"""Commands with a policy of their own, with what it is for."""

_WRITE = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
_LIST = ["s3:ListBucket", "s3:ListBucketMultipartUploads"]


@dataclass(frozen=True)
class _Place:
    """An S3 prefix; without ``key`` it is a whole bucket."""

    bucket: str
    key: str

    @classmethod
    def of(cls, uri: str) -> _Place:
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        return cls(bucket, key)

    @property
    def parent(self) -> _Place:
        """The folder that contains this one."""
        head, separator, _ = self.key.rstrip("/").rpartition("/")
        return _Place(self.bucket, head + separator)


def data_policies(
    config: RunConfig, region: str, sources: Sequence[str], destination: str | None
) -> dict[str, PolicyDocument]:
    """Return the policies of :data:`DATA_COMMANDS`.

    The data set is the folder that contains the shards of the run file. ``sources`` are S3 prefixes
    that `pack`, `enrich` and `stream --add` read; ``destination`` is that of `enrich`, by default
    the data set.
    """
    scope = RunScope.of(config, region)
    shards = _Place.of(config.data.uri)
    data_set = shards.parent
    read = _reading(scope, "Source", [_Place.of(uri) for uri in sources])
    write = _writing(scope, "DataSet", data_set)
    read_set = _reading(scope, "DataSet", [data_set])
    target = data_set if destination is None else _Place.of(destination)
    keys = key_permissions(config, scope, ["kms:Decrypt", "kms:GenerateDataKey"])
    locks = allow(
        "DescribeWriters",
        ["sagemaker:DescribeProcessingJob"],
        [scope.arn("sagemaker", "processing-job/*")],
    )
    readers = [
        allow("ListReaders", ["sagemaker:ListTrainingJobs"], ["*"]),
        allow(
            "DescribeReaders",
            ["sagemaker:DescribeTrainingJob"],
            [scope.arn("sagemaker", "training-job/*")],
        ),
    ]
    records = _reading(scope, "Runs", [_Place(scope.bucket, "")])
    statements = {
        "pack": [*read, *write, locks],
        "index": [*write, locks],
        "enrich": [*read, *read_set, *_writing(scope, "Destination", target), locks],
        "remove": [*write, *_versions(scope, data_set), *readers, *records, locks],
        "lineage": [*read_set, *records],
        "stream": [*read, *read_set, *_stream(scope)],
    }
    return {name: policy_document([*parts, *keys]) for name, parts in statements.items()}


def _reading(scope: RunScope, name: str, places: Iterable[_Place]) -> list[Permission]:
    permissions = []
    for number, place in enumerate(places):
        sid = f"{name}{number or ''}"
        permissions += [
            allow(f"Read{sid}", ["s3:GetObject"], [_objects(scope, place)]),
            allow(f"List{sid}", ["s3:ListBucket"], [_bucket(scope, place)], _below(place)),
        ]
    return permissions


def _writing(scope: RunScope, name: str, place: _Place) -> list[Permission]:
    return [
        allow(f"Write{name}", _WRITE, [_objects(scope, place)]),
        allow(f"ListAndFindUploadsOf{name}", _LIST, [_bucket(scope, place)], _below(place)),
        allow(f"Locate{name}", ["s3:GetBucketLocation"], [_bucket(scope, place)]),
    ]


def _versions(scope: RunScope, place: _Place) -> list[Permission]:
    """Return what deleting the old versions of shards needs, in a bucket with versioning."""
    listing = ["s3:ListBucketVersions"]
    return [
        allow("DeleteVersions", ["s3:DeleteObjectVersion"], [_objects(scope, place)]),
        allow("ListVersions", listing, [_bucket(scope, place)], _below(place)),
    ]


def _stream(scope: RunScope) -> list[Permission]:
    """Return what the stack of `template stream-lambda` needs, whatever its name is."""
    queues = [
        "sqs:GetQueueAttributes",
        "sqs:SendMessage",
        "sqs:ReceiveMessage",
        "sqs:ChangeMessageVisibility",
        "sqs:StartMessageMoveTask",
    ]
    stacks, functions = scope.arn("cloudformation", "stack/*"), scope.arn("lambda", "function:*")
    return [
        allow("FindStack", ["cloudformation:DescribeStacks"], [stacks]),
        allow("UseQueues", queues, [scope.arn("sqs", "*")]),
        allow("Flush", ["lambda:InvokeFunction"], [functions]),
    ]


def _objects(scope: RunScope, place: _Place) -> str:
    return scope.s3_arn(f"{place.bucket}/{place.key}*")


def _bucket(scope: RunScope, place: _Place) -> str:
    return scope.s3_arn(place.bucket)


def _below(place: _Place) -> Condition:
    return {"StringLike": {"s3:prefix": [f"{place.key}*"]}}
