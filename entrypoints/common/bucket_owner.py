"""Sends the expected owner of the bucket with every S3 request, so that S3 rejects another's.

Bucket names are global and free again once a bucket is deleted: whoever creates the name next would
receive the run's checkpoints and code, or supply its data. S3 compares ``ExpectedBucketOwner`` with
the bucket's account and denies the request if they differ (Amazon S3 user guide, Verifying bucket
ownership with bucket owner condition, 2026-11).

The expected owner is the caller's own account unless ``SM_TRAIN_BUCKET_OWNERS`` names another. The
variable holds ``bucket=account`` pairs separated by commas, and reaches worker processes and jobs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import boto3

OWNERS_VARIABLE = "SM_TRAIN_BUCKET_OWNERS"
ACCOUNT_VARIABLE = "SM_TRAIN_ACCOUNT"
"""The caller's own account, where STS may be out of reach, as in a VPC."""

ANY_OWNER = "any"
"""In place of an account: requests to this bucket name no owner, as for a public data set."""

_DENIED = ("403", "AccessDenied")


def declared_owners() -> dict[str, str]:
    """Return the owner of each bucket that the environment names."""
    pairs = os.environ.get(OWNERS_VARIABLE, "").split(",")
    return {name.strip(): owner.strip() for name, _, owner in (one.partition("=") for one in pairs)}


def declare_owners(owners: Mapping[str, str]) -> None:
    """Expect ``owners`` (bucket → account or ``any``) in this process and its children."""
    if owners:
        os.environ[OWNERS_VARIABLE] = format_owners({**declared_owners(), **owners})


def format_owners(owners: Mapping[str, str]) -> str:
    """Return the value of :data:`OWNERS_VARIABLE` for ``owners``."""
    return ",".join(f"{bucket}={owner}" for bucket, owner in owners.items() if bucket)


def require_bucket_owners(session: boto3.Session) -> None:
    """Make every S3 client that ``session`` creates from now on send the expected owner.

    STS is asked for the caller's account at the first request, and only then.
    """
    guard = _OwnerGuard(session)
    session.events.register("provide-client-params.s3", guard.add_owner)
    session.events.register("after-call.s3", guard.explain_denial)


class _OwnerGuard:
    """Event handlers of a session's S3 clients."""

    def __init__(self, session: boto3.Session) -> None:
        self._session = session
        self._account: str | None = os.environ.get(ACCOUNT_VARIABLE)
        self._lock = threading.Lock()  # clients are used, but must not be created, concurrently

    def add_owner(
        self, params: dict[str, Any], model: Any, context: dict[str, Any], **_: Any
    ) -> None:
        """Add the owners of a request's buckets to its parameters."""
        fields: Mapping[str, Any] = getattr(model.input_shape, "members", {})
        if "ExpectedBucketOwner" not in fields or "Bucket" not in params:
            return
        owners = {"ExpectedBucketOwner": self._owner(params["Bucket"])}
        if "CopySource" in params:
            source = params["CopySource"]
            bucket = source["Bucket"] if isinstance(source, dict) else source.split("/")[0]
            owners["ExpectedSourceBucketOwner"] = self._owner(bucket)
        expected = {field: owner for field, owner in owners.items() if owner != ANY_OWNER}
        context["sm_train_expected_owner"] = expected.values()
        params.update(expected)

    def explain_denial(self, parsed: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
        """Add the expected owner to S3's error, which does not say why it denies a request."""
        expected = context.get("sm_train_expected_owner")
        error = parsed.get("Error", {})
        if expected and error.get("Code") in _DENIED:
            accounts = " and ".join(dict.fromkeys(expected))
            error["ExpectedOwner"] = accounts
            error["Message"] = (
                f"{error.get('Message', 'Forbidden')} (allow the call; or, if account {accounts} "
                "does not own the bucket, name its owner in bucket_owners of the run file or "
                "with --bucket-owner)"
            )

    def _owner(self, bucket: str) -> str:
        return declared_owners().get(bucket) or self._own_account()

    def _own_account(self) -> str:
        with self._lock:
            if self._account is None:
                identity = self._session.client("sts").get_caller_identity()
                self._account = identity["Account"]
            return self._account
