"""Finds the run that a user names, wherever it is, and opens its settings.

Every command that takes a run or files starts here, so all commands read the same text alike. The
settings are those of the run file, of the folder on this machine or of the run's record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.memory.sharding_choice import with_sharding
from sm_train.toolkit.platforms.adapters import NoRunError, adapters, claim
from sm_train.toolkit.platforms.placed_run import PlacedRun
from sm_train.toolkit.platforms.target import Kind, RunPlace, Target
from sm_train.toolkit.records.local_folder import DEFAULT_FOLDER
from sm_train.toolkit.run_file.run_file import RUN_FILE_ENDINGS, load, load_recorded

if TYPE_CHECKING:
    from sm_train.estimators.config.schema import RunConfig


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
    from sm_train.toolkit.platforms.adapters import claim
    from sm_train.toolkit.records.training_job import is_valid_job_name

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
        from sm_train.toolkit.records.training_job import is_valid_job_name

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


def find_run(text: str, options: dict[str, Any]) -> PlacedRun:
    """Return the run that a user names; one with jobs on several platforms where the newest is.

    ``options`` are the global ones (:class:`~sm_train.toolkit.platforms.adapters.Adapter`).

    Raises:
        UserError: there is no such run, or a platform returns an error.
    """
    target = run_target(text)
    with local_run_hint(target):
        return _find(target, options)


def _find(target: Target, options: dict[str, Any]) -> PlacedRun:
    found: PlacedRun | None = None
    problem: UserError | None = None
    for adapter in adapters():
        try:
            run = adapter.find(target, options)
        except NoRunError as error:
            problem = error
        except UserError:
            if found is None:
                raise
        else:
            found = _newer(found, run)
            if found is not None and found.is_only_place:
                return found
    for adapter in adapters():
        found = _newer(found, adapter.find_related(target, options, found))
    if found is None:
        raise problem or UserError(f"{target.text}: holds no run; name a run file, a run or a job")
    return found


@contextmanager
def local_run_hint(target: Target) -> Iterator[None]:
    """Add the path of the run on this machine that has this name, if there is one, to an error."""
    try:
        yield
    except UserError as error:
        here = claim(DEFAULT_FOLDER / target.text) if target.kind is Kind.NAME else None
        if here is None:
            raise
        raise UserError(f"{error}; the run on this machine is {here}", error.exit_code) from None


def _newer(found: PlacedRun | None, other: PlacedRun | None) -> PlacedRun | None:
    """Return where the newest job is; an equal claim is that of the platform asked first."""
    if found is None or other is None:
        return other if found is None else found
    starts = [run.latest_start() for run in (found, other)]
    return other if starts[1] is not None and (starts[0] or 0.0) < starts[1] else found


@dataclass(frozen=True)
class OpenedConfig:
    """The settings of a run, and the folder that relative paths in them start from.

    ``region`` is the run's home if it was found by name, else None, and ``stage`` the stage that
    the user named. ``origin`` says where settings come from that no run file here holds.
    """

    config: RunConfig
    folder: Path
    region: str | None = None
    stage: str | None = None
    origin: str | None = None


def open_config(text: str, changes: Sequence[str], options: dict[str, Any]) -> OpenedConfig:
    """Return the settings of the run that ``text`` names, with ``changes`` (``--set``).

    Of a run on SageMaker they are those of its newest job; relative paths then start here.

    Raises:
        UserError: there is no such run, its settings are invalid, or AWS returns an error.
    """
    target = run_target(text)
    if target.kind is Kind.RUN_FILE:
        return OpenedConfig(with_sharding(load(target.path, changes)), target.path.parent)
    return open_recorded(target, changes, options)


def open_recorded(target: Target, changes: Sequence[str], options: dict[str, Any]) -> OpenedConfig:
    """Return the settings of a run on any platform, as it was started.

    Raises:
        UserError: there is no such run, a change is invalid, or its platform returns an error.
    """

    found = find_run(target.address, options)
    config = found.config
    if changes:
        from sm_train.estimators.bundle.bundle import run_document

        config = with_sharding(load_recorded(run_document(config), changes, found.name))
    return OpenedConfig(config, Path(), found.region or None, found.stage, found.origin)
