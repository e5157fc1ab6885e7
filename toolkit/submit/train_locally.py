"""Trains a run on this machine, stage after stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.estimators.bundle.bundle import Bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.records.checkpoints import local_checkpoints
from sm_train.toolkit.records.job_logs import LOG_NAME
from sm_train.toolkit.records.local_folder import (
    DEFAULT_FOLDER,
    FINISHED_NAME,
    LocalRunFolder,
    final_model,
    finished_step,
)
from sm_train.toolkit.submit.local.docker import require_docker
from sm_train.toolkit.submit.local.folders import LocalFolders, has_model
from sm_train.toolkit.submit.local.launcher import default_nodes, exclusive_run, run_stage
from sm_train.toolkit.submit.submission import choose_stages
from sm_train.toolkit.terminal.console import stderr_console
from sm_train.toolkit.terminal.formatting import plural

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class LocalStage:
    """What one stage left on this machine; ``model`` is None if an own script wrote none."""

    name: str
    model: Path | None
    checkpoints: Path
    log: Path


def default_output(config: RunConfig) -> Path:
    """Return the folder of a local run, below the current folder."""
    return DEFAULT_FOLDER / config.name


def run_locally(
    config: RunConfig,
    bundle: Bundle,
    *,
    base: Path,
    stage: str | None,
    nodes: int | None,
    processes: int,
    output: Path,
    image: str | None,
    console: Console,
) -> tuple[LocalStage, ...]:
    """Train ``stage``, or every stage, and print progress on ``console``.

    ``base`` is the run file's folder. ``nodes`` is the number of emulated nodes; by default that
    of the stage, at most one per core. ``image`` is the image of containers; None starts processes.

    Raises:
        UserError: it cannot start (exit 2 or 3) or a process failed (exit 6).
    """
    if image is not None:
        from sm_train.toolkit.submit.local.containers import build_command

        require_docker(image, build_command())
    stages = choose_stages(config, stage)
    # For all stages: between two of them the run is still in progress.
    with exclusive_run(output):
        return tuple(
            _finished(config, chosen, output)
            or _train(
                config,
                chosen,
                bundle,
                base=base,
                nodes=nodes or default_nodes(chosen),
                processes=processes,
                output=output,
                image=image,
                console=console,
            )
            for chosen in stages
        )


def _finished(config: RunConfig, stage: StageSection, output: Path) -> LocalStage | None:
    """Return what an earlier run left of a stage that has no steps left; None if it has."""
    folder = output / stage.name
    step = finished_step(folder, stage.max_steps) if config.entry is None else None
    if step is None:
        return None
    left = LocalStage(stage.name, final_model(folder), folder / "checkpoints", folder / LOG_NAME)
    stderr_console(shows_results=True).print(
        f"{stage.name}: already finished, {step:,}/{stage.max_steps:,} steps; model in "
        f"{left.model}. Remove {folder} to train it again",
        soft_wrap=True,
        markup=False,
    )
    return left


def _train(
    config: RunConfig,
    stage: StageSection,
    bundle: Bundle,
    *,
    base: Path,
    nodes: int,
    processes: int,
    output: Path,
    image: str | None,
    console: Console,
) -> LocalStage:
    """Train a stage from its newest checkpoint."""
    finished = output / stage.name / FINISHED_NAME
    finished.unlink(missing_ok=True)
    per_process = stage.per_device_batch_size * stage.gradient_accumulation_steps
    console.print(
        f"{stage.name}: emulating {nodes} of {plural(stage.instances, 'node')}, "
        f"{plural(processes, 'process')} each; effective batch "
        f"{per_process * nodes * processes} here"
    )
    try:
        folders = run_stage(
            config,
            stage,
            bundle,
            base=base,
            nodes=nodes,
            processes=processes,
            output=output,
            image=image,
            console=console,
        )
    except KeyboardInterrupt:
        _print_stopped(output / stage.name)
        raise
    write_atomic(finished, f"{stage.max_steps}\n".encode())
    stderr_console(shows_results=True).print(
        _result_line(stage.name, folders, config), soft_wrap=True, markup=False
    )
    model = folders.model if has_model(folders) else None
    return LocalStage(stage.name, model, folders.checkpoints, folders.log)


def _print_stopped(folder: Path) -> None:
    """Print the step of the last checkpoint, from which the stage resumes."""
    console = stderr_console(shows_results=True)
    stored = local_checkpoints(folder / "checkpoints")
    if stored.name is None:
        line = f"{folder.name}: stopped before its first checkpoint"
    else:
        checkpoint = folder / "checkpoints" / stored.name
        line = f"{folder.name}: stopped at step {stored.step:,}; checkpoint in {checkpoint}"
    console.print(line, soft_wrap=True, markup=False)
    command = LocalRunFolder(folder.parent).start_command
    console.print(f"To resume: {command}", soft_wrap=True, markup=False)


def _result_line(stage: str, folders: LocalFolders, config: RunConfig) -> str:
    """Return what a local stage left, for its last line."""
    if not config.checkpoint.save:
        return f"{stage}: done, without checkpoints and model (checkpoint.save: false)"
    if has_model(folders):
        return f"{stage}: model in {folders.model}"
    stored = local_checkpoints(folders.checkpoints)
    left = "none" if stored.name is None else f"{folders.checkpoints / stored.name}"
    missing = f"{config.entry} left no model in {folders.model}"
    return f"{stage}: done; {missing}; newest checkpoint: {left}"
