"""The base class of the errors that ``import sm_train`` raises, on a laptop and in a job."""

from __future__ import annotations


class Error(Exception):
    """An error that the caller can fix.

    Its message is one line, or one line for each mistake: the field, the value and the fix.
    """

    exit_code: int = 2
    """The exit code with which the command line reports the same error."""
