"""Packs on SageMaker Processing: plans locally, prints the request, confirms and sends it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sm_train.cost.instances import instance_vcpus
from sm_train.cost.prices import PriceTable
from sm_train.entrypoints.data_prep.packing.stored_plan import PackPlan, store_plan
from sm_train.entrypoints.models.components import component_files
from sm_train.entrypoints.storage.storage import Storage, open_storage
from sm_train.estimators.bundle.user_code import UserCode
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.processing import (
    CONVERT_REQUIREMENTS,
    ProcessingJob,
    ProcessingRequest,
    convert_requirements,
)
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.packing.append import Comparison
from sm_train.toolkit.data_prep.packing.file_kinds import describe_skipped
from sm_train.toolkit.data_prep.packing.inputs import PackInputs
from sm_train.toolkit.data_prep.packing.pack import (
    PackJob,
    find_finished,
    open_finished,
    plan_pack,
    read_unfinished_append,
    remove_stale_state,
    require_not_extended,
    require_same_plan,
)
from sm_train.toolkit.data_prep.packing.pack_report import (
    COMPLETES_APPEND,
    describe_comparison,
    describe_filtered,
)
from sm_train.toolkit.data_prep.packing.table_preview import describe_columns
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

BYTES_PER_VCPU_SECOND = 20e6
"""Assumed speed. benchmarks/pack.py measures 45 MB/s per core when it decodes images that are in
memory. A vCPU is half a core, and S3 is slower than memory."""

_ASSUMPTION = f"a vCPU packs {BYTES_PER_VCPU_SECOND / 1e6:.0f} MB/s"


@dataclass(frozen=True)
class ProcessingPack:
    """A pack that was planned locally, and the Processing job that will build it."""

    request: ProcessingRequest
    pack: PackPlan
    inputs: PackInputs | None
    """None if the plan of an unfinished append is in the destination."""
    started_ns: int

    @property
    def encodes_latents(self) -> bool:
        """Whether latents are encoded, which takes far longer than packing."""
        return self.pack.plans[0].options.latents is not None


class ProcessingPackDocument(CostDocument):
    """The output of ``pack --on sagemaker --dry-run``."""

    request: ProcessingRequest
    images: int
    filtered: int
    shards: int
    bytes: int
    columns: list[dict[str, Any]]


def pack_on_sagemaker(
    job: PackJob, config: RunConfig, options: ProcessingOptions, prices: PriceTable, region: str
) -> Comparison | None:
    """Show the plan of a Processing job and its cost, ask for confirmation, and start it.

    Return how the images of an append compare with the packed ones, None without an append.

    Raises:
        UserError: the plan is invalid, the user did not confirm, or AWS rejects a request.
    """
    default = "ml.c7i.8xlarge" if job.options.latents is None else "ml.g5.2xlarge"
    with plan_processing(
        job,
        config,
        instance_type=options.instance or default,
        instances=options.instances,
        region=region,
        preview=options.dry_run,
    ) as planned:
        cost = estimate_cost(planned.request, work_seconds(planned), prices, region)
        print_plan(planned, cost)
        comparison = None if planned.inputs is None else planned.inputs.comparison
        if options.dry_run:
            write_json(dry_run_document(planned, cost))
            return comparison
        name = submit(planned, job, config, region=region, yes=options.yes)
    stderr_console().print(f"started {name}" if name else "already packed: nothing was started")
    if options.as_json:
        write_json({"processing_job_name": name, "region": region})
    return comparison


@contextmanager
def plan_processing(
    job: PackJob,
    config: RunConfig,
    *,
    instance_type: str,
    instances: int,
    region: str,
    preview: bool = False,
) -> Iterator[ProcessingPack]:
    """Plan the pack and build the request, reading only the list of inputs.

    ``preview`` describes the columns of a table. The files of the plan are removed at the end.

    Raises:
        UserError: an input or the destination is not in S3, there are more instances than shards,
            or Processing does not offer the instance type.
    """
    started_ns = time.time_ns()
    require_s3(job.destination)
    packed = None
    if job.append:
        destination = open_storage(job.destination, job.access)
        packed = open_finished(job, destination)
        unfinished = read_unfinished_append(job, packed.index, destination)
        if unfinished is not None:
            require_parts(instances, len(unfinished.plans), "shards")
            request = _request(job, config, instance_type, instances, region)
            yield ProcessingPack(request, unfinished, None, started_ns)
            return
    with plan_pack(job, packed, preview=preview) as (inputs, pack):
        if inputs.local is not None:
            raise UserError(f"--on: {inputs.local} is a local file; SageMaker reads only from S3")
        if not inputs.is_empty:
            require_parts(instances, len(pack.plans), "shards")
        request = _request(job, config, instance_type, instances, region)
        yield ProcessingPack(request, pack, inputs, started_ns)


def _request(
    job: PackJob, config: RunConfig, instance_type: str, instances: int, region: str
) -> ProcessingRequest:
    packing = ProcessingJob(
        "pack",
        job.destination,
        instance_type,
        instances,
        with_model=job.options.latents is not None,
        requirements=(CONVERT_REQUIREMENTS,) if job.options.convert else (),
    )
    return plan_request(config, packing, region)


def print_plan(planned: ProcessingPack, cost: ProcessingCost) -> None:
    """Print the plan and its cost on standard error."""
    inputs = planned.inputs
    notes = [COMPLETES_APPEND]
    if inputs is not None:
        notes = [describe_filtered(inputs.filtered)] if inputs.filtered else []
        notes += describe_skipped(inputs.skipped)
        notes += describe_comparison(inputs.comparison) if inputs.comparison is not None else []
        notes += ["columns:", *describe_columns(inputs.preview)] if inputs.preview else []
    for line in (
        f"{planned.pack.images:,} images, {planned.pack.image_bytes / 1e6:,.1f} MB → "
        f"{len(planned.pack.plans):,} shards in "
        f"{planned.request['Environment']['SM_TRAIN_DESTINATION']}",
        describe_job(planned.request, cost, _ASSUMPTION),
        *notes,
    ):
        stderr_console().print(line, markup=False, soft_wrap=True)


def work_seconds(planned: ProcessingPack) -> float | None:
    """Return how long packing takes at the assumed speed; None if that is unknown."""
    cluster = planned.request["ProcessingResources"]["ClusterConfig"]
    vcpus = instance_vcpus(cluster["InstanceType"])
    if planned.encodes_latents or vcpus is None:
        return None
    return planned.pack.image_bytes / (BYTES_PER_VCPU_SECOND * vcpus * cluster["InstanceCount"])


def submit(
    planned: ProcessingPack, job: PackJob, config: RunConfig, *, region: str, yes: bool
) -> str | None:
    """Ask for confirmation and start the job; return its name, or None if all is packed already.

    Raises:
        UserError: no role is set, a bucket does not exist, or AWS rejects a request.
    """
    destination = open_storage(job.destination, job.access)
    return start_job(
        planned.request,
        config,
        job.destination,
        job.access,
        region=region,
        is_finished=lambda: _is_finished(planned, job, destination),
        store_plan=lambda: _store_plan(planned, job, destination),
        files=lambda: _files(job, config),
        yes=yes,
    )


def _files(job: PackJob, config: RunConfig) -> dict[str, bytes | Path]:
    """Return what the job is given: the code, and the model that encodes latents."""
    own = UserCode({CONVERT_REQUIREMENTS: convert_requirements()} if job.options.convert else {})
    files: dict[str, bytes | Path] = {**code_files(config, own)}
    if job.options.latents is not None:
        model = Path(job.options.latents)
        for path in component_files(model):
            files[f"model/{path.relative_to(model).as_posix()}"] = path
    return files


def _is_finished(planned: ProcessingPack, job: PackJob, destination: Storage) -> bool:
    """Return whether there is nothing to pack.

    Raises:
        UserError: the destination contains another pack.
    """
    inputs = planned.inputs
    if inputs is None:
        return False
    if job.append:
        return inputs.is_empty
    if find_finished(job, planned.pack, inputs.newest_ns, destination) is not None:
        return True
    require_same_plan(job, planned.pack, inputs.newest_ns, destination)
    return False


def _store_plan(planned: ProcessingPack, job: PackJob, destination: Storage) -> None:
    """Store the plan in the destination, which is claimed.

    Raises:
        UserError: another command has extended the pack that it extends.
    """
    if job.append:
        remove_stale_state(job, destination)
        require_not_extended(job, planned.pack, destination)
    if planned.inputs is not None:
        folder, started_ns = planned.inputs.folder, planned.started_ns
        store_plan(planned.pack, folder, destination, job.access, started_ns)


def dry_run_document(planned: ProcessingPack, cost: ProcessingCost) -> ProcessingPackDocument:
    """Return the document that ``pack --on sagemaker --dry-run`` prints."""
    return {
        "request": planned.request,
        "images": planned.pack.images,
        "filtered": 0 if planned.inputs is None else planned.inputs.filtered,
        "shards": len(planned.pack.plans),
        "bytes": planned.pack.image_bytes,
        "columns": []
        if planned.inputs is None
        else [asdict(column) for column in planned.inputs.preview],
        **cost_document(cost),
    }
