"""Busy times of real training processes: a rank that is paused is busy for longer, and named."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.monitoring.heartbeat import (
    HeartbeatReader,
    launched_folders,
    open_readers,
)

from tests.support.cluster.training_jobs import Job, Processes, tiny_run, write_shards
from tests.support.deadline import DEADLINE

pytestmark = pytest.mark.integration

PERIOD = 0.5
"""Seconds from one pause to the next."""

STEPS = 15
"""Fewest steps with pauses."""

WINDOW = 20 * PERIOD
"""A pause counts only if it interrupts the rank's own work, so that a few of them say nothing."""


@contextlib.contextmanager
def training(folder: Path, processes: int, **stage: Any) -> Iterator[Processes]:
    job = Job(folder, tiny_run(max_steps=10**6, **stage))
    write_shards(job.train_channel, shards=4, each=20)
    with job.start(processes) as running:
        yield running


@contextlib.contextmanager
def paused(pid: int, share: float) -> Iterator[None]:
    """Pause a process for a ``share`` of the time."""
    ended = threading.Event()

    def pause() -> None:
        while not ended.wait((1 - share) * PERIOD):
            os.kill(pid, signal.SIGSTOP)
            ended.wait(share * PERIOD)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=pause)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def readers_of(running: Processes) -> list[HeartbeatReader]:
    [folder] = launched_folders(running.process.pid)
    return list(open_readers(folder))


def own_seconds(readers: list[HeartbeatReader], steps: int) -> list[float]:
    """Return each rank's busy seconds without waits for a CPU core, over ``steps`` or more."""
    before = [reader.busy() for reader in readers]
    began = time.monotonic()
    while readers[0].busy()[0] < before[0][0] + steps or time.monotonic() < began + WINDOW:
        assert time.monotonic() < began + DEADLINE, "no progress"
        time.sleep(0.05)
    after = [reader.busy() for reader in readers]
    return [now[1] - then[1] - now[2] + then[2] for now, then in zip(after, before, strict=True)]


# Compares seconds: other tests on the same cores pause the ranks as well.
@pytest.mark.slow
@pytest.mark.parametrize(
    "stage",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"sharding": "full_shard"},
        {"sharding": "shard_grad_op"},
    ],
    ids=["ddp", "accumulation", "full_shard", "shard_grad_op"],
)
def test_paused_rank_is_busy_for_longer(tmp_path: Path, stage: dict[str, Any]) -> None:
    """Whole steps take equally long on both ranks."""
    with training(tmp_path, 2, **stage) as running:
        running.wait_for("step", step=5)
        # Without a reader its pipe fills up and blocks rank 0.
        threading.Thread(target=lambda: [None for _ in running.lines()], daemon=True).start()
        readers = readers_of(running)
        with paused(readers[1].process.pid, 0.6):
            healthy, slow = own_seconds(readers, STEPS)
        assert slow > 1.2 * healthy
        steps = [reader.busy()[0] for reader in readers]
        assert abs(steps[0] - steps[1]) <= 1
        for reader in readers:
            steps_timed, busy, waited = reader.busy()
            assert steps_timed > STEPS
            assert 0 <= waited <= busy < reader.total_seconds() + 60


@pytest.mark.slow
@pytest.mark.parametrize("stage", [{}, {"sharding": "full_shard"}], ids=["ddp", "full_shard"])
def test_one_of_four_ranks_that_is_paused_30_percent_of_the_time_is_named(
    tmp_path: Path, stage: dict[str, Any]
) -> None:
    with training(tmp_path, 4, **stage) as running:
        running.wait_for("step", step=5)
        began = time.time()
        with paused(readers_of(running)[2].process.pid, 0.3):
            found = running.wait_for("warning", code="straggler")
    assert (found["straggler_rank"], found["straggler_node"]) == (2, 0)
    assert found["ratio"] > 1.1
    assert found["time"] - began < 120
