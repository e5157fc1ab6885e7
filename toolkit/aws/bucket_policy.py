"""What a bucket does with the uploads of SageMaker, which name no encryption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

_HEADERS = (
    "s3:x-amz-server-side-encryption",
    "s3:x-amz-server-side-encryption-aws-kms-key-id",
)
"""Condition keys that a request without encryption headers lacks."""

Denial = Literal["no", "perhaps", "yes"]


def denies_unencrypted(policy: Mapping[str, Any] | None, arn: str) -> Denial:
    """Return whether ``policy`` denies a put of the object ``arn`` that names no encryption.

    It is ``perhaps`` if a statement that denies it also depends on the caller or on other
    conditions.
    """
    found = [_denial(statement, arn) for statement in _as_list((policy or {}).get("Statement"))]
    return "yes" if "yes" in found else "perhaps" if "perhaps" in found else "no"


def may_be_same_key(named: str, stored: str | None) -> bool:
    """Return whether two names may be those of one KMS key; an alias may name any."""
    if stored is None or "alias/" in named or "alias/" in stored:
        return stored is not None
    return named.rpartition("/")[2] == stored.rpartition("/")[2]


def _denial(statement: Mapping[str, Any], arn: str) -> Denial:
    if statement.get("Effect") != "Deny":
        return "no"
    actions = [str(action).lower() for action in _as_list(statement.get("Action"))]
    resources = _as_list(statement.get("Resource"))
    if not any(fnmatchcase("s3:putobject", action) for action in actions):
        return "no"
    if not any(fnmatchcase(arn, str(resource)) for resource in resources):
        return "no"
    depends_on_header, depends_on_others = False, False
    for operator, keys in statement.get("Condition", {}).items():
        for key, values in keys.items():
            if key.lower() not in _HEADERS:
                depends_on_others = True
            elif not _holds_without(operator, values):
                return "no"
            else:
                depends_on_header = True
    if not depends_on_header:
        return "no"  # what it denies, it denies with encryption as well
    is_everyone = statement.get("Principal") in ("*", {"AWS": "*"}, {"AWS": ["*"]})
    return "yes" if is_everyone and not depends_on_others else "perhaps"


def _holds_without(operator: str, values: Any) -> bool:
    """Return whether a condition holds if its key is not in the request.

    A negated operator holds then, and so does one with IfExists (IAM user guide, "IAM JSON policy
    elements: Condition operators", read 2026-11).
    """
    name = operator.rpartition(":")[2]
    if name == "Null":
        return "true" in [str(value).lower() for value in _as_list(values)]
    return "Not" in name or name.endswith("IfExists")


def _as_list(value: Any) -> Sequence[Any]:
    """Return a value of a policy, which may be alone or in a list, as a list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
