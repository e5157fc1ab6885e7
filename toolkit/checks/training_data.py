"""Rejects missing training data at submission, before a job is paid for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_train.entrypoints.storage.store import store_of
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.checks.components import stored_components_findings
from sm_train.toolkit.checks.permissions import call_or_finding

if TYPE_CHECKING:
    import boto3


def require_shards(session: boto3.Session, uri: str, instances: int) -> None:
    """Reject a data prefix with fewer objects than ``instances``: the rest would idle, billed.

    ``instances`` is 1 if each gets all objects.

    Raises:
        UserError: there are too few objects, ``uri`` is an object, or AWS denies the call.
    """
    bucket, prefix = split_uri(uri)
    store, count = store_of(session), 0
    with translate_aws_errors(f"data.uri: {uri}"):
        for page in store.pages(bucket, prefix):
            count += len(page.objects)
            if count >= instances:
                return
        # S3 lists keys in order, so an object named exactly like the folder comes first.
        key = prefix.rstrip("/")
        first = store.first(bucket, key)
    if key and first is not None and first.key == key:
        raise UserError(
            f"data.uri: {uri} is a single object; FastFile with ShardedByS3Key needs the prefix "
            "above it",
            ExitCode.PREFLIGHT,
        )
    if instances == 1:
        raise UserError(f"data.uri: {uri} holds no objects", ExitCode.PREFLIGHT)
    raise UserError(
        f"data.uri: {uri} holds {count} objects for {instances} instances; ShardedByS3Key would "
        f"leave {instances - count} of them idle; pack at least {instances} shards",
        ExitCode.PREFLIGHT,
    )


def require_index(session: boto3.Session, shards: str, uri: str | None) -> None:
    """Reject a run whose shard index does not exist: the job would fail after it is paid for.

    Raises:
        UserError: the index at ``uri`` does not exist, or AWS denies the call.
    """
    if uri is None:
        return
    bucket, key = split_uri(uri)
    with translate_aws_errors(f"data.index: {uri}"):
        head = store_of(session).head(bucket, key)
    if head is None:
        raise UserError(
            f"data.index: {uri} does not exist; run `sm-train index {shards}`, or write "
            "index: false, and every start reads the headers of all shards",
            ExitCode.PREFLIGHT,
        )


def require_components(session: boto3.Session, config: RunConfig) -> None:
    """Reject pretrained components that the job would refuse, where the caller may read them.

    Raises:
        UserError: they do not fit the run file, or a file is damaged.
    """
    findings, _ = call_or_finding(
        "the components",
        "model.components",
        "s3:GetObject",
        lambda: list(stored_components_findings(config, session)),
    )
    if findings:
        lines = [f"{finding.where}: {finding.message}; {finding.fix}" for finding in findings]
        raise UserError("\n".join(lines), ExitCode.PREFLIGHT)
