"""Turns rejected AWS calls into findings, so that one rejected call costs only one check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from sm_train.toolkit.aws.aws_errors import is_credential_error, may_succeed_later
from sm_train.toolkit.checks.finding import Check, Finding

if TYPE_CHECKING:
    from botocore.exceptions import BotoCoreError, ClientError

T = TypeVar("T")

UNCHECKED = Check("unchecked", ("warning",))


def attempt(
    subject: str, where: str, action: str, findings: Iterator[Finding]
) -> Iterator[Finding]:
    """Yield ``findings``; if AWS rejects one of their calls, report ``subject`` as unchecked.

    ``action`` is the IAM name of the call.

    Raises:
        ClientError: the credentials are invalid or expired, so every other call would fail too.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield from findings
    except (BotoCoreError, ClientError) as error:
        yield _unchecked(subject, where, action, error)


def call_or_finding(
    subject: str, where: str, action: str, call: Callable[[], T]
) -> tuple[T | None, list[Finding]]:
    """Return the result of ``call``, or None and a finding; otherwise as :func:`attempt`."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call(), []
    except (BotoCoreError, ClientError) as error:
        return None, [_unchecked(subject, where, action, error)]


def _unchecked(
    subject: str, where: str, action: str, error: BotoCoreError | ClientError
) -> Finding:
    response = getattr(error, "response", None)
    if response is None:  # no response at all: no network, or no such address
        return UNCHECKED.found(
            "warning", where, f"{subject}: could not be checked: {error}", "retry"
        )
    if is_credential_error(error):
        raise error
    fix = "retry" if may_succeed_later(error) else f"allow {action}, or check manually"
    if owner := response["Error"].get("ExpectedOwner"):
        fix += f"; or name the bucket's owner in bucket_owners, if it is not account {owner}"
    code = response["Error"].get("Code", "an error")
    return UNCHECKED.found(
        "warning", where, f"{subject}: could not be checked: AWS responded with {code}", fix
    )
