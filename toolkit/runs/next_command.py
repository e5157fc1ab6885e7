"""Suggests the command that a run needs next, for its state and the platform that it is on."""

from __future__ import annotations

from sm_train.toolkit.clusters.cluster_run import ClusterRun
from sm_train.toolkit.jobs.local_folder import LocalRunFolder
from sm_train.toolkit.jobs.stage_state import StageState
from sm_train.toolkit.targets.resolved_run import ResolvedRun

_LIVE = ("starting", "training", "restarting", "stalled")


Run = ResolvedRun | ClusterRun | LocalRunFolder


def next_command(run: Run, stage: StageState | None) -> str | None:
    """Return the command that the user needs next; ``stage`` is the current one, None at the end.

    None if there is nothing to do: the run is done, and its own script has written its models.
    """
    target = run.name if isinstance(run, ResolvedRun) else run.target
    if stage is None:
        config = run.config() if isinstance(run, LocalRunFolder) else run.config
        place = run.root if isinstance(run, ClusterRun) else target
        return None if config.entry is not None else f"sm-train sample {place} --prompts FILE"
    if stage.state == "stopping":
        return f"sm-train status {target}"
    if stage.state in _LIVE:
        return watch_command(target)
    if stage.state in ("failed", "lost", "no-results"):
        return _diagnose(run, stage)
    if isinstance(run, ClusterRun) and not stage.jobs:
        return f"sm-train manifest RUN --to KIND --stage {stage.name}"
    return resume_command(run)


def watch_command(target: object) -> str:
    """Return the command that follows a run with a live job, by its name or folder."""
    return f"sm-train watch {target}"


def stage_command(run: str, stage: str) -> str:
    """Return the command that starts a later stage of a run, once the one before it is done."""
    return f"sm-train resume {run} --stage {stage}"


def _diagnose(run: Run, stage: StageState) -> str:
    if isinstance(run, LocalRunFolder):
        return f"sm-train diagnose {run.path / stage.name}"
    if isinstance(run, ClusterRun):
        return f"sm-train diagnose {run.target}"
    job = stage.job
    if job is None:
        return f"sm-train diagnose {run.name}"
    option = "" if job.region == run.region else f" --region {job.region}"
    return f"sm-train{option} diagnose {job.name}"


def resume_command(run: Run) -> str:
    """Return the command that continues the run: that of the platform, on a cluster.

    If a job on Kubernetes or Slurm wrote the newest checkpoint, the command starts no second one
    and says how the user confirms that the first has ended. Only the user knows that.
    """
    if isinstance(run, LocalRunFolder):
        return run.start_command
    if isinstance(run, ClusterRun):
        return run.command("resume") or "sm-train manifest RUN --to KIND"
    return f"sm-train resume {run.name}"
