"""IAM's SimulatePrincipalPolicy, which moto lacks: it evaluates the policies that moto stores.

It knows the operators of sm-train's policies. As IAM does, it reports the keys of conditions for
which the request names no value, and results for each resource.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape


def simulate_principal_policy(body: str, account: str) -> tuple[int, bytes]:
    """Answer a request: the status, and the XML document."""
    fields = {key: values[0] for key, values in parse_qs(body).items()}
    policies = _policies_of(fields["PolicySourceArn"], account)
    if policies is None:
        error = "<Error><Code>NoSuchEntity</Code><Message>no such entity</Message></Error>"
        return 404, f"<ErrorResponse>{error}</ErrorResponse>".encode()
    resources = list(_members(fields, "ResourceArns.member"))
    context = dict(_context(fields))
    results = "".join(
        _result(action, resources, policies, context)
        for action in _members(fields, "ActionNames.member")
    )
    return 200, (
        "<SimulatePrincipalPolicyResponse><SimulatePrincipalPolicyResult>"
        f"<IsTruncated>false</IsTruncated><EvaluationResults>{results}</EvaluationResults>"
        "</SimulatePrincipalPolicyResult></SimulatePrincipalPolicyResponse>"
    ).encode()


def _policies_of(arn: str, account: str) -> list[dict[str, Any]] | None:
    """Return the inline and attached policies of a user or role; None if moto has none such."""
    from moto.backends import get_backend

    iam = get_backend("iam")[account]["aws"]
    entities = [*iam.roles.values(), *iam.users.values()]
    for entity in entities:
        if entity.arn == arn:
            inline = entity.policies
            texts = [
                *(inline.values() if isinstance(inline, dict) else inline),
                *(policy.document for policy in entity.managed_policies.values()),
            ]
            return [json.loads(unquote(str(text))) for text in texts]
    return None


def _members(fields: Mapping[str, str], prefix: str) -> Iterator[str]:
    number = 1
    while f"{prefix}.{number}" in fields:
        yield fields[f"{prefix}.{number}"]
        number += 1


def _context(fields: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    number = 1
    while (name := fields.get(f"ContextEntries.member.{number}.ContextKeyName")) is not None:
        values = f"ContextEntries.member.{number}.ContextKeyValues.member"
        yield name, list(_members(fields, values))
        number += 1


def _result(
    action: str,
    resources: list[str],
    policies: list[dict[str, Any]],
    context: Mapping[str, list[str]],
) -> str:
    specific = []
    decisions = []
    for resource in resources:
        decision, missing = _decide(action, resource, policies, context)
        decisions.append(decision)
        keys = "".join(f"<member>{escape(key)}</member>" for key in sorted(missing))
        specific.append(
            f"<member><EvalResourceName>{escape(resource)}</EvalResourceName>"
            f"<EvalResourceDecision>{decision}</EvalResourceDecision>"
            f"<MissingContextValues>{keys}</MissingContextValues></member>"
        )
    worst = max(decisions, key=("allowed", "implicitDeny", "explicitDeny").index)
    return (
        f"<member><EvalActionName>{action}</EvalActionName>"
        f"<EvalResourceName>*</EvalResourceName><EvalDecision>{worst}</EvalDecision>"
        f"<ResourceSpecificResults>{''.join(specific)}</ResourceSpecificResults></member>"
    )


def _decide(
    action: str, resource: str, policies: list[dict[str, Any]], context: Mapping[str, list[str]]
) -> tuple[str, set[str]]:
    """Return the decision, and the keys of conditions without a value."""
    decision, missing = "implicitDeny", set()
    for policy in policies:
        for statement in _list(policy["Statement"]):
            if not _matches(action, statement["Action"], fold=True):
                continue
            if not _matches(resource, statement["Resource"]):
                continue
            fulfilled, unknown = _conditions(statement.get("Condition", {}), context)
            missing |= unknown
            if not fulfilled:
                continue
            if statement["Effect"] == "Deny":
                return "explicitDeny", set()
            decision = "allowed"
    return decision, set() if decision == "allowed" else missing


def _conditions(
    conditions: Mapping[str, Mapping[str, Any]], context: Mapping[str, list[str]]
) -> tuple[bool, set[str]]:
    fulfilled, unknown = True, set()
    for operator, keys in conditions.items():
        for key, wanted in keys.items():
            values = context.get(key)
            if values is None:
                if not operator.endswith("IfExists"):
                    fulfilled = False
                    unknown.add(key)
                continue
            if operator.startswith("StringNot"):
                fulfilled &= not any(_matches(value, wanted) for value in values)
            else:
                fulfilled &= any(_matches(value, wanted) for value in values)
    return fulfilled, unknown


def _matches(text: str, patterns: Any, *, fold: bool = False) -> bool:
    if fold:
        return any(fnmatchcase(text.lower(), str(pattern).lower()) for pattern in _list(patterns))
    return any(fnmatchcase(text, str(pattern)) for pattern in _list(patterns))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
