"""The document of ``review --json``, which is also the input of the HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TypedDict, cast

from sm_train.cost.timeline import PARTS
from sm_train.toolkit.costing.projection import ProjectionDocument
from sm_train.toolkit.review.review_model import JobReview, Level, MarkKind, Review


class VerdictDocument(TypedDict):
    """A :class:`~sm_train.toolkit.review.review_model.Verdict`."""

    code: str
    level: Level
    question: str
    sentence: str
    evidence: Sequence[str]
    fix: str | None


class CurveDocument(TypedDict):
    """A :class:`~sm_train.toolkit.review.review_model.Curve`."""

    label: str
    times_seconds: Sequence[float]
    values: Sequence[float | None]
    low: Sequence[float | None] | None
    high: Sequence[float | None] | None


class ChartDocument(TypedDict):
    """A :class:`~sm_train.toolkit.review.review_model.Chart`."""

    code: str
    title: str
    unit: str
    lines: Sequence[CurveDocument]
    full: float | None


class MarkDocument(TypedDict):
    """A :class:`~sm_train.toolkit.review.review_model.Mark`."""

    kind: MarkKind
    time_seconds: float
    seconds: float
    label: str


class FiguresDocument(TypedDict):
    """:class:`~sm_train.toolkit.review.review_model.Figures`, with null for empty ``seconds``."""

    status: str | None
    backend: str | None
    instance_type: str | None
    instances: int | None
    world_size: int | None
    resolution: int | None
    effective_batch_size: int | None
    first_step: int | None
    last_step: int | None
    max_steps: int | None
    steps_per_second: float | None
    images_per_second: float | None
    loss: float | None
    evaluation_loss: float | None
    mfu: float | None
    gpu_utilization: float | None
    data_wait_share: float | None
    goodput: float | None
    restarts: int | None
    stalls: int | None
    billable_seconds: float | None
    billed_usd: float | None
    estimate_usd: float | None
    difference_usd: float | None
    seconds: Mapping[str, float] | None


class StepProgressDocument(TypedDict):
    """A :class:`~sm_train.toolkit.review.review_model.StepProgress`."""

    times_seconds: Sequence[float]
    steps: Sequence[float]


class SampleDocument(TypedDict):
    """A :class:`~sm_train.toolkit.review.review_model.SampleImage`; ``address`` is null in JSON."""

    step: int
    location: str
    address: str | None


class JobDocument(FiguresDocument):
    """A :class:`~sm_train.toolkit.review.review_model.JobReview` with its figures as keys."""

    name: str
    run: str | None
    stage: str | None
    level: Level
    begin: float
    passed_seconds: float
    verdicts: Sequence[VerdictDocument]
    charts: Sequence[ChartDocument]
    marks: Sequence[MarkDocument]
    progress: StepProgressDocument | None
    settings: Mapping[str, str]
    samples: Sequence[SampleDocument]


class ReviewDocument(TypedDict):
    """The document of ``review --json``; ``parts`` are the keys of a job's ``seconds``.

    ``runs`` has what each run on SageMaker has cost and will cost, by its name.
    """

    jobs: list[JobDocument]
    runs: dict[str, ProjectionDocument]
    parts: list[str]
    warnings: list[str]


def as_document(review: Review, *, with_images: bool = False) -> ReviewDocument:
    """Return the review as the document of ``review --json``, which contains no images."""
    return {
        "jobs": [_job(one, with_images=with_images) for one in review.jobs],
        "runs": {name: one.as_dict() for name, one in review.projections.items()},
        "parts": ["useful", *PARTS],
        "warnings": list(review.warnings),
    }


def _job(job: JobReview, *, with_images: bool) -> JobDocument:
    figures = cast(FiguresDocument, asdict(job.figures))
    return {
        "name": job.name,
        "run": job.run,
        "stage": job.stage,
        "level": job.level,
        "begin": job.begin,
        "passed_seconds": job.end - job.begin,
        **figures,
        "seconds": figures["seconds"] or None,
        "verdicts": [cast(VerdictDocument, asdict(one)) for one in job.verdicts],
        "charts": [cast(ChartDocument, asdict(one)) for one in job.charts],
        "marks": [cast(MarkDocument, asdict(one)) for one in job.marks],
        "progress": None
        if job.progress is None
        else cast(StepProgressDocument, asdict(job.progress)),
        "settings": dict(job.settings),
        "samples": [
            {
                "step": one.step,
                "location": one.location,
                "address": one.address if with_images else None,
            }
            for one in job.samples
        ],
    }
