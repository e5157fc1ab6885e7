"""IAM policies for the commands that make and change data sets, for those who run no training jobs.

Tests run the commands, and the nodes of the jobs that ``--on sagemaker`` starts, against a server
that enforces these policies. What SageMaker itself does with the jobs' role cannot be tested there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sm_train.entrypoints.job_interface.index_location import index_uri
from sm_train.estimators.config.naming import ROLE_NOT_SET
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.iam import (
    Condition,
    Permission,
    PolicyDocument,
    RunScope,
    allow,
    container_permissions,
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

PROCESSING = "processing"
"""The name of the policy of the role with which ``--on sagemaker`` runs these commands."""

PROCESSING_WORKS = ("pack", "index", "enrich")
"""Commands that take ``--on sagemaker``."""

_LOG_GROUP = "/aws/sagemaker/ProcessingJobs"

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
    config: RunConfig,
    region: str,
    sources: Sequence[str],
    destination: str | None,
    processing_image: str | None = None,
) -> dict[str, PolicyDocument]:
    """Return the policies of :data:`DATA_COMMANDS`.

    The data set is the folder that contains the shards of the run file. ``sources`` are S3 prefixes
    that `pack`, `enrich` and `stream --add` read; ``destination`` is that of `enrich`, by default
    the data set. With ``processing_image``, the image of jobs of SageMaker Processing,
    :data:`PROCESSING_WORKS` may start such jobs, and the policy of the jobs' role is added.
    """
    scope = RunScope.of(config, region)
    shards = _Place.of(config.data.uri)
    data_set = shards.parent
    read = _reading(scope, "Source", [_Place.of(uri) for uri in sources])
    # A source of shards may have an index, which lies next to its prefix.
    beside = [_Place.of(uri) for uri in map(index_uri, sources) if uri is not None]
    objects = [_objects(scope, place) for place in beside]
    indexes = [allow("ReadIndexes", ["s3:GetObject"], objects)] if beside else []
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
        "enrich": [*read, *indexes, *read_set, *_writing(scope, "Destination", target), locks],
        "remove": [*write, *_versions(scope, data_set), *readers, *records, locks],
        "lineage": [*read_set, *records],
        "stream": [*read, *read_set, *_companions(scope, sources), *_stream(scope)],
    }
    if processing_image is not None:
        jobs = [f"{config.name}-{work}-*" for work in PROCESSING_WORKS]
        for work in PROCESSING_WORKS:
            statements[work] += _starting(config, scope, jobs)
        statements[PROCESSING] = [
            *read,
            *indexes,
            *read_set,
            *write,
            *_writing(scope, "Destination", target),
            *_reading(scope, "Staged", [_Place(scope.bucket, f"{config.name}/")]),
            *container_permissions(config, scope, processing_image, _LOG_GROUP, jobs),
        ]
    return {name: policy_document([*parts, *keys]) for name, parts in statements.items()}


def _starting(config: RunConfig, scope: RunScope, jobs: Iterable[str]) -> list[Permission]:
    """Return what starting jobs of SageMaker Processing needs; ``jobs`` are patterns of names."""
    staging = _Place(scope.bucket, f"{config.name}/")
    actions = ["sagemaker:CreateProcessingJob", "sagemaker:AddTags"]
    # SageMaker writes job names in lower case into ARNs.
    arns = [scope.arn("sagemaker", f"processing-job/{name.lower()}") for name in jobs]
    passed: Condition = {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}
    uploading = ["s3:PutObject", "s3:AbortMultipartUpload"]
    return [
        allow("StageInputs", uploading, [_objects(scope, staging)]),
        allow("FindStaging", ["s3:ListBucket"], [_bucket(scope, staging)], _below(staging)),
        allow("LocateStaging", ["s3:GetBucketLocation"], [_bucket(scope, staging)]),
        allow("StartJobs", actions, arns),
        allow("PassRole", ["iam:PassRole"], [config.role or ROLE_NOT_SET], passed),
    ]


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


def _companions(scope: RunScope, sources: Sequence[str]) -> list[Permission]:
    """Return what writes captions and columns next to arriving images, and reads their tags."""
    objects = [_objects(scope, _Place.of(uri)) for uri in sources]
    if not objects:
        return []
    files = [f"{name}{suffix}" for name in objects for suffix in (".txt", ".json")]
    return [
        allow("WriteCaptions", ["s3:PutObject"], files),
        allow("ReadTags", ["s3:GetObjectTagging"], objects),
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
