"""Attribute a job's billed seconds to purposes, from its event lines.

Times are Unix seconds of the job's clock. Steps are known at each logging interval only, so a step
lost between two lines counts as part of the interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

from sm_train.cost.stage import StageProgram, program_that_ran

PARTS = (
    "start_up",
    "restarts",
    "lost_work",
    "stalls",
    "checkpoints",
    "evaluation",
    "data_wait",
    "shut_down",
)
"""Purposes of a billed second other than training, in the order of a job's life cycle."""

STALL_SECONDS = 60.0
STALL_FACTOR = 3.0
"""Time without progress counts as a stall once it is both longer than this many seconds and this
many times the interval's usual length; less is normal variation."""

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Timeline:
    """Seconds by purpose, and the progress that the job made.

    ``seconds`` holds :data:`PARTS` and ``useful``, and sums to the billed seconds.
    ``first_step`` and ``last_step`` are optimizer steps of the stage; ``restarts`` counts starts
    after the first within the job.
    """

    seconds: Mapping[str, float]
    first_step: int
    last_step: int
    restarts: int
    restart_seconds: float | None
    compile_seconds: float | None
    """Mean of a start, which ``start_up`` and ``restarts`` include; None if unknown."""
    checkpoint_seconds: float | None
    """Mean of one checkpoint."""
    steps_per_second: float | None
    """The job's mean speed (:func:`mean_speed`)."""
    data_wait_share: float | None
    """The share of the training time that waits for data (:func:`mean_speed`)."""
    effective_batch_size: int | None
    world_size: int | None
    resolution: int | None
    program: StageProgram
    ended: bool


