"""Opens the settings of the run that a command names: its file, its folder here, or its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.toolkit.run_file import load, load_recorded
from sm_train.toolkit.targets.target import Kind, Target, run_target

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
    """Return the settings of a local run, of a run on a cluster, or of one on SageMaker as
    submitted.

    Raises:
        UserError: there is no such run, a change is invalid, or AWS returns an error.
    """
    if target.local is not None:
        folder = target.local.stages[-1]
        config = _changed(target.local.config(), changes, str(folder))
        origin = f"settings of the local run {folder}"
        return OpenedConfig(config, Path(), stage=target.local.stage, origin=origin)
    from sm_train.toolkit.clusters.cluster_run import ClusterRun
    from sm_train.toolkit.targets.resolved_run import RunOnSageMaker, find_run

    found = find_run(target.address, options)
    if isinstance(found, ClusterRun):
        config = _changed(found.config, changes, found.name)
        origin = f"settings of the run on {found.platform} in {found.root}"
        return OpenedConfig(config, Path(), found.region, found.stage, origin)
    assert isinstance(found, RunOnSageMaker)
    run = found.run
    config = _changed(run.config, changes, run.name)
    origin = f"settings as submitted with {run.jobs[-1].name}"
    return OpenedConfig(config, Path(), run.region, run.stage, origin)


def _changed(config: RunConfig, changes: Sequence[str], source: str) -> RunConfig:
    if not changes:
        return config
    from sm_train.estimators.bundle.bundle import run_document

    return load_recorded(run_document(config), changes, source)
