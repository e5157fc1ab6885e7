"""A run file that cannot be used, as findings: for scripts that read ``check --json``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sm_train.estimators.config.load import RunFileError, dotted
from sm_train.toolkit.checks.finding import Check, Finding

RUN_FILE = Check(
    "run-file",
    ("error",),
    means="The run file is missing, is no YAML, or breaks a rule of its schema. `check` ends with "
    "exit code 2 and looks at nothing else; only `--json` makes findings of it.",
    impact="No command takes the file.",
    fix="Mend every line that is named; `sm-train schema` describes all keys to an editor.",
)
BATCH_ARITHMETIC = Check(
    "batch-arithmetic",
    ("error",),
    means="`effective_batch_size` is not per_device_batch_size × accumulation × instances × "
    "GPUs. BRIA "
    "2.0's published batch of 2048 is such a case: 8 × 2 × 32 GPUs are 512.",
    impact="A run at another batch than its learning rate is for. No command takes the file.",
    fix="Write the accumulation that the finding names, or the batch that is meant.",
)


def run_file_findings(path: Path, error: RunFileError) -> Iterator[Finding]:
    """One for each mistake."""
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
    return message, fix or "mend the run file"
