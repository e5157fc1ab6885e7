"""The account and the KMS key of each bucket, as processes and jobs pass them on.

Two environment variables hold ``bucket=value`` pairs separated by commas. They reach worker
processes and jobs; :mod:`sm_train.entrypoints.storage` sends the values with every request.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase

OWNERS_VARIABLE = "SM_TRAIN_BUCKET_OWNERS"
KEYS_VARIABLE = "SM_TRAIN_BUCKET_KMS_KEYS"
ACCOUNT_VARIABLE = "SM_TRAIN_ACCOUNT"
"""The caller's own account, where STS may be out of reach, as in a VPC."""

ANY_OWNER = "any"
"""The account of a public data set, for example: requests to the bucket name no owner."""

BUCKET_DEFAULT = "default"
"""The KMS key of a bucket whose default encryption applies: requests name no key."""


def bucket_variables(owners: Mapping[str, str], keys: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that sends these owners and KMS keys, by bucket."""
    settings = {OWNERS_VARIABLE: owners, KEYS_VARIABLE: keys}
    return {variable: _format(values) for variable, values in settings.items() if values}


def declare_buckets(
    owners: Mapping[str, str] | None = None, keys: Mapping[str, str] | None = None
) -> None:
    """Send these owners and KMS keys, by bucket, in this process and its children.

    Buckets that are not named keep what was declared before.
    """
    variables = bucket_variables(
        {**_declared(OWNERS_VARIABLE), **owners} if owners else {},
        {**_declared(KEYS_VARIABLE), **keys} if keys else {},
    )
    os.environ.update(variables)


def declared_owner(bucket: str) -> str | None:
    """Return the account that owns ``bucket``, or ``any``; None if it was not declared."""
    return _declared(OWNERS_VARIABLE).get(bucket)


def declared_key(bucket: str) -> str | None:
    """Return the KMS key that was declared for objects in ``bucket``, as :func:`bucket_key`."""
    return bucket_key(_declared(KEYS_VARIABLE), bucket)


def bucket_key(keys: Mapping[str, str], bucket: str) -> str | None:
    """Return the KMS key for objects in ``bucket``; None to leave it to the bucket's default.

    A name in ``keys`` may hold ``*``, for a default bucket whose account is not known yet. An exact
    name takes precedence.
    """
    matching = (key for name, key in keys.items() if "*" in name and fnmatchcase(bucket, name))
    key = keys.get(bucket) or next(matching, None)
    return None if key == BUCKET_DEFAULT else key


def _declared(variable: str) -> dict[str, str]:
    pairs = os.environ.get(variable, "").split(",")
    named = (pair.partition("=") for pair in pairs)
    return {name.strip(): value.strip() for name, _, value in named if name.strip()}


def _format(values: Mapping[str, str]) -> str:
    return ",".join(f"{bucket}={value}" for bucket, value in values.items() if bucket)
