"""Makes columns on SageMaker Processing: plans locally, shows the price, asks, starts the job."""

from __future__ import annotations

import time
from pathlib import Path

from sm_train.cost.prices import PriceTable
from sm_train.entrypoints.data_prep.enrichment.enrichment_plan import EnrichmentPlan
from sm_train.estimators.bundle.user_code import UserCode, UserCodeError, read_user_code
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.processing import ProcessingJob, ProcessingRequest
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.enrichment.enrich import (
    EnrichJob,
    PlannedEnrichment,
    find_finished,
    plan_enrichment,
    store_or_resume,
)
from sm_train.toolkit.data_prep.processing.processing_cost import (
    CostDocument,
    ProcessingCost,
    cost_document,
    describe_job,
    estimate_cost,
)
from sm_train.toolkit.data_prep.processing.start_processing import (
    ProcessingOptions,
    code_files,
    plan_request,
    require_parts,
    require_s3,
    start_job,
)
from sm_train.toolkit.terminal.console import stderr_console, write_json

DEFAULT_INSTANCE = "ml.g5.2xlarge"
"""One GPU with 24 GB, which is enough for a captioner or an encoder in bf16."""


class EnrichmentRequestDocument(CostDocument):
    """The output of ``enrich --on sagemaker --dry-run``."""

    request: ProcessingRequest
    images: int
    parts: int
    bytes: int


def enrich_on_sagemaker(
    job: EnrichJob,
    config: RunConfig,
    options: ProcessingOptions,
    images_per_second: float | None,
    prices: PriceTable,
    region: str,
) -> None:
    """Show the plan of a Processing job and its cost, ask for confirmation, and start it.

    ``images_per_second`` is the speed of an instance, which the estimate is based on.

    Raises:
        UserError: the plan is invalid, the user did not confirm, or AWS rejects a request.
    """
    require_s3(job.destination)
    code = _read_code(job.code)
    started_ns = time.time_ns()
    with plan_enrichment(job) as planned:
        if planned.local is not None:
            raise UserError(f"--on: {planned.local} is a local file; SageMaker reads only from S3")
        require_parts(options.instances, planned.parts, "parts")
        request = _request(job, config, options, region)
        seconds = (
            None
            if images_per_second is None
            else planned.images / images_per_second / options.instances
        )
        cost = estimate_cost(request, seconds, prices, region)
        stderr_console().print(_plan_line(planned), markup=False, soft_wrap=True)
        assumption = f"an instance does {images_per_second or 0:,g} images/s"
        line = describe_job(request, cost, assumption)
        stderr_console().print(line, markup=False, soft_wrap=True)
        if options.dry_run:
            write_json(_document(planned, request, cost))
            return
        name = start_job(
            request,
            config,
            job.destination,
            job.access,
            region=region,
            is_finished=lambda: find_finished(planned, job) is not None,
            store_plan=lambda: _store(planned, job, started_ns),
            files=lambda: _files(job, config, code),
            yes=options.yes,
        )
    stderr_console().print(f"started {name}" if name else "already enriched: nothing was started")
    if options.as_json:
        write_json({"processing_job_name": name, "region": region})


def _read_code(folder: Path) -> UserCode:
    try:
        return read_user_code(folder)
    except UserCodeError as error:
        raise UserError(str(error)) from None


def _request(
    job: EnrichJob, config: RunConfig, options: ProcessingOptions, region: str
) -> ProcessingRequest:
    processing = ProcessingJob(
        "enrich",
        job.destination,
        options.instance or DEFAULT_INSTANCE,
        options.instances,
        with_model=job.model is not None,
    )
    return plan_request(config, processing, region)


def _plan_line(planned: PlannedEnrichment) -> str:
    plan: EnrichmentPlan = planned.plan
    size = f"{planned.images:,} images, {planned.image_bytes / 1e6:,.1f} MB"
    return f"{size} → {planned.parts:,} parts in {plan.destination.address('')}"


def _store(planned: PlannedEnrichment, job: EnrichJob, started_ns: int) -> None:
    store_or_resume(planned, job, started_ns)


def _files(job: EnrichJob, config: RunConfig, code: UserCode) -> dict[str, bytes | Path]:
    """Return what the job is given: the code of the user, and the model.

    Raises:
        UserError: the code contains a credential.
    """
    try:
        files: dict[str, bytes | Path] = {**code_files(config, code)}
    except UserCodeError as error:
        raise UserError(str(error)) from None
    if job.model is not None:
        for path in sorted(path for path in job.model.rglob("*") if path.is_file()):
            files[f"model/{path.relative_to(job.model).as_posix()}"] = path
    return files


def _document(
    planned: PlannedEnrichment, request: ProcessingRequest, cost: ProcessingCost
) -> EnrichmentRequestDocument:
    return {
        "request": request,
        "images": planned.images,
        "parts": planned.parts,
        "bytes": planned.image_bytes,
        **cost_document(cost),
    }
