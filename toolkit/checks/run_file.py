"""Turns the errors of an invalid run file into findings, for readers of ``check --json``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sm_train.estimators.config.load import RunFileError, dotted
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.run_file.placeholders import find_placeholders

RUN_FILE = Check("run-file", ("error",))
BATCH_ARITHMETIC = Check("batch-arithmetic", ("error",))
PLACEHOLDER = Check("placeholder", ("error",))
REQUEST_PATCH = Check("request-patch", ("error",))


def placeholder_findings(config: RunConfig) -> Iterator[Finding]:
    """Return a finding for each value of documentation in the run file."""
    for placeholder in find_placeholders(config):
        message = f"{placeholder.value} is a placeholder of documentation"
        yield PLACEHOLDER.found("error", dotted(placeholder.path), message, placeholder.fix)


def run_file_findings(path: Path, error: RunFileError) -> Iterator[Finding]:
    """Return one finding per error in the run file at ``path``."""
    if not error.problems:
        yield RUN_FILE.found("error", str(path), *_message_and_fix(str(error)))
    for problem in error.problems:
        where = dotted(problem.path)
        value = "" if problem.value is None else f"{problem.value!r} "
        line = _message_and_fix(value + problem.message)
        if problem.path[-1:] == ("effective_batch_size",):
            yield BATCH_ARITHMETIC.found("error", where, *line)
        else:
            yield RUN_FILE.found("error", where, *line)


def _message_and_fix(line: str) -> tuple[str, str]:
    message, _, fix = line.partition("; ")
    return message, fix or "correct the run file"
