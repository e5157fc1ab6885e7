"""What is summed up between two ``step`` events: on the device, nothing is read until then."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SampleId = tuple[int, int]
"""A sample: its shard's number and its place in it."""


@dataclass(frozen=True)
class StepMetrics:
    """Of the steps that were taken; NaN where there were none. Seconds are of all steps."""

    loss: float
    gradient_norm: float
    seconds: float
    waited_share: float
    skipped: int


class StepMetricsWindow:
    """Some neighbouring steps of one process."""

    def __init__(self, device: torch.device) -> None:
        self.started = time.monotonic()
        self.data_wait_seconds = 0.0
        self._device = device
        self._steps: list[int] = []
        self._losses: list[Sequence[Tensor]] = []
        self._norms: list[Tensor] = []
        self._skipped: list[Tensor] = []
        self._origins: list[Sequence[SampleId]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(
        self,
        step: int,
        losses: Sequence[Tensor],
        norm: Tensor,
        skipped: Tensor,
        origins: Sequence[SampleId],
    ) -> None:
        """One step; ``skipped`` is 1.0 if it changed no weight, the same on all processes.

        ``losses`` are what each micro-batch adds to this process's own, of the samples ``origins``.
        """
        self._steps.append(step)
        self._losses.append(losses)
        self._norms.append(norm)
        self._skipped.append(skipped)
        self._origins.append(origins)

    def sums(self) -> Tensor:
        """To be averaged over all processes, for :meth:`means`."""
        seconds = time.monotonic() - self.started
        skipped = torch.stack(self._skipped)
        loss, norm = (
            torch.where(skipped > 0, 0.0, each).sum()
            for each in (self._loss(), torch.stack(self._norms))
        )
        clock = torch.tensor([seconds, self.data_wait_seconds / seconds], device=self._device)
        return torch.stack([loss, norm, *clock, skipped.sum()])

    def _loss(self) -> Tensor:
        """Of each step."""
        each = torch.stack([one for losses in self._losses for one in losses])
        return each.view(len(self), -1).sum(1)

    def means(self, sums: Sequence[float]) -> StepMetrics:
        """Of what :meth:`sums` came to over all processes."""
        loss, norm, seconds, waited, skipped = sums
        taken = len(self) - round(skipped)
        if not taken:
            return StepMetrics(float("nan"), float("nan"), seconds, waited, len(self))
        return StepMetrics(loss / taken, norm / taken, seconds, waited, len(self) - taken)

    def skipped_steps(self) -> list[int]:
        """Those that changed nothing; reads the device."""
        flags = torch.stack(self._skipped).tolist()
        return [step for step, flag in zip(self._steps, flags, strict=True) if flag]

    def nonfinite_steps(self) -> list[tuple[int, Sequence[SampleId]]]:
        """The steps in which this process's own loss was no number, and their samples."""
        finite = torch.isfinite(self._loss()).tolist()
        steps = zip(self._steps, self._origins, finite, strict=True)
        return [(step, origins) for step, origins, good in steps if not good]
