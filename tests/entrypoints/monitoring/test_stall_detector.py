"""Signs of life, learned limits and blame: simulated, with the clock handed in."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.monitoring.heartbeat import (
    IGNORED,
    DurationHistogram,
    ExitState,
    HeartbeatReader,
    HeartbeatSample,
    HeartbeatWriter,
    Phase,
    bucket,
    heartbeat_folder,
    stale_dirs,
    upper_edge,
)
from sm_train.entrypoints.monitoring.stack_dump import waits_in_collective
from sm_train.entrypoints.monitoring.stall_detector import (
    Culprit,
    RankStatus,
    StallDetector,
    TimeoutBounds,
    find_culprit,
)

BOUNDS = TimeoutBounds(shortest=120, longest=1200)
"""The run file's defaults."""


class Clock:
    """Nanoseconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 10**12

    def __call__(self) -> int:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


def sign(
    since: float, *, marks: int = 0, section: Phase = Phase.STEP, rank: int = 0
) -> HeartbeatSample:
    return HeartbeatSample(rank, rank, 1, section, marks, marks, since, ExitState.RUNS)


# ---------------------------------------------------------------------- the pulse


@given(st.floats(0.0011, 1e6))
def test_a_bucket_holds_what_it_says(seconds: float) -> None:
    edge = upper_edge(bucket(round(seconds * 1e9)))
    assert seconds <= edge * (1 + 1e-9)
    assert edge <= seconds * 1.0651


def test_a_reader_sees_sections_and_their_durations(tmp_path: Path) -> None:
    clock = Clock()
    pulse = HeartbeatWriter(tmp_path / "pulse-0", rank=9, local_rank=1, clock=clock)
    reader = HeartbeatReader(tmp_path / "pulse-0")
    steps = 20
    for step in range(steps):
        for section, seconds in ((Phase.DATA, 0.1), (Phase.STEP, 0.4)):
            pulse.enter(section, step)
            clock.pass_(seconds)
    pulse.enter(Phase.FINISH, steps)
    seen = reader.sign()
    assert (seen.rank, seen.local_rank, seen.section) == (9, 1, Phase.FINISH)
    assert (seen.step, seen.marks) == (steps, 2 * steps + 1)
    assert seen.since == clock.now / 1e9
    # The first step is a section of its own, and the next ones say nothing yet.
    assert len(reader.durations(Phase.STEP)) == steps - 1 - IGNORED[Phase.STEP]
    assert reader.durations(Phase.STEP).quantile(0.5) == pytest.approx(0.4, rel=0.07)
    assert reader.durations(Phase.DATA).longest == pytest.approx(0.1, rel=0.07)
    assert len(reader.steps()) == steps - 1
    assert reader.steps().quantile(0.5) == pytest.approx(0.5, rel=0.07)
    assert reader.total(Phase.DATA) == pytest.approx(0.1 * steps)
    pulse.end(ExitState.DONE)
    assert reader.sign().ending is ExitState.DONE


def test_another_attempts_memory_stays_readable(tmp_path: Path) -> None:
    first = HeartbeatWriter(tmp_path / "pulse-0", rank=0, local_rank=0)
    reader = HeartbeatReader(tmp_path / "pulse-0")
    first.enter(Phase.DATA, 7)
    HeartbeatWriter(tmp_path / "pulse-0", rank=0, local_rank=0)
    assert reader.sign().step == 7
    assert HeartbeatReader(tmp_path / "pulse-0").sign().step == 0


def test_processes_of_one_launcher_meet_and_what_a_dead_one_left_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "7777")
    monkeypatch.delenv("GROUP_RANK", raising=False)
    own = heartbeat_folder()
    assert own.name == f"sm-train-{os.getuid()}-{os.getppid()}-7777-0"
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-1@2")
    # Under MPI each process has a parent of its own.
    assert heartbeat_folder().name == f"sm-train-{os.getuid()}-1-prterun12"
    dead = f"sm-train-{os.getuid()}-{2**22 + 1}-7777-0"
    for name in (own.name, dead, "sm-train-of-another", f"sm-train-{os.getuid()}-x-1"):
        (tmp_path / name).mkdir()
    assert stale_dirs(tmp_path / own.name) == [tmp_path / dead]


# ---------------------------------------------------------------------- limits


def heavy_tailed(rng: random.Random) -> Callable[[], float]:
    """Step times of a healthy run, in seconds: of many sizes, with tails of three kinds."""
    median = 10 ** rng.uniform(-1.3, 1.3)
    kind = rng.randrange(3)
    if kind == 0:
        spread = rng.uniform(0.05, 1.2)
        return lambda: median * rng.lognormvariate(0, spread)
    if kind == 1:
        exponent = rng.uniform(2, 6)
        return lambda: median * rng.paretovariate(exponent)
    # A read that is tried again now and then.
    often, long = rng.uniform(0.001, 0.05), rng.uniform(1, 20)
    return lambda: median + (rng.expovariate(1 / long) if rng.random() < often else 0)


def live(patience: StallDetector, draw: Callable[[], float], steps: int) -> tuple[float, int]:
    """Live through steps, looked at just before each ends: the time then, and the false alarms.

    A step beyond the longest limit is a stall by the run file's own word.
    """
    now, alarms, seen = 0.0, 0, list[float]()
    for number in range(steps):
        since = now
        taken = min(draw(), BOUNDS.longest)
        now += taken
        patience.resume(now)
        alarms += bool(patience.overdue([sign(since, marks=number)], now))
        if number >= IGNORED[Phase.STEP]:
            seen.append(taken)
        if number % 40 == 0:
            patience.learn({Phase.STEP: DurationHistogram.of(seen)})
    return now, alarms


def test_a_thousand_healthy_runs_raise_no_alarm_and_stalls_are_found_in_time() -> None:
    found = 0
    for seed in range(1000):
        rng = random.Random(seed)
        patience = StallDetector(BOUNDS, pause=5)
        now, alarms = live(patience, heavy_tailed(rng), steps=rng.randrange(60, 400))
        assert alarms == 0, seed
        limit = patience.limits[Phase.STEP]
        hangs, looked = sign(now, marks=10**6), now
        while not patience.overdue([hangs], looked):
            looked += rng.uniform(0.5, 1.5)
        assert looked - now > limit
        found += looked - now <= 2 * limit
    assert found >= 990


def test_limits_are_learned_within_bounds() -> None:
    assert BOUNDS.limit(Phase.STEP, DurationHistogram.of([1.0] * 10)) == 1200
    assert BOUNDS.limit(Phase.STEP, DurationHistogram.of([1.0] * 60)) == 120
    assert BOUNDS.limit(Phase.STEP, DurationHistogram.of([60.0] * 60)) == pytest.approx(
        300, rel=0.07
    )
    assert BOUNDS.limit(Phase.STEP, DurationHistogram.of([900.0] * 60)) == 1200
    assert BOUNDS.limit(Phase.START, DurationHistogram.of([1.0] * 60)) == 1200


def test_a_slow_checkpoint_is_no_stall_until_its_own_limit() -> None:
    patience = StallDetector(TimeoutBounds(1, 1200), pause=5)
    patience.learn({Phase.STEP: DurationHistogram.of([0.1] * 99)})
    slow = sign(0, section=Phase.CHECKPOINT)
    # Nothing is known of checkpoints yet, then three of 2 s: five times as long is the limit.
    assert not patience.overdue([slow], 1)
    patience.learn({Phase.CHECKPOINT: DurationHistogram.of([2.0] * 3)})
    patience.resume(9)
    assert not patience.overdue([slow], 9)
    assert patience.overdue([slow], 11)
    assert patience.limits[Phase.STEP] == 1


def test_a_clock_that_jumps_and_a_frozen_machine_raise_no_alarm() -> None:
    patience = StallDetector(TimeoutBounds(10, 10), pause=5)
    hung = sign(0.0)
    assert not patience.overdue([hung], 1)
    for jump in (10_000.0, 500.0, 500.5):
        assert not patience.overdue([hung], jump)
    # What goes on being silent is found all the same.
    now = 500.5
    while not patience.overdue([hung], now):
        now += 1
        assert now < 520
    # A new sign forgives and forgets.
    fresh = sign(now, marks=1)
    assert patience.silences([fresh], now + 1) == {0: 1}


def test_what_has_ended_is_not_silent() -> None:
    patience = StallDetector(TimeoutBounds(10, 10), pause=5000)
    ended = replace(sign(0), ending=ExitState.DONE)
    assert not patience.overdue([ended], 1000)
    assert patience.overdue([sign(0)], 1001)


# ---------------------------------------------------------------------- blame

WAITS = RankStatus(0, 0, Phase.STEP, 7, 20, waits=True)


@pytest.mark.parametrize(
    ("others", "silent", "expected"),
    [
        ([replace(WAITS, rank=1, state="T")], {}, (1, 0, "stopped")),
        ([replace(WAITS, rank=9, node=1, state="Z")], {}, (9, 1, "dead")),
        ([replace(WAITS, rank=1, section=Phase.DATA, marks=19)], {}, (1, 0, "data after step 7")),
        ([replace(WAITS, rank=1)], {3: 60.0, 2: 9.0}, (None, 3, "node 3 has not been heard of")),
        (
            [replace(WAITS, rank=8, node=1, marks=19), replace(WAITS, rank=9, node=1, marks=19)],
            {},
            (None, 1, "ranks 8, 9"),
        ),
        ([replace(WAITS, rank=1, waits=False)], {}, (1, 0, "does not wait")),
        ([replace(WAITS, rank=1)], {}, (None, None, "same place")),
        ([replace(WAITS, rank=1, waits=None)], {}, (None, None, "same place")),
        ([], {}, (0, 0, "only one")),
    ],
)
def test_who_is_to_blame(
    others: list[RankStatus], silent: dict[int, float], expected: tuple[int | None, int | None, str]
) -> None:
    rank, node, reason = expected
    found = find_culprit([WAITS, *others], silent)
    assert (found.rank, found.node) == (rank, node)
    assert reason in found.reason
    assert isinstance(found, Culprit)


PY_SPY = """\
Process 7: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 8 (idle): "Thread-1 (watch)"
    wait (threading.py:327)
Thread 7 (active+gil): "MainThread"
    {innermost}
    Trainer._train_step (sm_train/entrypoints/training/trainer.py:210)
    <module> (train.py:4)
"""
FAULTHANDLER = """\
Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007e (most recent call first):
  File "{path}", line 5 in {function}
  File "/opt/sm_train/entrypoints/training/trainer.py", line 210 in _train_step
"""


def test_stacks_tell_who_waits_for_others() -> None:
    reduces = "all_reduce (torch/distributed/distributed_c10d.py:2806)"
    assert waits_in_collective(PY_SPY.format(innermost=reduces)) is True
    backward = "_engine_run_backward (torch/autograd/graph.py:979)"
    assert waits_in_collective(PY_SPY.format(innermost=backward)) is True
    assert waits_in_collective(PY_SPY.format(innermost="spin (loss.py:3)")) is False
    path = "/venv/torch/distributed/distributed_c10d.py"
    assert waits_in_collective(FAULTHANDLER.format(path=path, function="barrier")) is True
    assert waits_in_collective(FAULTHANDLER.format(path="/a/loss.py", function="spin")) is False
    assert waits_in_collective("no stacks of process 7") is None
