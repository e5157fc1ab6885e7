"""What an experiment tracker does, and how a run's events become its entries."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from sm_train.entrypoints.job_interface.job_config import JobConfig
from sm_train.entrypoints.tracking.scalars import IMAGE_TAG, event_scalars

LastSteps = dict[str, int]
"""Metric → the last step that the tracker has of it."""

Warn = Callable[[str], None]
"""Reports a sentence."""

FOLDER = "trackers"
"""Folder next to the checkpoints, uploaded as they are, with what trackers write to files."""


class TrackerError(Exception):
    """The tracker cannot be used; the message is one line without a secret."""


class Tracker(Protocol):
    """An experiment tracker; any method may raise any exception.

    ``time`` is in Unix seconds.
    """

    def open(self, config: Mapping[str, Any], warn: Warn) -> LastSteps:
        """Create the run with its settings, or continue it; ``warn`` if not as configured."""

    def log_scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Add values by metric."""

    def log_image(self, step: int, time: float, content: bytes) -> None:
        """Add the images of an evaluation, one PNG."""

    def close(self, reason: str | None) -> None:
        """End the run: ``done``, ``sigterm``, or None for a failure."""


def tracker_run_id(config: JobConfig, *, local: bool) -> str:
    """Return the id of a stage's run: the same after a restart, another for local runs."""
    name = f"{config.run}-{config.stage.name}{'-local' if local else ''}"
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)


def run_settings(config: JobConfig, start: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a tracker shows: the ``start`` event's and the optimizer's."""
    training = config.training
    own = {
        "preset": config.model.preset,
        "entry": config.entry,
        "learning_rate": config.stage.learning_rate,
        "sharding": config.stage.sharding,
        "optimizer": training.optimizer.name,
        "lr_schedule": training.lr_schedule.name,
        "warmup_steps": training.warmup_steps,
        "max_grad_norm": training.max_grad_norm,
        "ema_decay": training.ema_decay,
        "caption_dropout": training.caption_dropout,
        "seed": training.seed,
    }
    known = {key: value for key, value in start.items() if isinstance(value, str | int | float)}
    omitted = {"kind", "time", "node", "rank", "resumed_from_step"}
    return {
        key: value
        for key, value in {**own, **known}.items()
        if key not in omitted and value is not None
    }


class TrackerRun:
    """One tracker's run, fed with events.

    A resumed run and a rollback repeat steps: a value is added only if the tracker has none of its
    step or a later one.
    """

    def __init__(self, tracker: Tracker, config: JobConfig, checkpoints: Path, warn: Warn) -> None:
        self._tracker, self._config, self._checkpoints = tracker, config, checkpoints
        self._warn = warn
        self._start: Mapping[str, Any] = {}
        self._last_steps: LastSteps | None = None
        self._step = 0
        """The step of the last event that has one; events of nodes have none."""
        self._end_reason: str | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event to the tracker.

        Raises:
            Exception: whatever the tracker raises.
        """
        if event["kind"] == "start":
            self._start, self._step = event, int(event["resumed_from_step"])
        elif event["kind"] == "end":
            self._end_reason = event["reason"]
        if self._last_steps is None:
            settings = run_settings(self._config, self._start)
            self._last_steps = self._tracker.open(settings, self._warn)
        if event["kind"] not in ("step", "eval", "node"):
            return
        step, time = int(event.get("step", self._step)), float(event["time"])
        self._step = step
        values = {tag: value for tag, value in event_scalars(event).items() if self._new(tag, step)}
        if values:
            self._tracker.log_scalars(step, time, values)
            self._last_steps |= dict.fromkeys(values, step)
        if event.get("images") and self._new(IMAGE_TAG, step):
            content = (self._checkpoints / event["images"]).read_bytes()
            self._tracker.log_image(step, time, content)
            self._last_steps[IMAGE_TAG] = step

    def _new(self, tag: str, step: int) -> bool:
        assert self._last_steps is not None
        return step > self._last_steps.get(tag, -1)

    def close(self) -> None:
        """End the tracker's run, if it has begun."""
        if self._last_steps is not None:
            self._tracker.close(self._end_reason)
