"""Indexes shards on SageMaker Processing: lists locally, shows the price, asks, starts the job."""

from __future__ import annotations

from sm_train.cost.instances import instance_vcpus
from sm_train.cost.prices import PriceTable
from sm_train.entrypoints.data_prep.indexing.index_plan import IndexPlan
from sm_train.estimators.bundle.user_code import UserCode
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.processing import INDEX_INSTANCE, ProcessingJob, ProcessingRequest
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.data_prep.packing.index import IndexJob, plan_index, store_plan
from sm_train.toolkit.data_prep.packing.shard_set import find_shards_folder
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

BYTES_PER_VCPU_SECOND = 100e6
"""Assumed speed of reading all bytes. benchmarks/index.py measures the speed of a core on bytes in
memory; the network of an instance is slower."""

_VOLUME_GB = 200
"""Holds a shard of several GB for each vCPU."""


class IndexRequestDocument(CostDocument):
    """The output of ``index --on sagemaker --dry-run``."""

    request: ProcessingRequest
    shards: int
    known: int
    bytes: int


def index_on_sagemaker(
    job: IndexJob, config: RunConfig, options: ProcessingOptions, prices: PriceTable, region: str
) -> None:
    """Show the plan of a Processing job and its cost, ask for confirmation, and start it.

    Raises:
        UserError: the plan is invalid, the user did not confirm, or AWS rejects a request.
    """
    require_s3(job.address)
    with translate_aws_errors(job.address):
        plan, current = plan_index(find_shards_folder(job.address, job.access), job)
    if current is not None:
        stderr_console().print("the index is up to date: nothing was started")
        return
    require_parts(options.instances, len(plan.unknown), "shards")
    request = _request(plan, config, options, region)
    size = sum(plan.by_name[name].bytes for name in plan.unknown)
    seconds = None if job.headers_only else _reading_seconds(size, request)
    cost = estimate_cost(request, seconds, prices, region)
    line = f"{len(plan.unknown):,} shards, {size / 1e6:,.1f} MB"
    known = f"; {len(plan.known):,} others are in the index" if plan.known else ""
    for text in (
        f"{line}{known} → {plan.storage.address(plan.index_file)}",
        describe_job(request, cost, f"a vCPU reads {BYTES_PER_VCPU_SECOND / 1e6:.0f} MB/s"),
    ):
        stderr_console().print(text, markup=False, soft_wrap=True)
    if options.dry_run:
        write_json(_document(plan, size, request, cost))
        return
    name = start_job(
        request,
        config,
        plan.state.address(""),
        job.access,
        region=region,
        is_finished=lambda: False,
        store_plan=lambda: store_plan(plan),
        files=lambda: code_files(config, UserCode()),
        yes=options.yes,
    )
    stderr_console().print(f"started {name}")
    if options.as_json:
        write_json({"processing_job_name": name, "region": region})


def _request(
    plan: IndexPlan, config: RunConfig, options: ProcessingOptions, region: str
) -> ProcessingRequest:
    processing = ProcessingJob(
        "index",
        plan.state.address(""),
        options.instance or INDEX_INSTANCE,
        options.instances,
        volume_gb=_VOLUME_GB,
    )
    return plan_request(config, processing, region)


def _reading_seconds(size: int, request: ProcessingRequest) -> float | None:
    """Return how long reading takes at the assumed speed; None if that is unknown."""
    cluster = request["ProcessingResources"]["ClusterConfig"]
    vcpus = instance_vcpus(cluster["InstanceType"])
    if vcpus is None:
        return None
    return size / (BYTES_PER_VCPU_SECOND * vcpus * cluster["InstanceCount"])


def _document(
    plan: IndexPlan, size: int, request: ProcessingRequest, cost: ProcessingCost
) -> IndexRequestDocument:
    return {
        "request": request,
        "shards": len(plan.unknown),
        "known": len(plan.known),
        "bytes": size,
        **cost_document(cost),
    }
