"""What AWS would not say: one refused call costs one check, never the rest of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from sm_train.toolkit.aws.errors import is_credential_error, is_throttling
from sm_train.toolkit.checks.finding import Check, Finding

T = TypeVar("T")

UNCHECKED = Check(
    "unchecked",
    ("warning",),
    means="AWS refused or did not answer a call that a check needs; the other checks went on. "
    "With credentials that are missing or have expired, `check` ends with exit code 4 instead.",
    impact="Nothing by itself: what the check would have found is unknown.",
    fix="Allow the action that the finding names, try again where AWS was busy, or look for "
    "yourself.",
)


def attempt(what: str, where: str, action: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """``findings``; where a call of theirs is refused, that ``what`` is unknown.

    ``action`` is IAM's name of the call.

    Raises:
        ClientError: the credentials are not valid (any more): so it would be with every call.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield from findings
    except (BotoCoreError, ClientError) as error:
        yield _refused(what, where, action, error)


def ask(
    what: str, where: str, action: str, call: Callable[[], T]
) -> tuple[T | None, list[Finding]]:
    """What ``call`` answers, or None and the finding; otherwise as :func:`attempt`."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call(), []
    except (BotoCoreError, ClientError) as error:
        return None, [_refused(what, where, action, error)]


def _refused(what: str, where: str, action: str, error: Any) -> Finding:
    answer = getattr(error, "response", None)
    if answer is None:  # it never came: no network, no such address
        return UNCHECKED.found(
            "warning", where, f"{what}: could not be checked: {error}", "try again"
        )
    if is_credential_error(error):
        raise error
    fix = "try again" if is_throttling(error) else f"allow {action}, or look for yourself"
    code = answer["Error"].get("Code", "an error")
    return UNCHECKED.found(
        "warning", where, f"{what}: could not be checked: AWS answers {code}", fix
    )
