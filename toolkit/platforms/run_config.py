"""Opens the settings of the run that a command names: its file, its folder here, or its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.platforms.parse_target import run_target
from sm_train.toolkit.platforms.target import Kind, Target
from sm_train.toolkit.run_file import load, load_recorded

if TYPE_CHECKING:
    from sm_train.estimators.config.schema import RunConfig


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
        return OpenedConfig(load(target.path, changes), target.path.parent)
    return open_recorded(target, changes, options)


def open_recorded(target: Target, changes: Sequence[str], options: dict[str, Any]) -> OpenedConfig:
    """Return the settings of a run on any platform, as it was started.

    Raises:
        UserError: there is no such run, a change is invalid, or its platform returns an error.
    """
    from sm_train.toolkit.platforms.find_run import find_run

    found = find_run(target.address, options)
    config = found.config
    if changes:
        from sm_train.estimators.bundle.bundle import run_document

        config = load_recorded(run_document(config), changes, found.name)
    return OpenedConfig(config, Path(), found.region or None, found.stage, found.origin)
