"""Exposure follows evidence: a large start needs a job or a canary that ran on the same path."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from sm_train.cost.estimate import Estimate
from sm_train.cost.json_document import as_document
from sm_train.estimators.config.naming import is_canary
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.training_request import TrainingRequest
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.base.wings import optional_module
from sm_train.toolkit.records.training_job import JobPath, TrainingJob, job_path, jobs_since
from sm_train.toolkit.terminal.formatting import format_total_usd, format_usd

if TYPE_CHECKING:
    import boto3

EXPOSED_USD = 1_000.0
"""A start that may cost more needs evidence."""

EVIDENCE_DAYS = 90
"""Older jobs prove nothing: images, drivers and quotas change."""


def require_proven(
    session: boto3.Session,
    config: RunConfig,
    stage: StageSection,
    request: TrainingRequest,
    cost: Estimate,
    *,
    unproven: bool,
    target: str = "RUN",
) -> str | None:
    """Refuse a large start on a path without evidence, unless the user accepts that.

    ``target`` is how the user named the run.

    Returns:
        The evidence in words; None if the start needs none, or ``unproven`` accepts that.

    Raises:
        UserError: no job of the last 90 days has run on this path (exit code 3).
    """
    total = as_document(cost)["total"]
    if total["cost_usd"] is not None and total["cost_usd"] <= EXPOSED_USD:
        return None
    now = datetime.now(UTC)
    path = job_path(request)
    proof = evidence(path, jobs_since(session, now - timedelta(days=EVIDENCE_DAYS)))
    if proof is not None:
        return f"{proof.name} ran on the same path ({proof.created:%Y-%m-%d})"
    if unproven:
        return None
    raise UserError(
        f"{stage.name}: costs {format_total_usd(total)}, and no job or canary of the last "
        f"{EVIDENCE_DAYS} days has run in {session.region_name} on {path}; first "
        f"{_proposal(config, stage, session.region_name, path, target)}; --unproven starts without",
        ExitCode.PREFLIGHT,
    )


def evidence(path: JobPath, jobs: Iterable[TrainingJob]) -> TrainingJob | None:
    """Return the newest job that ran on a path: it started to train, and did not fail."""
    return max(
        (job for job in jobs if _ran(job) and _is_on(path, job)),
        key=lambda job: job.created,
        default=None,
    )


def _ran(job: TrainingJob) -> bool:
    return job.started is not None and job.status in ("Completed", "Stopped", "Stopping")


def _is_on(path: JobPath, job: TrainingJob) -> bool:
    # Canaries are bought on demand, whatever their run is.
    return job.path is not None and job.path.proves(path, capacity=not is_canary(job.run))


def _proposal(
    config: RunConfig, stage: StageSection, region: str, path: JobPath, target: str
) -> str:
    run = target if target == "RUN" else shlex.quote(target)
    command = f"`sm-train doctor {run} --canary --instance-type {path.instance_type}`"
    canaries = optional_module("sm_train.toolkit.probes.doctor.canary_run")
    if canaries is not None:
        with contextlib.suppress(UserError):
            canary = canaries.derive_canary(
                config, stage, region, datetime.now(), path.instance_type
            )
            usd = canary.price.usd
            price = "an unknown price" if usd is None else format_usd(usd)
            return f"{command} tries it for {price}"
    return f"{command} tries it"
