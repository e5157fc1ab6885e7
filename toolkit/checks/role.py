"""The job's IAM role: whether SageMaker may take it on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sm_train.toolkit.checks.finding import Check, Finding

_SERVICE = "sagemaker.amazonaws.com"
_SOURCE = "SageMaker developer guide, How to use SageMaker AI execution roles (2026-11)"

ROLE_UNSET = Check(
    "role-unset",
    ("warning",),
    means="The run file names no role.",
    impact="`submit` refuses the run; without a bucket of the run file's own its default bucket is "
    "not known either.",
    fix="Write `role: arn:aws:iam::ACCOUNT:role/NAME`.",
)
ROLE_ACCOUNT = Check(
    "role-account",
    ("error",),
    means="The role belongs to another account than the credentials.",
    impact="CreateTrainingJob is refused: a role cannot be passed to a service across accounts.",
    fix="Name a role of the account, or take the credentials of the role's (`--profile`).",
    source="IAM user guide, Grant a user permissions to pass a role to an AWS service (2026-11)",
)
ROLE_ABSENT = Check(
    "role-absent",
    ("error",),
    means="The account has no role of this name.",
    impact="CreateTrainingJob is refused.",
    fix="Make the role, or look for a slip in its ARN. The path belongs to it.",
    source=_SOURCE,
)
ROLE_TRUST = Check(
    "role-trust",
    ("error",),
    means=f"The role's trust policy does not let `{_SERVICE}` assume it. Conditions of a policy "
    "are taken to hold.",
    impact="CreateTrainingJob is refused.",
    fix=f"Add a statement to the trust policy: Allow, `sts:AssumeRole`, Principal Service "
    f"`{_SERVICE}`.",
    source=_SOURCE,
)


def role_findings(role: str | None, session: Any, account: str) -> Iterator[Finding]:
    """Whether SageMaker can run jobs of ``account`` as ``role``.

    Raises:
        ClientError: IAM refuses to say.
    """
    if role is None:
        return
    from botocore.exceptions import ClientError

    owner, name = role.split(":")[4], role.rsplit("/", 1)[-1]
    if owner != account:
        yield ROLE_ACCOUNT.found(
            "error",
            "role",
            f"{role} is of account {owner}, the credentials are of {account}",
            "name a role of the account, or give another --profile",
        )
        return
    try:
        found = session.client("iam").get_role(RoleName=name)["Role"]
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchEntity":
            raise
        found = None
    if found is None or found["Arn"] != role:
        there = f"; there is {found['Arn']}" if found else ""
        yield ROLE_ABSENT.found(
            "error", "role", f"{role} does not exist{there}", "make it, or mend the ARN"
        )
    elif not may_assume(found["AssumeRolePolicyDocument"]):
        yield ROLE_TRUST.found(
            "error",
            "role",
            f"the trust policy of {name} lacks {_SERVICE}",
            f"let {_SERVICE} assume it (sts:AssumeRole)",
        )


def may_assume(policy: dict[str, Any], service: str = _SERVICE) -> bool:
    """Whether a trust policy lets ``service`` assume its role; conditions are taken to hold."""
    statements = [one for one in _listed(policy.get("Statement")) if _names(one, service)]
    effects = {one.get("Effect") for one in statements}
    denied = any(one.get("Effect") == "Deny" and "Condition" not in one for one in statements)
    return "Allow" in effects and not denied


def _names(statement: dict[str, Any], service: str) -> bool:
    principal = statement.get("Principal")
    services = _listed(principal.get("Service")) if isinstance(principal, dict) else [principal]
    actions = {str(action).lower() for action in _listed(statement.get("Action"))}
    return bool({service, "*"} & set(services)) and bool(
        {"sts:assumerole", "sts:assume*", "sts:*", "*"} & actions
    )


def _listed(value: Any) -> list[Any]:
    """IAM writes a list of one as the one."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
