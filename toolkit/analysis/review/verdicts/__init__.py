"""The questions that a review answers, one module per subject."""

from __future__ import annotations

from sm_train.toolkit.analysis.review.job_facts import JobFacts
from sm_train.toolkit.analysis.review.review_model import LEVELS, Verdict
from sm_train.toolkit.analysis.review.verdicts import (
    data,
    goodput,
    gpus,
    loss,
    network,
    speed,
    storage,
    warnings,
)

QUESTIONS = (
    goodput.goodput,
    goodput.cost,
    goodput.outcome,
    goodput.stalls,
    storage.storage,
    speed.speed,
    gpus.gpus,
    speed.mfu,
    data.data,
    network.transport,
    network.doctor,
    gpus.stragglers,
    loss.loss,
    gpus.health,
    warnings.warnings,
)
"""The verdicts, in the order in which those of the same level are shown."""


def judge(facts: JobFacts) -> tuple[Verdict, ...]:
    """Return all verdicts, worst first."""
    verdicts = [verdict for question in QUESTIONS if (verdict := question(facts)) is not None]
    return tuple(sorted(verdicts, key=lambda verdict: LEVELS.index(verdict.level)))
