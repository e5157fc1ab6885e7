"""Sends the bucket's expected owner and KMS key with every S3 request of a session.

Bucket names are global and free again once a bucket is deleted: whoever creates the name next would
receive the run's checkpoints and code, or supply its data. S3 compares ``ExpectedBucketOwner`` with
the bucket's account and denies the request if they differ (Amazon S3 user guide, Verifying bucket
ownership with bucket owner condition, 2026-11). The expected owner is the caller's own account
unless one is declared (:mod:`sm_train.entrypoints.storage.bucket_settings`).

A bucket policy may deny every put that does not ask for SSE-KMS (Amazon S3 user guide, Requiring
SSE-KMS, 2026-11). So each request that creates an object names the bucket's declared key. Parts of
an upload and reads take none.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sm_train.entrypoints.storage.bucket_settings import (
    ACCOUNT_VARIABLE,
    ANY_OWNER,
    declared_key,
    declared_owner,
)

if TYPE_CHECKING:
    import boto3

_DENIED = ("403", "AccessDenied")

_CREATING = ("PutObject", "CopyObject", "CreateMultipartUpload")
"""Operations that take the encryption of the object that they create."""


def send_bucket_parameters(session: boto3.Session) -> Callable[[], str]:
    """Make every S3 client that ``session`` creates from now on send the owner and the KMS key.

    STS is asked for the caller's account at the first request, and only then. Return a function
    that returns the address of this thread's last request to S3.
    """
    parameters = _BucketParameters(session)
    session.events.register("provide-client-params.s3", parameters.add)
    session.events.register("after-call.s3", parameters.explain)
    return lambda: getattr(parameters.requested, "address", "S3")


class _BucketParameters:
    """Event handlers of a session's S3 clients."""

    def __init__(self, session: boto3.Session) -> None:
        self._session = session
        self._account: str | None = os.environ.get(ACCOUNT_VARIABLE)
        self.requested = threading.local()
        self._lock = threading.Lock()  # clients are used, but must not be created, concurrently

    def add(self, params: dict[str, Any], model: Any, context: dict[str, Any], **_: Any) -> None:
        """Add the owners and the encryption of a request's buckets to its parameters."""
        if "Bucket" not in params:
            return
        name = params.get("Key") or params.get("Prefix") or ""
        self.requested.address = f"s3://{params['Bucket']}/{name}".rstrip("/")
        context["sm_train_address"] = self.requested.address
        fields: Mapping[str, Any] = getattr(model.input_shape, "members", {})
        if "ExpectedBucketOwner" in fields:
            expected = self._owners(params)
            context["sm_train_expected_owners"] = tuple(expected.values())
            params.update(expected)
        if model.name in _CREATING and "ServerSideEncryption" not in params:
            key = declared_key(params["Bucket"])
            context["sm_train_without_key"] = key is None
            if key is not None:
                params.update(ServerSideEncryption="aws:kms", SSEKMSKeyId=key)

    def explain(self, parsed: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
        """Add what the request named to S3's error, which names nothing, nor why it denies."""
        expected = context.get("sm_train_expected_owners")
        error = parsed.get("Error", {})
        if error and "sm_train_address" in context:
            error["Address"] = context["sm_train_address"]
        if not expected or error.get("Code") not in _DENIED:
            return
        accounts = " and ".join(dict.fromkeys(expected))
        error["ExpectedOwner"] = accounts
        causes = [
            f"if account {accounts} does not own the bucket, name its owner in bucket_owners of "
            "the run file or with --bucket-owner"
        ]
        if context.get("sm_train_without_key"):
            causes.append(
                "if the bucket's policy demands SSE-KMS, name the key in output_kms_key or "
                "bucket_kms_keys of the run file or with --bucket-kms-key"
            )
        error["Message"] = (
            f"{error.get('Message', 'Forbidden')} (allow the call; or, {'; or, '.join(causes)})"
        )

    def _owners(self, params: Mapping[str, Any]) -> dict[str, str]:
        owners = {"ExpectedBucketOwner": self._owner(params["Bucket"])}
        if "CopySource" in params:
            source = params["CopySource"]
            bucket = source["Bucket"] if isinstance(source, dict) else source.split("/")[0]
            owners["ExpectedSourceBucketOwner"] = self._owner(bucket)
        return {field: owner for field, owner in owners.items() if owner != ANY_OWNER}

    def _owner(self, bucket: str) -> str:
        return declared_owner(bucket) or self._own_account()

    def _own_account(self) -> str:
        with self._lock:
            if self._account is None:
                identity = self._session.client("sts").get_caller_identity()
                self._account = identity["Account"]
            return self._account
