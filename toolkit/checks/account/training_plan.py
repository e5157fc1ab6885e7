"""Compares the run's training plan with what the run needs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.planning.training_plans import described_plan, plan_problems

if TYPE_CHECKING:
    import boto3

TRAINING_PLAN = Check("training-plan", ("error", "warning", "info"))

_WHERE = "cluster.training_plan"


def training_plan_findings(
    config: RunConfig, session: boto3.Session, region: str, needed: float | None
) -> Iterator[Finding]:
    """Describe the plan, and check it against the run, which takes ``needed`` seconds."""
    now = datetime.now(UTC)
    plan, unknown = described_plan(session, config)
    if unknown is not None:
        fix = "allow sagemaker:DescribeTrainingPlan (`sm-train iam`), and check the ARN"
        yield TRAINING_PLAN.found("warning", _WHERE, f"unchecked: {unknown}", fix)
    if plan is None:
        return
    problems = list(plan_problems(plan, config, region, needed, now))
    for level, message, fix in problems:
        if level == "error":
            yield TRAINING_PLAN.found("error", _WHERE, message, fix)
        else:
            yield TRAINING_PLAN.found("warning", _WHERE, message, fix)
    if not problems:
        yield TRAINING_PLAN.found("info", _WHERE, plan.describe(now), "")
