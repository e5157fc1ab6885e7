"""Checks the job's IAM role: that it exists and that SageMaker may assume it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.checks.finding import Check, Finding

if TYPE_CHECKING:
    import boto3

_SERVICE = "sagemaker.amazonaws.com"
_SOURCE = "SageMaker developer guide, How to use SageMaker AI execution roles (2026-11)"

ROLE_UNSET = Check(
    "role-unset",
    ("warning",),
    means="The run file names no role.",
    impact="`submit` refuses the run. If the run file sets no bucket either, the default bucket is "
    "unknown too.",
    fix="Set `role: arn:aws:iam::ACCOUNT:role/NAME`.",
)
ROLE_ACCOUNT = Check(
    "role-account",
    ("error",),
    means="The role and the credentials belong to different accounts.",
    impact="CreateTrainingJob is rejected: a role cannot be passed to a service across accounts.",
    fix="Use a role of the credentials' account, or credentials of the role's account "
    "(`--profile`).",
    source="IAM user guide, Grant a user permissions to pass a role to an AWS service (2026-11)",
)
ROLE_ABSENT = Check(
    "role-absent",
    ("error",),
    means="The account has no role with this ARN.",
    impact="CreateTrainingJob is rejected.",
    fix="Create the role, or correct its ARN, which includes the path.",
    source=_SOURCE,
)
ROLE_TRUST = Check(
    "role-trust",
    ("error",),
    means=f"The role's trust policy does not let `{_SERVICE}` assume it. The check assumes that "
    "the policy's conditions hold.",
    impact="CreateTrainingJob is rejected.",
    fix=f"Add a statement to the trust policy: Allow, `sts:AssumeRole`, Principal Service "
    f"`{_SERVICE}`.",
    source=_SOURCE,
)


def role_findings(role: str | None, session: boto3.Session, account: str) -> Iterator[Finding]:
    """Check that SageMaker can run jobs of ``account`` as ``role``.

    Raises:
        ClientError: IAM rejects the request.
    """
    if role is None:
        return
    from botocore.exceptions import ClientError

    owner, name = role.split(":")[4], role.rsplit("/", 1)[-1]
    if owner != account:
        yield ROLE_ACCOUNT.found(
            "error",
            "role",
            f"{role} belongs to account {owner}, but the credentials belong to {account}",
            "use a role of that account, or another --profile",
        )
        return
    try:
        existing = session.client("iam").get_role(RoleName=name)["Role"]
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchEntity":
            raise
        existing = None
    if existing is None or existing["Arn"] != role:
        similar = f"; a role {existing['Arn']} exists" if existing else ""
        yield ROLE_ABSENT.found(
            "error", "role", f"{role} does not exist{similar}", "create it, or correct the ARN"
        )
        return
    policy = existing["AssumeRolePolicyDocument"]
    assert not isinstance(policy, str)  # boto3 decodes the document
    if not may_assume(policy):
        yield ROLE_TRUST.found(
            "error",
            "role",
            f"the trust policy of {name} does not allow {_SERVICE}",
            f"let {_SERVICE} assume it (sts:AssumeRole)",
        )


def may_assume(policy: Mapping[str, object], service: str = _SERVICE) -> bool:
    """Return whether a trust policy lets ``service`` assume its role, assuming conditions hold."""
    statements = [one for one in _as_list(policy.get("Statement")) if _applies(one, service)]
    effects = {one.get("Effect") for one in statements}
    denied = any(one.get("Effect") == "Deny" and "Condition" not in one for one in statements)
    return "Allow" in effects and not denied


def _applies(statement: Mapping[str, object], service: str) -> bool:
    principal = statement.get("Principal")
    services = _as_list(principal.get("Service")) if isinstance(principal, dict) else [principal]
    actions = {str(action).lower() for action in _as_list(statement.get("Action"))}
    return bool({service, "*"} & set(services)) and bool(
        {"sts:assumerole", "sts:assume*", "sts:*", "*"} & actions
    )


def _as_list(value: object) -> list[Any]:
    """Return IAM's value as a list: IAM may write a list of one as the element itself."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
