"""What a review is made of, from the facts of one job to what is said of it. Unknown is None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["good", "warning", "bad", "unknown"]
"""``unknown`` where nothing was measured from which it could be told."""

LEVELS: tuple[Level, ...] = ("bad", "warning", "unknown", "good")
"""The worst first."""


SIGNS: dict[Level, str] = {"good": "✓", "warning": "!", "bad": "✗", "unknown": "?"}
"""Nothing is said by colour alone."""

_PARTS = {
    "useful": "training",
    "start_up": "start-up",
    "lost_work": "work done again",
    "data_wait": "waiting for data",
    "shut_down": "shut-down",
}


def part_label(part: str) -> str:
    """What a job's seconds went into (cost.timeline), as people call it."""
    return _PARTS.get(part, part.replace("_", " "))


Kind = Literal["start", "stall", "checkpoint", "evaluation", "error", "end"]
"""Of a mark on a job's charts."""


@dataclass(frozen=True)
class Verdict:
    """One question about a job and its answer.

    ``sentence`` is the answer, ``evidence`` the figures that it rests on, ``fix`` what to do; None
    where nothing needs doing.
    """

    code: str
    level: Level
    question: str
    sentence: str
    evidence: tuple[str, ...] = ()
    fix: str | None = None


@dataclass(frozen=True)
class Curve:
    """A curve: seconds since the job began, and values; ``low`` and ``high`` are the extremes.

    All of one length; a value that is None is a gap in the curve.
    """

    label: str
    times_seconds: Sequence[float]
    values: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None


@dataclass(frozen=True)
class Mark:
    """Something that happened once, or lasted, at a time of every chart of the job."""

    kind: Kind
    time_seconds: float
    seconds: float
    label: str


@dataclass(frozen=True)
class Chart:
    """Some curves of one unit over the job's time. ``full`` is the value that is all there is."""

    code: str
    title: str
    unit: str
    lines: tuple[Curve, ...]
    full: float | None = None


@dataclass(frozen=True)
class Figures:
    """A job in numbers: what a comparison of jobs shows, and a row of the CSV.

    ``seconds`` says what the billed (or, where nothing is billed, the passed) seconds went into:
    cost.timeline's PARTS and ``useful``; empty where the job's lines cannot tell.
    ``gpu_utilization``, ``data_wait_share``, ``mfu`` and ``goodput`` are shares of 1.
    """

    status: str | None = None
    backend: str | None = None
    instance_type: str | None = None
    instances: int | None = None
    world_size: int | None = None
    resolution: int | None = None
    effective_batch_size: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    max_steps: int | None = None
    steps_per_second: float | None = None
    images_per_second: float | None = None
    loss: float | None = None
    evaluation_loss: float | None = None
    mfu: float | None = None
    gpu_utilization: float | None = None
    data_wait_share: float | None = None
    goodput: float | None = None
    restarts: int | None = None
    stalls: int | None = None
    billable_seconds: float | None = None
    billed_usd: float | None = None
    estimate_usd: float | None = None
    difference_usd: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reviewed:
    """One job, or one stage of a local run. Times are Unix seconds."""

    name: str
    run: str | None
    stage: str | None
    begin: float
    end: float
    figures: Figures
    verdicts: tuple[Verdict, ...]
    """The worst first."""
    charts: tuple[Chart, ...]
    marks: tuple[Mark, ...]

    @property
    def level(self) -> Level:
        """Of its worst verdict."""
        return min((one.level for one in self.verdicts), key=LEVELS.index, default="unknown")


@dataclass(frozen=True)
class Review:
    """Some jobs side by side, in the order in which they began."""

    jobs: tuple[Reviewed, ...]
    notes: tuple[str, ...] = ()
    """What could not be read, and what that hides."""
