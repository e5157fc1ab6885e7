"""Errors that end a command: a one-line message and the exit code that scripts branch on."""

from __future__ import annotations

from enum import IntEnum
from typing import Self

from sm_train.entrypoints.base.error import Error


class ExitCode(IntEnum):
    """Exit codes of the command line."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    PREFLIGHT = 3
    PERMISSION = 4
    CAPACITY = 5
    JOB_FAILED = 6
    OVER_BUDGET = 7
    STALLED = 8
    INTERRUPTED = 130
    TERMINATED = 143


TRANSIENT = (ExitCode.CAPACITY, ExitCode.UNEXPECTED)
"""Errors after which a retry may succeed: throttling, a quota, an unreachable network."""


class UserError(Error):
    """An error that the user can fix: printed as its message, without a traceback.

    ``message`` is one line (or one line per error): the field, the value and the fix. The exit code
    chooses the subclass, as the error number does in :class:`OSError`:
    ``UserError(message, ExitCode.CAPACITY)`` is a :class:`CapacityError`.
    """

    exit_code: ExitCode = ExitCode.USAGE

    def __new__(cls, message: str, exit_code: ExitCode | None = None) -> Self:
        if cls is not UserError:
            return super().__new__(cls, message)
        kind = _KINDS.get(exit_code or ExitCode.USAGE, UserError)
        return super().__new__(kind, message)  # type: ignore[return-value]

    def __init__(self, message: str, exit_code: ExitCode | None = None) -> None:
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code


class ServiceError(UserError):
    """AWS, the Hub or the network failed; a retry may succeed. Exit code 1."""

    exit_code = ExitCode.UNEXPECTED


class UsageError(UserError):
    """An argument, a run file or another file is invalid. Exit code 2."""

    exit_code = ExitCode.USAGE


class PreflightError(UserError):
    """The run would fail or be rejected. Exit code 3."""

    exit_code = ExitCode.PREFLIGHT


class AccessError(UserError):
    """Credentials or a permission are missing. Exit code 4."""

    exit_code = ExitCode.PERMISSION


class CapacityError(UserError):
    """AWS has no capacity, or the account's quota is too small. Exit code 5."""

    exit_code = ExitCode.CAPACITY


class JobFailedError(UserError):
    """A job or a local run failed. Exit code 6."""

    exit_code = ExitCode.JOB_FAILED


class OverBudgetError(UserError):
    """The run costs more than its budget. Exit code 7."""

    exit_code = ExitCode.OVER_BUDGET


class StalledError(UserError):
    """A job makes no progress. Exit code 8."""

    exit_code = ExitCode.STALLED


_KINDS: dict[ExitCode, type[UserError]] = {
    kind.exit_code: kind
    for kind in (
        ServiceError,
        UsageError,
        PreflightError,
        AccessError,
        CapacityError,
        JobFailedError,
        OverBudgetError,
        StalledError,
    )
}
