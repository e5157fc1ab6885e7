"""The questions that a review answers: a module for each subject."""

from __future__ import annotations

from sm_train.toolkit.review.facts import Facts
from sm_train.toolkit.review.model import LEVELS, Verdict
from sm_train.toolkit.review.verdicts import data, learning, machines, network, said, speed
from sm_train.toolkit.review.verdicts import time_used as time

QUESTIONS = (
    time.time_used, time.cost, time.ending, time.stalls, speed.speed, machines.gpus, speed.mfu,
    data.data, network.transport, network.doctor, machines.stragglers, learning.loss,
    machines.health, said.warnings,
)  # fmt: skip
"""In the order in which answers of one level are shown."""


def judge(facts: Facts) -> tuple[Verdict, ...]:
    """Every answer, the worst first."""
    found = [answer for question in QUESTIONS if (answer := question(facts)) is not None]
    return tuple(sorted(found, key=lambda one: LEVELS.index(one.level)))
