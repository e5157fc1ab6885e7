"""Heartbeats, learned timeouts and culprits, simulated with a clock of the test's own."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.monitoring.heartbeat import (
    WARM_UP,
    DurationHistogram,
    ExitState,
    HeartbeatReader,
    HeartbeatSample,
    HeartbeatWriter,
    Phase,
    bucket_index,
    bucket_upper_edge,
    create_private_folder,
    heartbeat_folder,
    stale_dirs,
)
from sm_train.entrypoints.monitoring.stack_dump import waits_in_collective
from sm_train.entrypoints.monitoring.stall_detector import (
    WINDOW_DURATIONS,
    RankStatus,
    StallDetector,
    TimeoutBounds,
    find_culprit,
)

BOUNDS = TimeoutBounds(shortest=120, longest=1200)
"""The run file's defaults."""


class Clock:
    """Nanoseconds, advanced by the test."""

    def __init__(self) -> None:
        self.now = 10**12

    def __call__(self) -> int:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


def sample(
    since: float, *, sequence: int = 0, phase: Phase = Phase.STEP, rank: int = 0
) -> HeartbeatSample:
    return HeartbeatSample(rank, rank, 1, phase, sequence, sequence, since, ExitState.RUNNING)


def read(reader: HeartbeatReader) -> HeartbeatSample:
    found = reader.sample()
    assert found is not None
    return found


# ---------------------------------------------------------------------- the writer


@given(st.floats(0.0011, 1e6))
def test_bucket_edge_exceeds_a_duration_by_at_most_a_sixteenth(seconds: float) -> None:
    edge = bucket_upper_edge(bucket_index(round(seconds * 1e9)))
    assert seconds <= edge * (1 + 1e-9)
    assert edge <= seconds * 1.0651


def test_reader_sees_phases_and_their_durations(tmp_path: Path) -> None:
    clock = Clock()
    writer = HeartbeatWriter(tmp_path / "heartbeat-0", rank=9, local_rank=1, clock=clock)
    reader = HeartbeatReader(tmp_path / "heartbeat-0")
    steps = 20
    for step in range(steps):
        for phase, seconds in ((Phase.DATA, 0.1), (Phase.STEP, 0.4)):
            writer.enter(phase, step)
            clock.advance(seconds)
    writer.enter(Phase.FINISH, steps)
    last = read(reader)
    assert (last.rank, last.local_rank, last.phase) == (9, 1, Phase.FINISH)
    assert (last.step, last.sequence) == (steps, 2 * steps + 1)
    assert last.since == clock.now / 1e9
    # The first step is a phase of its own, and the next ones are warm-up.
    assert len(reader.durations(Phase.STEP)) == steps - 1 - WARM_UP[Phase.STEP]
    assert reader.durations(Phase.STEP).quantile(0.5) == pytest.approx(0.4, rel=0.07)
    assert reader.durations(Phase.DATA).longest == pytest.approx(0.1, rel=0.07)
    assert len(reader.step_durations()) == steps - 1
    assert reader.step_durations().quantile(0.5) == pytest.approx(0.5, rel=0.07)
    assert reader.seconds_in(Phase.DATA) == pytest.approx(0.1 * steps)
    writer.end(ExitState.DONE)
    assert read(reader).exit_state is ExitState.DONE


def test_compilation_is_named_and_not_learned_from(tmp_path: Path) -> None:
    clock = Clock()
    writer = HeartbeatWriter(tmp_path / "heartbeat-0", rank=0, local_rank=0, clock=clock)
    reader = HeartbeatReader(tmp_path / "heartbeat-0")
    detector = StallDetector(BOUNDS, max_gap=1e9)
    for step in range(100):
        writer.enter(Phase.STEP, step)
        clock.advance(0.4)
        if step == 80:
            writer.begin_compilation()
            compiling = read(reader)
            assert compiling.activity == "step (compiling)"
            # A compilation is no phase of its own: other ranks may have none.
            assert compiling.sequence == step + 1
            detector.learn({Phase.STEP: reader.durations(Phase.STEP)})
            assert detector.timeout(compiling) == BOUNDS.longest > detector.timeouts[Phase.STEP]
            clock.advance(150.0)
            writer.end_compilation()
    assert read(reader).activity == "step"
    assert reader.durations(Phase.STEP).longest == pytest.approx(0.4, rel=0.07)
    assert reader.seconds_in(Phase.STEP) > 150


def test_memory_of_an_earlier_attempt_stays_readable(tmp_path: Path) -> None:
    first = HeartbeatWriter(tmp_path / "heartbeat-0", rank=0, local_rank=0)
    reader = HeartbeatReader(tmp_path / "heartbeat-0")
    first.enter(Phase.DATA, 7)
    HeartbeatWriter(tmp_path / "heartbeat-0", rank=0, local_rank=0)
    assert read(reader).step == 7
    assert read(HeartbeatReader(tmp_path / "heartbeat-0")).step == 0


