"""Shows a run's state on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sm_train.toolkit.clusters.cluster_run import ClusterRun
from sm_train.toolkit.jobs.local_folder import LocalRunFolder, final_model, read_stages
from sm_train.toolkit.jobs.stage_state import StageState, current
from sm_train.toolkit.runs.cluster_state import read_cluster_state
from sm_train.toolkit.runs.next_command import next_command
from sm_train.toolkit.runs.remediation import other_platform_message
from sm_train.toolkit.runs.run_state import RunState, read_state
from sm_train.toolkit.targets.resolved_run import FoundRun
from sm_train.toolkit.terminal.console import escaped
from sm_train.toolkit.terminal.formatting import format_duration, format_number
from sm_train.toolkit.terminal.rich_table import rich_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show_status(run: FoundRun, console: Console) -> None:
    """Print what is known about a run, on SageMaker, on a cluster or here."""
    if isinstance(run, LocalRunFolder):
        show_local(run, console)
    elif isinstance(run, ClusterRun):
        show_state(read_cluster_state(run), console)
    else:
        show_state(read_state(run.session, run.run), console)


def show_state(state: RunState, console: Console) -> None:
    """Print stages, the newest job, cost and the next command, at most 100 columns wide."""
    run = state.run
    where = f"on {run.platform}, in {run.root}" if isinstance(run, ClusterRun) else None
    console.print(f"[bold]{escaped(run.name)}[/] {escaped(where or f'in {run.region}')}\n")
    console.print(_stage_table(state.stages, with_jobs=True))
    console.print()
    for line in _summary(state):
        console.print(line, markup=False)


def show_local(run: LocalRunFolder, console: Console) -> None:
    """Print the stages, where the model is, and the next command."""
    stages = read_stages(run)
    console.print(f"[bold]{run.config().name}[/] on this machine, in {escaped(str(run.target))}\n")
    console.print(_stage_table(stages, with_jobs=False))
    console.print()
    for stage in stages:
        model = final_model(run.path / stage.name) if stage.state == "done" else None
        if model is not None:
            console.print(f"{stage.name}: model in {model}", markup=False, soft_wrap=True)
        for folder, reason in stage.stored.skipped:
            console.print(f"{folder} is skipped: {reason}", markup=False)
    command = next_command(run, current(stages))
    if command is not None:
        console.print(f"next: {command}", markup=False, soft_wrap=True)


def _stage_table(stages: Sequence[StageState], *, with_jobs: bool) -> Table:
    """Return a row for each stage."""
    figures = ["step", "of", "checkpoint", "it/s", "remaining", *["jobs"] * with_jobs]
    table = rich_table(["stage", "state", *figures], right=figures)
    for stage in stages:
        remaining = stage.remaining_seconds
        table.add_row(
            stage.name,
            stage.state,
            f"{stage.step:,}",
            f"{stage.max_steps:,}",
            "" if stage.stored.step is None else f"{stage.stored.step:,}",
            format_number(stage.progress.steps_per_second) if stage.progress.step else "",
            "" if remaining is None or stage.state == "done" else format_duration(remaining),
            *([str(len(stage.jobs))] if with_jobs else []),
        )
    return table


def _summary(state: RunState) -> list[str]:
    lines = []
    stage = state.current
    if stage is not None and stage.job is not None:
        job = stage.job
        region = "" if job.region == state.run.region else f" in {job.region}"
        phase = f" ({job.secondary_status})" if job.secondary_status else ""
        lines.append(f"{job.name}{region}: {job.status}{phase}")
        if job.failure_reason:
            lines.append(f"  {job.failure_reason}")
        if job.live and stage.progress.last_activity is not None:
            age = state.now.timestamp() - stage.progress.last_activity
            lines.append(f"  last activity {age:.0f} s ago")
        if stage.state == "no-results":
            lines.append(f"  ended without results: nothing is stored below {job.checkpoint_uri}")
        lines += [f"  WARNING: {warning}" for warning in state.warnings]
        lines += [f"  {folder} is skipped: {reason}" for folder, reason in stage.stored.skipped]
    on_sagemaker = not isinstance(state.run, ClusterRun)
    if on_sagemaker and stage is not None and stage.other_platform is not None:
        lines.append(other_platform_message(stage))
    lines.append(str(state.projection))
    if (command := next_command(state.run, stage)) is not None:
        lines.append(f"next: {command}")
    return lines
