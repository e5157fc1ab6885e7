"""The questions that a review answers: a module for each subject."""

from __future__ import annotations

from sm_train.toolkit.review.job_facts import JobFacts
from sm_train.toolkit.review.model import LEVELS, Verdict
from sm_train.toolkit.review.verdicts import data, goodput, gpus, loss, network, speed, warnings

QUESTIONS = (
    goodput.time_used,
    goodput.cost,
    goodput.ending,
    goodput.stalls,
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
"""In the order in which answers of one level are shown."""


def judge(facts: JobFacts) -> tuple[Verdict, ...]:
    """Every answer, the worst first."""
    found = [answer for question in QUESTIONS if (answer := question(facts)) is not None]
    return tuple(sorted(found, key=lambda one: LEVELS.index(one.level)))
