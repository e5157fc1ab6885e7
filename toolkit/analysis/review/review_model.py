"""The result of a review: verdicts, figures and charts of each job. Unknown values are None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sm_train.cost.timeline import PARTS
from sm_train.toolkit.planning.spent import ProjectionDocument
from sm_train.toolkit.report_html.notebook import html_table
from sm_train.toolkit.terminal.json_record import INLINE, record_document

Level = Literal["good", "warning", "bad", "unknown"]
"""``unknown`` if no measurement allows a verdict."""

LEVELS: tuple[Level, ...] = ("bad", "warning", "unknown", "good")
"""Worst first."""


SYMBOLS: dict[Level, str] = {"good": "✓", "warning": "!", "bad": "✗", "unknown": "?"}
"""Shown with the color, so that no information depends on color alone."""

_PART_LABELS = {
    "useful": "training",
    "start_up": "start-up",
    "lost_work": "repeated work",
    "data_wait": "waiting for data",
    "shut_down": "shut-down",
}


def part_label(part: str) -> str:
    """Return the display name of a part of cost.timeline."""
    return _PART_LABELS.get(part, part.replace("_", " "))


MarkKind = Literal["start", "stall", "checkpoint", "evaluation", "error", "end"]


@dataclass(frozen=True)
class Verdict:
    """The answer to one question about a job.

    ``sentence`` is the answer, ``evidence`` the figures behind it, ``fix`` the suggested fix; None
    if there is nothing to do.
    """

    code: str
    level: Level
    question: str
    sentence: str
    evidence: tuple[str, ...] = ()
    fix: str | None = None


@dataclass(frozen=True)
class Curve:
    """Values over seconds since the job began; ``low`` and ``high`` are their extremes.

    All sequences have the same length; a value of None is a gap in the curve.
    """

    label: str
    times_seconds: Sequence[float]
    values: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None


@dataclass(frozen=True)
class Mark:
    """An event that is marked on all charts of the job, with its duration in seconds."""

    kind: MarkKind
    time_seconds: float
    seconds: float
    label: str


@dataclass(frozen=True)
class Chart:
    """Curves of one unit over the job's time. ``full`` is the maximum possible value, if any."""

    code: str
    title: str
    unit: str
    lines: tuple[Curve, ...]
    full: float | None = None


@dataclass(frozen=True)
class Figures:
    """The figures of a job, as compared between jobs and written as a CSV row.

    ``seconds`` splits the billed (or, without a bill, the elapsed) seconds into cost.timeline's
    PARTS and ``useful``; it is None if the log does not allow it. ``gpu_utilization``,
    ``data_wait_share``, ``mfu`` and ``goodput`` are shares of 1.
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
    seconds: Mapping[str, float] | None = None


@dataclass(frozen=True)
class StepProgress:
    """The step that the job had reached at each time, in seconds since it began; both rise."""

    times_seconds: Sequence[float]
    steps: Sequence[float]


@dataclass(frozen=True)
class SampleImage:
    """The images that an evaluation sampled, as a data URI; ``location`` is the original's.

    ``address`` is None in JSON.
    """

    step: int
    location: str
    address: str | None


@dataclass(frozen=True)
class JobReview:
    """The review of one job, or of one stage of a local run.

    ``level`` is that of the worst verdict. ``begin`` is in Unix seconds.
    """

    name: str
    run: str | None
    stage: str | None
    level: Level = field(init=False)
    begin: float
    passed_seconds: float
    figures: Figures = field(metadata=INLINE)
    verdicts: tuple[Verdict, ...]
    """Worst first."""
    charts: tuple[Chart, ...]
    marks: tuple[Mark, ...]
    progress: StepProgress | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    """The run file's settings, or the start event's without a run file."""
    samples: tuple[SampleImage, ...] = ()

    def __post_init__(self) -> None:
        levels = (verdict.level for verdict in self.verdicts)
        object.__setattr__(self, "level", min(levels, key=LEVELS.index, default="unknown"))


@dataclass(frozen=True, repr=False)
class Review:
    """The reviews of several jobs, in the order in which the jobs began.

    In a notebook the verdicts are shown as a table.
    """

    jobs: tuple[JobReview, ...]
    warnings: tuple[str, ...] = ()
    """What could not be read, and what is missing because of it."""
    runs: Mapping[str, ProjectionDocument] = field(default_factory=dict)
    """What each run on SageMaker has cost and will cost, by its name."""
    parts: tuple[str, ...] = ("useful", *PARTS)
    """The keys of ``seconds`` of a job's figures."""

    def document(self) -> dict[str, Any]:
        """Return the document of ``review --json``: these fields, without the images."""
        jobs = (
            replace(job, samples=tuple(replace(sample, address=None) for sample in job.samples))
            for job in self.jobs
        )
        return record_document(replace(self, jobs=tuple(jobs)))

    def __repr__(self) -> str:
        return f"Review({', '.join(f'{job.name}: {job.level}' for job in self.jobs)})"

    def _repr_html_(self) -> str:
        rows = [
            [
                job.name,
                f"{SYMBOLS[verdict.level]} {verdict.level}",
                verdict.question,
                verdict.sentence,
                verdict.fix or "",
            ]
            for job in self.jobs
            for verdict in job.verdicts
        ]
        columns = ("job", "verdict", "question", "answer", "fix")
        return html_table(columns, rows, notes=self.warnings)
