"""The document of ``review --json``, from which the page is drawn too."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sm_train.cost.timeline import PARTS
from sm_train.toolkit.review.model import Review, Reviewed


def as_document(review: Review) -> dict[str, Any]:
    """Everything that is known, as JSON has it."""
    return {
        "jobs": [_job(one) for one in review.jobs],
        "parts": ["useful", *PARTS],
        "notes": list(review.notes),
    }


def _job(job: Reviewed) -> dict[str, Any]:
    figures = asdict(job.figures)
    return {
        "name": job.name,
        "run": job.run,
        "stage": job.stage,
        "level": job.level,
        "begin": job.begin,
        "passed_seconds": job.end - job.begin,
        **figures,
        "seconds": figures["seconds"] or None,
        "verdicts": [asdict(one) for one in job.verdicts],
        "charts": [asdict(one) for one in job.charts],
        "marks": [asdict(one) for one in job.marks],
    }
