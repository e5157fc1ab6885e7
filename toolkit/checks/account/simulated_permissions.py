"""Simulates what a run's role and its user may do, on the resources of the run.

The actions are those of the run's policies (``sm-train iam``), statement by statement. IAM decides
by the identity's policies, its permissions boundary, and service control policies without
conditions ("Testing IAM policies with the IAM policy simulator", IAM user guide, read 2026-11).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from sm_train.entrypoints.job_interface.checkpoint_layout import step_folder_name
from sm_train.estimators.config.naming import canary_prefix, job_name, measuring_run
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.iam import Permission, PolicyDocument, policies
from sm_train.estimators.request.images import image_uri
from sm_train.toolkit.checks.finding import Check, Finding

if TYPE_CHECKING:
    import boto3

Identity = Literal["job", "laptop"]

PERMISSION_DENIED = Check("permission-denied", ("error", "warning"))
PERMISSION_CONDITIONAL = Check("permission-conditional", ("warning",))
PERMISSIONS_SIMULATED = Check("permissions-simulated", ("info",))

UNSEEN = (
    "key policies, bucket policies and other policies of resources, conditions of service control "
    "policies, VPC endpoint policies and session policies"
)
"""What decides about a call as well, and what a simulation does not read."""

_WITH_RESOURCE_POLICY = (
    *("codeartifact", "ecr", "elasticfilesystem", "events", "kms", "lambda", "s3"),
    *("secretsmanager", "sns"),
)
"""Services whose resources may allow what an identity's policies do not mention."""

_OPTIONAL = {"PutMetrics", "LogToMlflow", "PublishAlerts", "OfferShell"}
"""Statements of the job's policy without which it trains all the same."""

_REPORTED_ELSEWHERE = {"ReadSecrets", "ReadParameters"}
"""Statements whose denials another check reports, at the key that names the secret."""

_ESSENTIAL = {"sagemaker:CreateTrainingJob", "sagemaker:AddTags", "iam:PassRole"}
"""Actions of the user without which no job starts."""


@dataclass(frozen=True)
class Denial:
    """An action that an identity may not do on a resource of the run.

    ``sid`` names the statement that would allow it. ``explicit`` is set if a policy denies it;
    otherwise none allows it. ``reason`` says what else limits the identity. ``unknown`` are keys of
    conditions that decide, and whose values a simulation cannot know.
    """

    identity: Identity
    sid: str
    action: str
    resource: str
    explicit: bool
    reason: str | None = None
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Simulation:
    """What was simulated: ``name`` of the identity, the number of actions, and denials."""

    identity: Identity
    name: str
    actions: int
    denials: tuple[Denial, ...]


def permission_findings(
    config: RunConfig, session: boto3.Session, region: str
) -> Iterator[Finding]:
    """Report what the run's role and its user may not do.

    Raises:
        ClientError: IAM or KMS rejects a request.
    """
    documents = run_policies(config, region)
    if documents is None or config.role is None:
        return
    simulations = [simulate("job", config.role, documents["job"], config, session, region)]
    user = principal(session)
    if user is not None:
        document = documents["laptop"]
        simulations.append(simulate("laptop", user, document, config, session, region))
    for simulation in simulations:
        yield from _denial_findings(simulation)
    counts = " and ".join(
        f"{simulation.actions - len(simulation.denials)} of {simulation.actions} actions of "
        f"{simulation.name}"
        for simulation in simulations
    )
    missing = "" if user is not None else "; your own credentials are of no user or role of IAM"
    yield PERMISSIONS_SIMULATED.found(
        "info",
        "role",
        f"policies allow {counts}{missing}; not seen are {UNSEEN}",
        "`sm-train doctor RUN --canary` tries them in two short jobs",
    )


def run_policies(config: RunConfig, region: str) -> dict[str, PolicyDocument] | None:
    """Return the run's policies; None if it has no image, which another check reports."""
    try:
        return policies(config, region, image_uri(config, region))
    except ValueError:
        return None


def principal(session: boto3.Session) -> str | None:
    """Return the ARN of the user or role of the credentials; None for others, such as root.

    Raises:
        ClientError: STS or IAM rejects the request.
    """
    arn = session.client("sts").get_caller_identity()["Arn"]
    if re.fullmatch(r"arn:[^:]+:iam::\d{12}:user/.+", arn):
        return arn
    if match := re.fullmatch(r"arn:[^:]+:sts::\d{12}:assumed-role/([^/]+)/.+", arn):
        # The role's path is not part of the session's ARN.
        return session.client("iam").get_role(RoleName=match[1])["Role"]["Arn"]
    return None


