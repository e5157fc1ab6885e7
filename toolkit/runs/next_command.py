"""Suggests the command that a run needs next, for its state."""

from __future__ import annotations

import shlex

from sm_train.toolkit.platforms.placed_run import PlacedRun
from sm_train.toolkit.records.stage_state import StageState

_LIVE = ("starting", "training", "restarting", "stalled")


def next_command(run: PlacedRun, stage: StageState | None) -> str | None:
    """Return the command that the user needs next; ``stage`` is the current one, None at the end.

    None if there is nothing to do: the run is done, and its own script has written its models.
    """
    if stage is None:
        is_own = run.config.entry is not None
        model = shlex.quote(run.sample_target)
        return None if is_own else f"sm-train{run.given} sample {model} --prompts FILE"
    if stage.state == "stopping":
        return run.command("status")
    if stage.state in _LIVE:
        return run.command("watch")
    if stage.state in ("failed", "lost", "no-results") and stage.job is not None:
        return run.diagnose_command(stage.job)
    return run.resume_command if stage.jobs else run.start_command(stage.name)
