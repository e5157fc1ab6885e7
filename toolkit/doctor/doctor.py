"""Runs the doctor alone: on emulated nodes on this computer, or as a short job on SageMaker."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.cost.assumptions import Assumptions
from sm_train.entrypoints.doctor.doctor_history import FOLDER, read_results
from sm_train.estimators.bundle.bundle import Bundle
from sm_train.estimators.config.fields import MAX_JOB_NAME
from sm_train.estimators.config.naming import checkpoint_uri, staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.doctor_request import doctor_job_name, doctor_request
from sm_train.estimators.request.training_request import TrainingRequest
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.submit.run_bundle import bundle_of
from sm_train.toolkit.submit.submission import Submission, prepare, validate

if TYPE_CHECKING:
    from rich.console import Console


def examine_local(
    config: RunConfig,
    stage: StageSection,
    *,
    base: Path,
    nodes: int,
    processes: int,
    output: Path,
    console: Console,
) -> dict[str, Any]:
    """Run the doctor on emulated nodes; returns the result that it stored in the run's folder.

    Only the result is added to that folder: training may be running in it.

    Raises:
        UserError: the doctor cannot start, or stored no result.
    """
    from sm_train.toolkit.local.launcher import exclusive_run, run_stage

    single_stage = config.model_copy(update={"stages": [stage]})  # needs no earlier stage
    checkpoints = output / stage.name / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    before = len(read_results([checkpoints / FOLDER]))
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        root = Path(folder) / stage.name
        root.mkdir()
        (root / "checkpoints").symlink_to(checkpoints.absolute())
        with exclusive_run(Path(folder)):
            run_stage(
                single_stage,
                stage,
                bundle_of(single_stage, base),
                base=base,
                nodes=nodes,
                processes=processes,
                output=Path(folder),
                console=console,
                options=("--doctor-only", "true"),
            )
    stored = read_results([checkpoints / FOLDER])
    if len(stored) == before:
        raise UserError(
            f"--local: the doctor stored no result in {checkpoints / FOLDER}; see its output above",
            ExitCode.JOB_FAILED,
        )
    return stored[-1]


@dataclass(frozen=True)
class DoctorJob:
    """A job that only runs the doctor; ``seconds`` is its estimated billable time."""

    submission: Submission
    request: TrainingRequest
    seconds: float
    cost_usd: float | None
    results_uri: str

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document of ``--dry-run --json``."""
        return {
            "request": self.request,
            "billable_seconds": self.seconds,
            "cost_usd": self.cost_usd,
            "results": self.results_uri,
        }


def prepare_job(
    config: RunConfig, stage: StageSection, bundle: Bundle, region: str, now: datetime
) -> DoctorJob:
    """Build the job that examines the cluster of ``stage``; uses no network.

    Raises:
        UserError: the job's name is too long, or AWS has no image for the region.
    """
    name = doctor_job_name(config, stage.name, now)
    excess = len(name) - MAX_JOB_NAME
    if excess > 0:
        raise UserError(
            f"name: the doctor's job name {name} has {len(name)} characters and SageMaker allows "
            f"{MAX_JOB_NAME}; shorten the run's or the stage's name by {excess}"
        )
    submission = prepare(config, stage.name, bundle, region, now)
    request = doctor_request(submission.requests[0], config, name)
    validate(request)
    seconds = Assumptions().start_up_seconds + config.doctor.timeout
    price = submission.cost.stages[0].price.usd_per_instance_hour
    return DoctorJob(
        submission=replace(submission, requests=(request,)),
        request=request,
        seconds=seconds,
        cost_usd=None if price is None else float(price) * stage.instances * seconds / 3600,
        results_uri=f"{checkpoint_uri(config, stage, staging_bucket(config, region))}/{FOLDER}/",
    )
