"""Determines what a user names.

Every command that takes a run or files starts here, so all commands read the same text alike.
"""

from __future__ import annotations

import re
from pathlib import Path

from sm_train.toolkit.errors import UserError
from sm_train.toolkit.platforms.target import Kind, RunPlace, Target
from sm_train.toolkit.run_file import RUN_FILE_ENDINGS

_CHECKPOINTS = re.compile(
    r"(?P<root>s3://[^/]+/(?P<run>[A-Za-z0-9-]+)/checkpoints)"
    r"(?:/(?P<stage>[A-Za-z0-9-]+)(?:/step-\d+)?)?/?"
)
"""An address of a stage's checkpoints (estimators/config/naming.py), or of one of them."""


def parse_target(text: str) -> Target:
    """Return what ``text`` names. Nothing but the disk is asked.

    Raises:
        UserError: nothing here has this path, and it is no name either.
    """
    path = Path(text)
    if text.startswith("s3://"):
        return Target(text, Kind.ADDRESS)
    if text.endswith(RUN_FILE_ENDINGS):
        return Target(text, Kind.RUN_FILE)
    # A run file is the usual target of `cost` and `check`, which start without these modules.
    from sm_train.toolkit.jobs.training_job import is_valid_job_name
    from sm_train.toolkit.platforms.adapters import claim

    if text and (place := claim(path)) is not None:
        return Target(text, Kind.RUN_FOLDER, place)
    if text and path.is_dir():
        return Target(text, Kind.FOLDER)
    if text and path.exists():
        return Target(text, Kind.FILE)
    if is_valid_job_name(text):
        return Target(text, Kind.NAME)
    raise UserError(
        f"{text}: no such file or folder; name a run file, a run, a job or the folder of a local "
        "run"
    )


def run_target(text: str) -> Target:
    """Return the run that ``text`` names, on any platform.

    A file counts as a run file, whatever its ending. The address of a run's checkpoints stands for
    the run, that of a stage's checkpoints for the stage.

    Raises:
        UserError: it names something else.
    """
    target = parse_target(text)
    if target.kind is Kind.FILE:
        return Target(text, Kind.RUN_FILE)
    if found := _CHECKPOINTS.fullmatch(text):
        run, stage = found["run"], found["stage"]
        return Target(
            f"{run}--{stage}" if stage else run, Kind.NAME, RunPlace(found["root"], stage)
        )
    if target.kind is Kind.FOLDER:
        from sm_train.toolkit.jobs.training_job import is_valid_job_name

        if is_valid_job_name(text) and not any(target.path.glob("*.log")):
            return Target(text, Kind.NAME)  # a run that is named like a folder, as of its images
        raise UserError(f"{text}: holds no local run; name its folder, a run file, a run or a job")
    if target.kind is Kind.ADDRESS:
        raise UserError(
            f"{text}: is an address in S3; name the run whose checkpoints are there, or its run "
            "file"
        )
    return target


def log_target(text: str) -> Target:
    """Return what ``text`` names: a run on any platform, or log files.

    Raises:
        UserError: it names something else.
    """
    target = parse_target(text)
    return run_target(text) if target.kind is Kind.ADDRESS else target
