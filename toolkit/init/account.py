"""Reads what a run file needs from the user's AWS account: roles, buckets and quotas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_train.cost.instances import instance_types
from sm_train.entrypoints.storage.store import store_of
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.session import open_session
from sm_train.toolkit.checks.account.quotas import read_quotas
from sm_train.toolkit.checks.account.role import may_assume

if TYPE_CHECKING:
    import boto3
    from botocore.config import Config

_CONNECT_SECONDS, _READ_SECONDS = 3, 10
"""A wizard must not wait long for an account that cannot be reached."""

_MOST = 15
"""Roles and buckets that are listed."""


@dataclass(frozen=True)
class Account:
    """An account that the credentials can read."""

    number: str
    region: str
    session: boto3.Session

    def roles(self) -> list[str]:
        """Return the ARNs of roles that SageMaker may assume.

        Raises:
            UserError: IAM refuses the request.
        """
        with translate_aws_errors("iam:ListRoles"):
            pages = self._client("iam").get_paginator("list_roles").paginate()
            return [
                role["Arn"]
                for page in pages
                for role in page["Roles"]
                if may_assume(role.get("AssumeRolePolicyDocument") or {})
            ][:_MOST]

    def buckets(self) -> list[str]:
        """Return the names of buckets in the region.

        Raises:
            UserError: S3 refuses the request.
        """
        with translate_aws_errors("s3:ListAllMyBuckets"):
            return store_of(self.session, config=_timeouts()).bucket_names(self.region)[:_MOST]

    def usable_types(self) -> dict[str, int]:
        """Return the instance types that the quotas allow, with the number of instances.

        Raises:
            UserError: Service Quotas refuses the request.
        """
        names = {f"{kind.name} for training job usage": kind.name for kind in instance_types()}
        with translate_aws_errors("servicequotas:ListServiceQuotas"):
            quotas = read_quotas(self._client("service-quotas"), names)
        return {
            names[name]: int(quotas[name].value)
            for name in names
            if name in quotas and quotas[name].value >= 1
        }

    def _client(self, service: Any) -> Any:
        return _client(self.session, service)


def _client(session: boto3.Session, service: Any) -> Any:
    return session.client(service, config=_timeouts())


def _timeouts() -> Config:
    from botocore.config import Config

    return Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"total_max_attempts": 2},
    )


def open_account(profile: str | None, region: str) -> Account:
    """Return the account of the credentials.

    Raises:
        UserError: there are no credentials, or AWS cannot be reached.
    """
    session = open_session(profile, region)
    with translate_aws_errors("AWS credentials"):
        number = _client(session, "sts").get_caller_identity()["Account"]
    return Account(number, region, session)