def simulate(
    identity: Identity,
    arn: str,
    document: PolicyDocument,
    config: RunConfig,
    session: boto3.Session,
    region: str,
) -> Simulation:
    """Simulate every action of ``document`` for the user or role ``arn``.

    Raises:
        ClientError: IAM or KMS rejects a request.
    """
    client: Any = session.client("iam")
    denials: list[Denial] = []
    count = 0
    for permission in cast("list[Permission]", document["Statement"]):
        for resources, context in _cases(permission, config, session):
            count += len(permission["Action"]) * len(resources)
            pages = client.get_paginator("simulate_principal_policy").paginate(
                PolicySourceArn=arn,
                ActionNames=permission["Action"],
                ResourceArns=resources,
                ContextEntries=[*context, *_common_context(region)],
            )
            for page in pages:
                for result in page["EvaluationResults"]:
                    denials += _denials(identity, permission["Sid"], result, resources)
    return Simulation(identity, arn.rsplit("/", 1)[-1], count, tuple(denials))


def missing_permissions(document: PolicyDocument, denials: Sequence[Denial]) -> list[Permission]:
    """Return the statements of ``document``, with those of their actions that are denied."""
    denied = {(denial.sid, denial.action) for denial in denials}
    found: list[Permission] = []
    for permission in cast("list[Permission]", document["Statement"]):
        actions = [name for name in permission["Action"] if (permission["Sid"], name) in denied]
        if actions:
            found.append(permission | {"Action": actions})
    return found


def _denials(
    identity: Identity, sid: str, result: Mapping[str, Any], resources: list[str]
) -> Iterator[Denial]:
    specific = result.get("ResourceSpecificResults") or [
        {"EvalResourceName": name, "EvalResourceDecision": result["EvalDecision"]}
        for name in resources
    ]
    for decision in specific:
        if decision["EvalResourceDecision"] == "allowed":
            continue
        detail = {**result, **decision}
        unknown = decision.get("MissingContextValues") or result.get("MissingContextValues") or ()
        explicit = decision["EvalResourceDecision"] == "explicitDeny"
        yield Denial(
            identity,
            sid,
            result["EvalActionName"],
            decision["EvalResourceName"],
            explicit,
            _limit(detail),
            () if explicit else tuple(unknown),
        )


def _limit(detail: Mapping[str, Any]) -> str | None:
    """Return what limits the identity besides its own policies."""
    organizations = detail.get("OrganizationsDecisionDetail", {})
    if organizations.get("AllowedByOrganizations") is False:
        return "a service control policy"
    boundary = detail.get("PermissionsBoundaryDecisionDetail", {})
    if boundary.get("AllowedByPermissionsBoundary") is False:
        return "the permissions boundary"
    return None


# ---------------------------------------------------------------------- resources of the run


def _cases(
    permission: Permission, config: RunConfig, session: boto3.Session
) -> Iterator[tuple[list[str], list[dict[str, Any]]]]:
    """Yield exact resources of a statement with the context of a call about them."""
    found = (_exact(pattern, config) for pattern in permission["Resource"])
    resources = [resource for resource in found if resource is not None]
    conditions = [
        (key, values if isinstance(values, list) else [values], operator)
        for operator, keys in permission.get("Condition", {}).items()
        for key, values in keys.items()
    ]
    if not conditions:
        if resources:
            yield resources, []
        return
    [(key, values, operator)] = conditions
    if key == "kms:ResourceAliases":
        for alias in values:
            for resource in resources:
                yield [_key_of(alias, resource, session)], [_entry(key, [alias], "stringList")]
        return
    for value in values:
        text = _exact_text(value, config)
        if text is not None and resources:
            kind = "stringList" if operator.startswith("ForAnyValue") else "string"
            yield resources, [_entry(key, [text], kind)]


def _entry(key: str, values: list[str], kind: str) -> dict[str, Any]:
    return {"ContextKeyName": key, "ContextKeyValues": values, "ContextKeyType": kind}


def _common_context(region: str) -> list[dict[str, Any]]:
    """Return what conditions of many organizations ask for, and what every call of ours has."""
    return [
        _entry("aws:RequestedRegion", [region], "string"),
        _entry("aws:SecureTransport", ["true"], "boolean"),
    ]


