"""What ends a command: one line for a person and the exit code that scripts branch on."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The command line's contract."""

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
"""Refusals after which one may ask again: throttling, a quota, a network that is away."""


class UserError(Exception):
    """A mistake or mishap that a person can mend: shown as its message alone.

    ``message`` is one line (or one line per mistake): the field, the value and the mend.
    """

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
