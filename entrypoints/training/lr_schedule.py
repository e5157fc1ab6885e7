"""The learning rate of each step: a warm-up times a schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from sm_train.entrypoints.job_interface.job_config import (
    JobConfig,
    JobConfigError,
    LrScheduleConfig,
)
from sm_train.entrypoints.job_interface.user_function import is_user_function, load_user_function

_DECAY_FRACTION = 0.1

Schedule = Callable[[int], float]
"""Returns the factor on the learning rate of a step, counted from 0."""


def build_schedule(config: JobConfig) -> Schedule:
    """Return the schedule of the run file's stage.

    The factor rises linearly over ``warmup_steps`` and follows ``lr_schedule`` after that. The
    formulas are those of transformers' schedules (``get_cosine_with_min_lr_schedule_with_warmup``,
    ``get_linear_schedule_with_warmup``, ``get_wsd_schedule``). Theirs are not called: arguments
    differ between the versions for PyTorch 2.3 and 2.13, and their warm-up wastes a step with a
    factor of 0.

    Raises:
        JobConfigError: the user's function does not exist.
    """
    settings, warmup = config.training.lr_schedule, config.training.warmup_steps
    max_steps = config.stage.max_steps
    after_warmup = _after_warmup(settings, warmup, max_steps)
    return lambda step: min(1.0, (step + 1) / (warmup + 1)) * after_warmup(step)


def _after_warmup(settings: LrScheduleConfig, warmup: int, max_steps: int) -> Schedule:
    if is_user_function(settings.name):
        return _user_schedule(settings, max_steps)
    final, decay = settings.final_factor or 0.0, settings.decay_fraction or _DECAY_FRACTION
    training_steps = max(1, max_steps - warmup)
    decay_steps = max(1, round(decay * max_steps))

    def constant(step: int) -> float:
        return 1.0

    def cosine(step: int) -> float:
        progress = _clamp((step - warmup) / training_steps)
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

    def linear(step: int) -> float:
        return final + (1 - final) * _clamp((max_steps - step) / training_steps)

    def wsd(step: int) -> float:
        # Warm-up, stable, decay (Hu et al., MiniCPM, arXiv 2404.06395, section 4).
        return final + (1 - final) * _clamp((max_steps - step) / decay_steps)

    schedules = {"constant": constant, "cosine": cosine, "linear": linear, "wsd": wsd}
    return schedules[settings.name]


def _user_schedule(settings: LrScheduleConfig, max_steps: int) -> Schedule:
    key = "training.lr_schedule"
    function = load_user_function(key, settings.name)

    def factor(step: int) -> float:
        value = function(step, max_steps, **settings.options)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            raise JobConfigError(
                f"{key}: {settings.name} returned {value!r} for step {step}; return a factor of at "
                "least 0"
            )
        return number

    return factor


def _clamp(value: float) -> float:
    return min(1.0, max(0.0, value))


class LearningRate:
    """Sets the learning rates of ``optimizers`` by ``schedule``.

    ``steps`` is the number of steps taken; with the schedule it determines everything else.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], schedule: Schedule) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._base = [float(group["lr"]) for group in self._groups]
        self._schedule = schedule
        self.last = 0.0
        """The learning rate of the last step; 0 before the first one."""
        self.set(0)

    @property
    def current(self) -> float:
        """The learning rate of the next step, of the first group of weights."""
        return float(self._groups[0]["lr"])

    def advance(self) -> None:
        """Set the rates for the next step."""
        self.last = self.current
        self.set(self.steps + 1)

    def set(self, steps: int) -> None:
        """Set the rates for the step after ``steps`` steps."""
        self.steps = steps
        factor = self._schedule(steps)
        for group, base in zip(self._groups, self._base, strict=True):
            group["lr"] = base * factor