def test_folder_is_per_attempt_and_those_of_dead_launchers_are_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(**environment: str) -> str:
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        return heartbeat_folder.__wrapped__().name

    for key in ("GROUP_RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(key, raising=False)
    own = f"sm-train-{os.getuid()}-{os.getppid()}-7777-0"
    assert name(MASTER_PORT="7777") == f"{own}-{os.getpid()}"
    assert name(LOCAL_RANK="3") == f"{own}-0"
    assert name(TORCHELASTIC_RESTART_COUNT="2") == f"{own}-2"
    # Under MPI each process has a parent of its own.
    assert name(PMIX_NAMESPACE="prterun-1@2") == f"sm-train-{os.getuid()}-1-prterun12"
    dead = f"sm-train-{os.getuid()}-{2**22 + 1}-7777-0"
    for folder in (own, dead, "sm-train-of-another", f"sm-train-{os.getuid()}-x-1"):
        (tmp_path / folder).mkdir(mode=0o700)
    (tmp_path / f"sm-train-{os.getuid()}-{2**22 + 2}-7777-0").symlink_to(tmp_path / dead)
    assert stale_dirs(tmp_path / own) == [tmp_path / dead]


@pytest.mark.parametrize("squatter", ["link", "open folder", "folder of another user"])
def test_heartbeats_are_written_to_a_private_folder_only(tmp_path: Path, squatter: str) -> None:
    """The folder lies in /dev/shm, where another user of the node can create it before."""
    folder = tmp_path / "heartbeats"
    if squatter == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir(mode=0o700)
    if squatter == "open folder":
        folder.chmod(0o755)
    elif squatter == "folder of another user":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(folder, 65534, 65534)
    with pytest.raises(PermissionError, match="not a private folder of this user; remove it"):
        create_private_folder(folder)
    assert not list(folder.iterdir())


# ---------------------------------------------------------------------- timeouts


def heavy_tailed(rng: random.Random) -> Callable[[int], float]:
    """Return the seconds of a healthy run's steps: any median, and one of seven tails."""
    median = 10 ** rng.uniform(-1.3, 1.3)
    spread, exponent = rng.uniform(0.05, 1.2), rng.uniform(2, 6)
    share, retry = rng.uniform(0.001, 0.05), rng.uniform(1, 20)
    larger, often = rng.uniform(1.5, 6), rng.uniform(0.05, 0.5)
    every, pause = rng.randrange(20, 300), rng.uniform(1, 60)

    def regular_pause(step: int) -> float:
        return pause * rng.lognormvariate(0, 0.3) if step % every == every - 1 else 0.0

    return rng.choice(
        [
            lambda _: median * rng.lognormvariate(0, spread),
            lambda _: median * rng.paretovariate(exponent),
            lambda _: median * (0.5 + rng.weibullvariate(1, 0.5 + spread / 3)),
            # A read that is retried now and then.
            lambda _: median + (rng.expovariate(1 / retry) if rng.random() < share else 0),
            # Two sizes of images.
            lambda _: median * (larger if rng.random() < often else 1) * rng.lognormvariate(0, 0.1),
            # Checkpoints or the ends of epochs within a step.
            lambda step: median * rng.lognormvariate(0, 0.1) + regular_pause(step) / 4,
            lambda step: median * rng.lognormvariate(0, 0.2) + regular_pause(step),
        ]
    )


@dataclass(frozen=True)
class SimulatedRun:
    """A healthy run: its step times, and one to five storage hiccups: step → seconds.

    A step beyond the longest timeout is a stall by definition of the run file.
    """

    step_seconds: tuple[float, ...]
    hiccups: dict[int, float]

    @classmethod
    def of(cls, seed: int) -> SimulatedRun:
        rng = random.Random(seed)
        sampler, steps = heavy_tailed(rng), rng.randrange(60, 400)
        durations = tuple(min(sampler(step), BOUNDS.longest) for step in range(steps))
        disturbed = rng.sample(range(steps), rng.randint(1, 5))
        return cls(durations, {step: rng.uniform(5, 100) for step in disturbed})

    def simulate(self, detector: StallDetector, *, with_hiccups: bool) -> tuple[float, int]:
        """Poll just before each step ends; return the time and the number of false alarms."""
        now, alarms, durations = 0.0, 0, list[float]()
        for number, usual in enumerate(self.step_seconds):
            since = now
            duration = max(usual, self.hiccups.get(number, 0.0) if with_hiccups else 0.0)
            now += duration
            detector.resume(now)
            alarms += bool(detector.overdue([sample(since, sequence=number)], now))
            if number >= WARM_UP[Phase.STEP]:
                durations.append(duration)
            if number % 40 == 0:
                detector.learn({Phase.STEP: DurationHistogram.of(durations)})
        detector.learn({Phase.STEP: DurationHistogram.of(durations)})
        return now, alarms


def seconds_until_detected(detector: StallDetector, now: float, rng: random.Random) -> float:
    """Return after how many seconds a rank that hangs from ``now`` on is overdue."""
    hung, polled = sample(now, sequence=10**6), now
    while not detector.overdue([hung], polled):
        polled += rng.uniform(0.5, 1.5)
    return polled - now


@pytest.mark.parametrize("runs", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_hiccups_of_healthy_runs_raise_no_alarm_and_delay_detection_little(runs: int) -> None:
    in_time = 0
    for seed in range(runs):
        run, rng = SimulatedRun.of(seed), random.Random(seed)
        usual, disturbed = (StallDetector(BOUNDS, max_gap=5) for _ in range(2))
        assert run.simulate(usual, with_hiccups=False)[1] == 0, seed
        now, alarms = run.simulate(disturbed, with_hiccups=True)
        assert alarms == 0, seed
        detected = seconds_until_detected(disturbed, now, rng)
        assert detected <= BOUNDS.longest + 1.5
        in_time += detected <= 2 * usual.timeouts[Phase.STEP]
    assert in_time >= 0.99 * runs


@given(
    st.lists(st.floats(0.002, 300), min_size=60, max_size=200),
    st.floats(0.002, 10_000),
    st.integers(1, 8),
    st.sampled_from([Phase.DATA, Phase.STEP, Phase.EVALUATION]),
)
def test_one_pause_of_all_ranks_extends_a_timeout_less_than_twice(
    durations: list[float], pause: float, ranks: int, phase: Phase
) -> None:
    before = DurationHistogram.of(durations)
    # The same median with and without the pause.
    after = before + DurationHistogram.of([pause] * ranks)
    bounds = TimeoutBounds(0.001, 10**9)
    usual = bounds.timeout(phase, before, ranks)
    disturbed = bounds.timeout(phase, after, ranks)
    assert BOUNDS.timeout(phase, after, ranks) <= BOUNDS.longest
    medians = [max(histogram.quantile(0.5) or 0, 0.05) for histogram in (before, after)]
    if medians[0] == medians[1]:
        assert disturbed <= 2 * usual


def test_pauses_that_belong_to_the_run_are_learned() -> None:
    often = DurationHistogram.of([1.0] * 900 + [25.0] * 100)
    assert BOUNDS.timeout(Phase.STEP, often) > 5 * 25


def test_the_longest_durations_are_forgotten() -> None:
    detector = StallDetector(TimeoutBounds(1, 1200), max_gap=5)
    window = WINDOW_DURATIONS[Phase.STEP]
    durations = [40.0] * 60
    detector.learn({Phase.STEP: DurationHistogram.of(durations)})
    assert detector.timeouts[Phase.STEP] == pytest.approx(200, rel=0.07)
    for _ in range(3):
        durations += [1.0] * window
        detector.learn({Phase.STEP: DurationHistogram.of(durations)})
    assert detector.timeouts[Phase.STEP] == pytest.approx(5, rel=0.07)
    assert len(detector.durations(Phase.STEP)) == window


def test_a_resolved_stall_is_not_learned() -> None:
    detector = StallDetector(TimeoutBounds(1, 1200), max_gap=5)
    durations = [1.0] * 100
    detector.learn({Phase.STEP: DurationHistogram.of(durations)})
    before = detector.timeouts[Phase.STEP]
    for _ in range(50):
        durations.append(30.0)
        detector.learn({Phase.STEP: DurationHistogram.of(durations)})
    assert detector.timeouts[Phase.STEP] == before
    assert detector.durations(Phase.STEP).longest == pytest.approx(1, rel=0.07)


def test_tiny_medians_have_a_floor() -> None:
    """Prefetched data take a millisecond; a second's wait now and then is usual."""
    waits = DurationHistogram.of([0.001] * 900 + [1.1] * 100)
    assert BOUNDS.timeout(Phase.DATA, waits) == 120


def test_timeouts_are_learned_within_bounds() -> None:
    assert BOUNDS.timeout(Phase.STEP, DurationHistogram.of([1.0] * 10)) == 1200
    assert BOUNDS.timeout(Phase.STEP, DurationHistogram.of([1.0] * 60)) == 120
    assert BOUNDS.timeout(Phase.STEP, DurationHistogram.of([60.0] * 60)) == pytest.approx(
        300, rel=0.07
    )
    assert BOUNDS.timeout(Phase.STEP, DurationHistogram.of([900.0] * 60)) == 1200
    assert BOUNDS.timeout(Phase.START, DurationHistogram.of([1.0] * 60)) == 1200


def test_rare_phases_have_a_five_times_longer_shortest_timeout() -> None:
    quick = DurationHistogram.of([0.01] * 60)
    assert BOUNDS.timeout(Phase.STEP, quick) == 120
    assert BOUNDS.timeout(Phase.DATA, quick) == 120
    for phase in (Phase.CHECKPOINT, Phase.EVALUATION, Phase.SAMPLES):
        assert BOUNDS.timeout(phase, quick) == 600
    assert TimeoutBounds(120, 300).timeout(Phase.CHECKPOINT, quick) == 300


def test_slow_checkpoint_is_no_stall_before_its_own_timeout() -> None:
    detector = StallDetector(TimeoutBounds(1, 1200), max_gap=5)
    detector.learn({Phase.STEP: DurationHistogram.of([0.1] * 99)})
    slow = sample(0, phase=Phase.CHECKPOINT)
    # No checkpoint is known yet, then three of 2 s: the timeout is five times as long.
    assert not detector.overdue([slow], 1)
    detector.learn({Phase.CHECKPOINT: DurationHistogram.of([2.0] * 3)})
    detector.resume(9)
    assert not detector.overdue([slow], 9)
    assert detector.overdue([slow], 11)
    assert detector.timeouts[Phase.STEP] == 1


def test_clock_jump_and_frozen_node_raise_no_alarm() -> None:
    detector = StallDetector(TimeoutBounds(10, 10), max_gap=5)
    hung = sample(0.0)
    assert not detector.overdue([hung], 1)
    for jump in (10_000.0, 500.0, 500.5):
        assert not detector.overdue([hung], jump)
    # A process that stays silent is detected all the same.
    now = 500.5
    while not detector.overdue([hung], now):
        now += 1
        assert now < 520
    # A new heartbeat resets the gaps.
    resumed = sample(now, sequence=1)
    assert detector.silences([resumed], now + 1) == {0: 1}


def test_ended_process_is_not_overdue() -> None:
    detector = StallDetector(TimeoutBounds(10, 10), max_gap=5000)
    ended = replace(sample(0), exit_state=ExitState.DONE)
    assert not detector.overdue([ended], 1000)
    assert detector.overdue([sample(0)], 1001)


# ---------------------------------------------------------------------- culprits

WAITING = RankStatus(0, 0, Phase.STEP, 7, 20, in_collective=True)


@pytest.mark.parametrize(
    ("others", "silent", "expected"),
    [
        ([replace(WAITING, rank=1, state="T")], {}, (1, 0, "stopped")),
        ([replace(WAITING, rank=9, node=1, state="Z")], {}, (9, 1, "dead")),
        (
            [replace(WAITING, rank=1, phase=Phase.DATA, sequence=19)],
            {},
            (1, 0, "data after step 7"),
        ),
        ([replace(WAITING, rank=1)], {3: 60.0, 2: 9.0}, (None, 3, "node 3 has sent nothing for")),
        (
            [
                replace(WAITING, rank=8, node=1, sequence=19),
                replace(WAITING, rank=9, node=1, sequence=19),
            ],
            {},
            (None, 1, "ranks 8, 9"),
        ),
        ([replace(WAITING, rank=1, in_collective=False)], {}, (1, 0, "does not wait")),
        ([replace(WAITING, rank=1)], {}, (None, None, "same phase")),
        ([replace(WAITING, rank=1, in_collective=None)], {}, (None, None, "same phase")),
        ([], {}, (0, 0, "only one")),
    ],
)
def test_culprit_is_found(
    others: list[RankStatus], silent: dict[int, float], expected: tuple[int | None, int | None, str]
) -> None:
    rank, node, reason = expected
    culprit = find_culprit([WAITING, *others], silent)
    assert (culprit.rank, culprit.node) == (rank, node)
    assert reason in culprit.reason


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


def test_innermost_frames_show_ranks_waiting_in_a_collective() -> None:
    reduces = "all_reduce (torch/distributed/distributed_c10d.py:2806)"
    assert waits_in_collective(PY_SPY.format(innermost=reduces)) is True
    backward = "_engine_run_backward (torch/autograd/graph.py:979)"
    assert waits_in_collective(PY_SPY.format(innermost=backward)) is True
    assert waits_in_collective(PY_SPY.format(innermost="spin (loss.py:3)")) is False
    path = "/venv/torch/distributed/distributed_c10d.py"
    assert waits_in_collective(FAULTHANDLER.format(path=path, function="barrier")) is True
    assert waits_in_collective(FAULTHANDLER.format(path="/a/loss.py", function="spin")) is False
    assert waits_in_collective("no stacks of process 7") is None