def _key_of(alias: str, resource: str, session: boto3.Session) -> str:
    """Return the ARN of the key with ``alias``, in the region of the pattern ``resource``."""
    client: Any = session.client("kms", region_name=resource.split(":")[3])
    arn: str = client.describe_key(KeyId=alias)["KeyMetadata"]["Arn"]
    return arn


def _is_short_jobs(text: str, config: RunConfig) -> bool:
    """Return whether a pattern is about measurements or canaries, which a run may never have."""
    names = (f"{measuring_run(config.name)}--", f"{measuring_run(config.name)}/")
    return any(name.lower() in text.lower() for name in (*names, canary_prefix(config.name)))


def _exact(pattern: str, config: RunConfig) -> str | None:
    """Return a resource that the run uses and that ``pattern`` matches."""
    if _is_short_jobs(pattern, config):
        return None
    if not set("*?") & set(pattern) or pattern == "*" or pattern.endswith(":key/*"):
        return pattern
    stage = config.stages[0].name
    job = job_name(config.name, stage, 1)
    if pattern.endswith(f"/{config.name}/*"):
        first = step_folder_name(config.checkpoint.every_steps or 1)
        return f"{pattern[:-1]}checkpoints/{stage}/{first}/manifest.json"
    if pattern.endswith("--*"):
        # Patterns of jobs are in lower case, as SageMaker writes names into ARNs.
        name = f"{job}/algo-1-1" if ":log-stream:" in pattern else job.lower()
        return f"{pattern[: -len(config.name) - len('--*')]}{name}"
    if pattern.endswith("TrainingJobs:*"):
        return f"{pattern[:-1]}log-stream:{job}/algo-1-1"
    if pattern.endswith("/*"):
        return f"{pattern[:-1]}0.tar"
    return pattern.rstrip("*").replace("-??????", "-AbCdEf")


def _exact_text(pattern: str, config: RunConfig) -> str | None:
    """Return a value of a condition that the run's calls have; None if only short jobs do."""
    return None if _is_short_jobs(pattern, config) else pattern.rstrip("*")


# ---------------------------------------------------------------------- findings


def _denial_findings(simulation: Simulation) -> Iterator[Finding]:
    where = "role" if simulation.identity == "job" else "--profile"
    by_statement: dict[tuple[str, bool, str | None, tuple[str, ...]], list[Denial]] = {}
    for denial in simulation.denials:
        if denial.sid in _REPORTED_ELSEWHERE:
            continue
        key = (denial.sid, denial.explicit, denial.reason, denial.unknown)
        by_statement.setdefault(key, []).append(denial)
    only = simulation.identity
    for (_, explicit, reason, unknown), denials in by_statement.items():
        actions = ", ".join(dict.fromkeys(denial.action for denial in denials))
        resources = list(dict.fromkeys(denial.resource for denial in denials))
        about = f"{actions} on {resources[0]}"
        if len(resources) > 1:
            about += f" and {len(resources) - 1} more"
        if unknown:
            yield PERMISSION_CONDITIONAL.found(
                "warning",
                where,
                f"{simulation.name} may do {about} under conditions on {', '.join(unknown)} only",
                "compare them with the run, or allow the actions without them",
            )
            continue
        cause = f"{reason} denies it" if reason else "a policy denies it"
        cause = cause if explicit or reason else "no policy allows it"
        yield PERMISSION_DENIED.found(
            "error" if _fails_for_certain(simulation.identity, denials) else "warning",
            where,
            f"{simulation.name} may not do {about}: {cause}",
            f"attach what `sm-train iam RUN --missing --only {only}` prints"
            if not explicit and not reason
            else "ask for a change of that policy",
        )


def _fails_for_certain(identity: Identity, denials: Sequence[Denial]) -> bool:
    """Return whether the run, or its start, fails by these denials whatever else is allowed."""
    first = denials[0]
    may_be_allowed_elsewhere = (
        not first.explicit and first.action.partition(":")[0] in _WITH_RESOURCE_POLICY
    )
    if identity == "laptop":
        is_essential = any(denial.action in _ESSENTIAL for denial in denials)
    else:
        is_essential = first.sid not in _OPTIONAL
    return is_essential and not may_be_allowed_elsewhere
