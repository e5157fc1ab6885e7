"""Turns the errors of an invalid run file into findings, for readers of ``check --json``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sm_train.estimators.config.load import RunFileError, dotted
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.placeholders import find_placeholders

RUN_FILE = Check(
    "run-file",
    ("error",),
    means="The run file is missing, is not valid YAML, or violates its schema. `check` exits with "
    "code 2 and checks nothing else; only `--json` reports these errors as findings.",
    impact="No command accepts the file.",
    fix="Correct every line that is named; `sm-train schema` describes all keys to an editor.",
)
BATCH_ARITHMETIC = Check(
    "batch-arithmetic",
    ("error",),
    means="`effective_batch_size` is not per_device_batch_size × gradient_accumulation_steps × "
    "instances × GPUs. BRIA 2.0's published batch of 2048 is an example: 8 × 2 × 32 GPUs are 512.",
    impact="The run would train at another batch size than its learning rate was chosen for. No "
    "command accepts the file.",
    fix="Set the gradient_accumulation_steps in the finding, or the intended batch size.",
)
PLACEHOLDER = Check(
    "placeholder",
    ("error",),
    means="The run file holds an account or a bucket of documentation, such as 111122223333 or "
    "my-bucket, which `sm-train init` writes where it does not know yours.",
    impact="Nobody can use them: `submit` refuses the run, and `submit --dry-run` warns.",
    fix="Write your own role and buckets; `sm-train init` lists those of your account.",
    source="S3 user guide, General purpose bucket naming rules (2026-11)",
)


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
