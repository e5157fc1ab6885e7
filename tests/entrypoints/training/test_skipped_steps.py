"""Counts of steps without a finite gradient."""

from __future__ import annotations

import random

import torch
from sm_train.entrypoints.training.step_metrics import RECENT_STEPS, SkippedSteps


def test_consecutive_means_consecutive_whenever_it_is_read() -> None:
    rng = random.Random(3)
    skips = SkippedSteps(torch.device("cpu"))
    flags: list[int] = []
    for _ in range(3 * RECENT_STEPS):
        flags.append(int(rng.random() < 0.6))
        skips.add(torch.tensor(float(flags[-1])))
        if rng.random() < 0.1:
            skips.read()
            run = len(flags) - max((i + 1 for i, flag in enumerate(flags) if not flag), default=0)
            assert (skips.consecutive, skips.recent) == (run, sum(flags[-RECENT_STEPS:]))


def test_rollback_restarts_the_run_but_not_the_share() -> None:
    skips = SkippedSteps(torch.device("cpu"))
    for _ in range(4):
        skips.add(torch.tensor(1.0))
    skips.read()
    skips.restart_run()
    assert skips.consecutive == 0
    skips.add(torch.tensor(1.0))
    skips.read()
    assert (skips.consecutive, skips.recent) == (1, 5)
