"""Determines what a user names: a run file, a local run, files here, an address in S3, or a name.

Every command that takes one of them starts here, so all commands read the same text alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.toolkit.errors import UserError
from sm_train.toolkit.run_file import RUN_FILE_ENDINGS

if TYPE_CHECKING:
    from sm_train.toolkit.jobs.local_folder import LocalRunFolder


_CHECKPOINTS = re.compile(
    r"(?P<root>s3://[^/]+/(?P<run>[A-Za-z0-9-]+)/checkpoints)"
    r"(?:/(?P<stage>[A-Za-z0-9-]+)(?:/step-\d+)?)?/?"
)
"""An address of a stage's checkpoints (estimators/config/naming.py), or of one of them."""


class Kind(StrEnum):
    """What a target is. The values are part of error messages."""

    RUN_FILE = "a run file"
    LOCAL_RUN = "a local run"
    FOLDER = "a folder"
    FILE = "a file"
    ADDRESS = "an address in S3"
    NAME = "a name"


@dataclass(frozen=True)
class Target:
    """What ``text`` names. ``local`` is the run of a local run's folder, None of others.

    A *name* is that of a run, of a stage (``RUN--STAGE``) or of a job on SageMaker. Only AWS knows
    whether there is one. ``root`` is the place of a run's checkpoints that the text leads to, a
    folder or an S3 prefix, and ``stage`` the stage that it names there.
    """

    text: str
    kind: Kind
    local: LocalRunFolder | None = None
    root: str | None = None
    stage: str | None = None

    @property
    def path(self) -> Path:
        """The path on this machine; of a local run its folder, wherever the text leads to it."""
        return Path(self.text) if self.local is None else self.local.target

    @property
    def address(self) -> str:
        """The text that leads to the same run again, with the place of its checkpoints."""
        if self.root is None or self.kind is not Kind.NAME:
            return self.text
        return self.root if self.stage is None else f"{self.root}/{self.stage}"

    @property
    def on_sagemaker(self) -> bool:
        """Whether the target stands for jobs on SageMaker."""
        return self.kind in (Kind.RUN_FILE, Kind.NAME)


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
    from sm_train.toolkit.jobs.local_folder import find_local_run
    from sm_train.toolkit.jobs.training_job import is_valid_job_name

    if (local := find_local_run(path)) is not None:
        return Target(text, Kind.LOCAL_RUN, local)
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
    """Return the run that ``text`` names: on SageMaker, or here.

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
        name = f"{run}--{stage}" if stage else run
        return Target(name, Kind.NAME, root=found["root"], stage=stage)
    if target.kind is Kind.FOLDER:
        from sm_train.toolkit.clusters.find_cluster_run import folder_root
        from sm_train.toolkit.jobs.training_job import is_valid_job_name

        if (place := folder_root(target.path)) is not None:
            return Target(text, Kind.FOLDER, root=place[0], stage=place[1])
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
    """Return what ``text`` names: a run on SageMaker, on a cluster or here, or log files.

    Raises:
        UserError: it names something else.
    """
    from sm_train.toolkit.clusters.find_cluster_run import folder_root

    target = parse_target(text)
    has_records = target.kind is Kind.FOLDER and folder_root(target.path) is not None
    return run_target(text) if target.kind is Kind.ADDRESS or has_records else target


@contextmanager
def local_run_hint(name: str) -> Iterator[None]:
    """Add the path of the local run called ``name``, if there is one, to an error."""
    from sm_train.toolkit.jobs.local_folder import DEFAULT_FOLDER, find_local_run

    try:
        yield
    except UserError as error:
        path = DEFAULT_FOLDER / name
        if find_local_run(path) is None:
            raise
        raise UserError(f"{error}; the run on this machine is {path}", error.exit_code) from None
