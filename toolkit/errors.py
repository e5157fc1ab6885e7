"""Errors that end a command: a one-line message and the exit code that scripts branch on."""

from __future__ import annotations

from enum import IntEnum


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


TRANSIENT = (ExitCode.CAPACITY, ExitCode.UNEXPECTED)
"""Errors after which a retry may succeed: throttling, a quota, an unreachable network."""


class UserError(Exception):
    """An error that the user can fix: printed as its message, without a traceback.

    ``message`` is one line (or one line per error): the field, the value and the fix.
    """

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
