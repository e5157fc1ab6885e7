"""Checks the job's IAM role: that it exists, that SageMaker may assume it, and its secrets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.iam import PARAMETER_PREFIX
from sm_train.toolkit.checks.finding import Check, Finding

if TYPE_CHECKING:
    import boto3

_SERVICE = "sagemaker.amazonaws.com"

ROLE_UNSET = Check("role-unset", ("warning",))
ROLE_ACCOUNT = Check("role-account", ("error",))
ROLE_ABSENT = Check("role-absent", ("error",))
ROLE_TRUST = Check("role-trust", ("error",))
SECRET_ABSENT = Check("secret-absent", ("warning",))
SECRET_DENIED = Check("secret-denied", ("warning",))


def secret_findings(
    config: RunConfig, session: boto3.Session, region: str, account: str
) -> Iterator[Finding]:
    """Check that the job can read the secrets of its alerts and trackers; reads none.

    Raises:
        ClientError: AWS rejects a request.
    """
    for where, name in config.secret_names.items():
        arn = _secret_arn(name, session, region, account)
        action = "secretsmanager:GetSecretValue"
        if arn is None:
            yield SECRET_ABSENT.found(
                "warning", where, f"{name} does not exist in {region}", "create it"
            )
            continue
        if ":ssm:" in arn:
            action = "ssm:GetParameter"
        if config.role is None:
            continue
        result = session.client("iam").simulate_principal_policy(
            PolicySourceArn=config.role, ActionNames=[action], ResourceArns=[arn]
        )
        decisions = {evaluation["EvalDecision"] for evaluation in result["EvaluationResults"]}
        if decisions != {"allowed"}:
            role = config.role.rsplit("/", 1)[-1]
            yield SECRET_DENIED.found(
                "warning", where, f"{role} may not read {name}", f"allow {action} on {arn}"
            )


def _secret_arn(name: str, session: boto3.Session, region: str, account: str) -> str | None:
    """Return the ARN of a secret or parameter; None if it does not exist."""
    from botocore.exceptions import ClientError

    if ":ssm:" in name or name.startswith(PARAMETER_PREFIX):
        path = name.rpartition(":parameter")[2] if ":ssm:" in name else name
        path = path.removeprefix(PARAMETER_PREFIX)
        filters = [{"Key": "Name", "Option": "Equals", "Values": [path]}]
        ssm = session.client("ssm", region_name=region)
        if not ssm.describe_parameters(ParameterFilters=filters)["Parameters"]:  # type: ignore[arg-type]
            return None
        partition = session.get_partition_for_region(region)
        return f"arn:{partition}:ssm:{region}:{account}:parameter/{path.lstrip('/')}"
    secrets_region = name.split(":")[3] if name.startswith("arn:") else region
    manager = session.client("secretsmanager", region_name=secrets_region)
    try:
        return manager.describe_secret(SecretId=name)["ARN"]
    except ClientError as error:
        if error.response["Error"]["Code"] != "ResourceNotFoundException":
            raise
        return None


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
    statements = [
        statement for statement in _as_list(policy.get("Statement")) if _applies(statement, service)
    ]
    effects = {statement.get("Effect") for statement in statements}
    denied = any(
        statement.get("Effect") == "Deny" and "Condition" not in statement
        for statement in statements
    )
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
