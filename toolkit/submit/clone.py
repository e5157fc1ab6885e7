"""Re-runs an earlier job: its bundle in S3 holds the complete run document and code."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from sm_train.entrypoints.job_interface.job_config import RUN_FILE
from sm_train.entrypoints.storage.bucket_settings import declare_buckets
from sm_train.entrypoints.storage.store import store_of
from sm_train.estimators.bundle.bundle import Bundle, rebuild_bundle, unpack
from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.launch_plan import pytorch_version
from sm_train.estimators.request.training_request import BUCKET_OWNER_TAG, COMMIT_TAG, code_uri
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.memory.memory_fit import custom_plan
from sm_train.toolkit.memory.sharding_choice import with_sharding
from sm_train.toolkit.planning.run_price import predicted_speeds
from sm_train.toolkit.run_file.run_file import declare_run_buckets, load_recorded

if TYPE_CHECKING:
    import boto3


def clone(
    session: boto3.Session, job: str, changes: Sequence[str], region: str
) -> tuple[RunConfig, Bundle, str | None]:
    """Return the run of ``job`` with ``changes``, its code, and the commit it was submitted from.

    Unless the changes name it, the run gets a new name: under the old one it would resume from
    the old checkpoints, that is, end at once.

    Raises:
        UserError: there is no such job, sm-train did not start it, or a change is invalid.
    """
    with translate_aws_errors(f"--clone: {job}"):
        description = session.client("sagemaker").describe_training_job(TrainingJobName=job)
        uri = code_uri(dict(description))
        if uri is None:
            raise UserError(f"--clone: {job} was not started by sm-train: it has no bundle")
        pages = session.client("sagemaker").get_paginator("list_tags")
        tags = {
            tag["Key"]: tag["Value"]
            for page in pages.paginate(ResourceArn=description["TrainingJobArn"])
            for tag in page["Tags"]
        }
        bucket, key = split_uri(uri)
        if BUCKET_OWNER_TAG in tags:
            declare_buckets({bucket: tags[BUCKET_OWNER_TAG]})
        archive = store_of(session).get(bucket, key)
    files = unpack(archive)
    if RUN_FILE not in files:
        raise UserError(
            f"--clone: the bundle of {job} holds no run document; sm-train did not make it"
        )
    document = json.loads(files[RUN_FILE])
    config = load_recorded(document, changes, job)
    if config.name == document["name"] and not _sets_name(changes):
        name = _free_name(session, config, region)
        config = load_recorded(document, [*changes, f"name={name}"], job)
    config = with_sharding(config)
    version = pytorch_version(config)
    declare_run_buckets(config)
    same = version == pytorch_version(load_recorded(document, (), job))
    bundle = rebuild_bundle(
        archive,
        config,
        version,
        same_image=same,
        predicted_speeds=predicted_speeds(config),
        model_plan=custom_plan(config),
    )
    return config, bundle, tags.get(COMMIT_TAG)


def _sets_name(changes: Sequence[str]) -> bool:
    return any(change.startswith("name=") for change in changes)


def _free_name(session: boto3.Session, config: RunConfig, region: str) -> str:
    """Return the first of NAME-r2, NAME-r3 … with no objects in the bucket."""
    bucket = staging_bucket(config, region)
    store = store_of(session)
    stem = re.sub(r"-r\d+$", "", config.name)
    with translate_aws_errors(f"bucket {bucket}"):
        for number in count(2):
            name = f"{stem}-r{number}"
            if store.first(bucket, f"{name}/") is None:
                return name
    raise AssertionError("there is always another number")