@dataclass
class _Account:
    """Running totals while events are read."""

    anchor: float
    """Time of the last progress."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    step: int = 0
    blocked: float = 0.0
    """Seconds of checkpoints and evaluation since then."""
    fresh: bool = True
    """No interval yet since the last start."""
    interval: float = 0.0
    """Usual seconds of the last logging interval."""
    starts: int = 0
    checkpoints: int = 0
    compiled: float | None = None
    """Seconds of compilation; None if no event states any."""


def timeline(
    events: Iterable[Event], begin: float, end: float, previous_step: int | None = None
) -> Timeline:
    """Account for the billed seconds from ``begin`` to ``end`` by the ``events`` of one rank.

    ``previous_step`` is the last step of the stage's previous job: steps between the checkpoint
    that this job resumed from and that step were lost and are recomputed here.
    """
    ordered = sorted(events, key=lambda event: event["time"])
    usual, speed = _usual_seconds_per_step(ordered), mean_speed(ordered)
    account = _Account(begin)
    first_step: int | None = None
    start: Event = {}
    ended = False
    for event in ordered:
        kind = event["kind"]
        if kind == "start":
            _start(account, event, usual, previous_step if account.starts == 0 else None)
            first_step = account.step if first_step is None else first_step
            start = event
        elif kind == "step":
            _step(account, event, usual)
        elif kind in ("checkpoint", "eval"):
            _blocked(account, kind, float(event["seconds"] or 0.0))
        elif kind == "end":
            ended = True
    tail = max(0.0, end - account.anchor - account.blocked)
    if not account.starts or ended:
        account.seconds["shut_down" if ended else "start_up"] += tail
    elif _is_stall(tail, account.interval):
        account.seconds["stalls"] += tail
    return Timeline(
        seconds=_balanced(account.seconds, end - begin),
        first_step=first_step or 0,
        last_step=account.step,
        restarts=max(0, account.starts - 1),
        restart_seconds=_each(account.seconds["restarts"], account.starts - 1),
        compile_seconds=account.compiled and account.compiled / max(1, account.starts),
        checkpoint_seconds=_each(account.seconds["checkpoints"], account.checkpoints),
        steps_per_second=None if speed is None else speed.steps_per_second,
        data_wait_share=None if speed is None else speed.data_wait_share,
        effective_batch_size=start.get("effective_batch_size"),
        world_size=start.get("world_size"),
        resolution=start.get("resolution"),
        program=program_that_ran(start),
        ended=ended,
    )


@dataclass(frozen=True)
class MeanSpeed:
    """Optimizer steps per second of a job's training time: steps ÷ seconds.

    The seconds leave out what an estimate prices separately: start-up and restarts with the first
    interval after each, checkpoints and evaluation. They include stalls. ``data_wait_share`` is the
    part of them in which training waited for data, None if that is unknown. ``low`` and ``high``
    are P10 and P90 over parts of the training, None if there are too few intervals. ``usual`` is
    the median interval's.
    """

    steps_per_second: float
    data_wait_share: float | None
    low: float | None
    high: float | None
    usual: float
    intervals: int


_PARTS = 10
"""Parts of a training over which the deciles of its speed are taken: each has a share of every
stall that is longer than it."""


def mean_speed(events: Iterable[Event]) -> MeanSpeed | None:
    """Return the speed of a job by the ``events`` of one rank, in the order of their times.

    Several starts count together. The newest ``step`` event alone gives the speed since the last
    start: it has the sums of all intervals. None without a step event.
    """
    first: list[_Interval] = []
    later: list[_Interval] = []
    previous: Event | None = None
    blocked = 0.0
    for event in events:
        kind = event["kind"]
        if kind == "start":
            previous, blocked = None, 0.0
        elif kind in ("checkpoint", "eval"):
            blocked += float(event["seconds"] or 0.0)
        elif kind == "step" and event["steps_per_second"]:
            if previous is None and event.get("timed_seconds"):
                # The log lacks the events before it, and its sums have their intervals.
                later.append(_interval({**event, **_NOTHING_TIMED}, event, 0.0))
            elif previous is None:
                first.append(_first_interval(event))
            elif event["step"] > previous["step"]:
                later.append(_interval(previous, event, blocked))
            previous, blocked = event, 0.0
    intervals = [interval for interval in later if interval.seconds > 0] or first
    if not intervals:
        return None
    low = high = None
    if len(intervals) >= _PARTS:
        cuts = [round(part * len(intervals) / _PARTS) for part in range(_PARTS + 1)]
        parts = [_mean(intervals[begin:end]) for begin, end in pairwise(cuts)]
        low, *_, high = quantiles(parts, n=10, method="inclusive")
        # A few long stalls may move the mean out of the deciles.
        low, high = min(low, _mean(intervals)), max(high, _mean(intervals))
    waits = [interval.waited for interval in intervals]
    seconds = sum(interval.seconds for interval in intervals)
    return MeanSpeed(
        _mean(intervals),
        None if None in waits else sum(filter(None, waits)) / seconds,
        low,
        high,
        median(interval.steps / interval.seconds for interval in intervals),
        len(intervals),
    )


_NOTHING_TIMED = {"timed_steps": 0, "timed_seconds": 0.0, "waited_seconds": 0.0}


@dataclass(frozen=True)
class _Interval:
    """Optimizer steps with their seconds, of which ``waited`` passed without data."""

    steps: float
    seconds: float
    waited: float | None


def _first_interval(event: Event) -> _Interval:
    seconds = 1 / float(event["steps_per_second"])
    share = event["data_wait_share"]
    return _Interval(1.0, seconds, None if share is None else share * seconds)


def _interval(previous: Event, event: Event, blocked: float) -> _Interval:
    """Return the interval between two events, by the sums that both have, else by their times.

    ``blocked`` seconds passed in checkpoints and evaluation.
    """
    if event.get("timed_seconds") is not None and previous.get("timed_seconds") is not None:
        before, after = previous.get("waited_seconds"), event.get("waited_seconds")
        return _Interval(
            event["timed_steps"] - previous["timed_steps"],
            event["timed_seconds"] - previous["timed_seconds"],
            None if before is None or after is None else after - before,
        )
    seconds = max(float(event["time"]) - float(previous["time"]) - blocked, 0.0)
    share = event["data_wait_share"]
    waited = None if share is None else share * seconds
    return _Interval(float(event["step"] - previous["step"]), seconds, waited)


def _mean(intervals: Sequence[_Interval]) -> float:
    return sum(interval.steps for interval in intervals) / sum(
        interval.seconds for interval in intervals
    )


def _start(account: _Account, event: Event, usual: float, previous_step: int | None) -> None:
    part = "restarts" if account.starts else "start_up"
    account.seconds[part] += max(0.0, event["time"] - account.anchor - account.blocked)
    resumed = int(event["resumed_from_step"] or 0)
    before = account.step if account.starts else previous_step
    if before is not None and before > resumed:
        account.seconds["lost_work"] += (before - resumed) * usual
    account.starts += 1
    account.anchor, account.step, account.blocked, account.fresh = event["time"], resumed, 0.0, True


def _step(account: _Account, event: Event, usual: float) -> None:
    steps = max(0, int(event["step"]) - account.step)
    spent = max(0.0, event["time"] - account.anchor - account.blocked)
    working = min(spent, steps * usual)
    extra = spent - working
    if account.fresh:
        # The first interval includes compilation, the first batches and communicator set-up.
        account.seconds["start_up" if account.starts <= 1 else "restarts"] += extra
        if event.get("compile_seconds") is not None:
            account.compiled = (account.compiled or 0.0) + min(extra, event["compile_seconds"])
    elif _is_stall(extra, steps * usual):
        account.seconds["stalls"] += extra
    account.seconds["data_wait"] += working * float(event["data_wait_share"] or 0.0)
    account.anchor, account.step, account.interval = (
        event["time"],
        int(event["step"]),
        steps * usual,
    )
    account.blocked, account.fresh = 0.0, False


def _is_stall(silence: float, interval: float) -> bool:
    """Return whether ``silence`` exceeds normal variation and the time until the next line."""
    return silence > max(STALL_SECONDS, STALL_FACTOR * interval)


def _blocked(account: _Account, kind: str, seconds: float) -> None:
    account.seconds["checkpoints" if kind == "checkpoint" else "evaluation"] += seconds
    account.checkpoints += kind == "checkpoint"
    account.blocked += seconds


def _usual_seconds_per_step(events: Iterable[Event]) -> float:
    """Return the median over logging intervals, without the first after each start if possible."""
    first: list[float] = []
    later: list[float] = []
    fresh = True
    for event in events:
        if event["kind"] == "start":
            fresh = True
        elif event["kind"] == "step" and event["steps_per_second"]:
            (first if fresh else later).append(1 / float(event["steps_per_second"]))
            fresh = False
    return median(later or first) if later or first else 0.0


def _balanced(parts: Mapping[str, float], billed: float) -> dict[str, float]:
    """Add ``useful``, the remainder, to ``parts``.

    Overlapping or rounded parts may exceed the billed seconds; they are then scaled down.
    """
    spent = sum(parts.values())
    scale = billed / spent if spent > billed else 1.0
    scaled = {name: seconds * scale for name, seconds in parts.items()}
    return {**scaled, "useful": max(0.0, billed - sum(scaled.values()))}


def _each(seconds: float, count: int) -> float | None:
    return seconds / count if count > 0 else None
