"""Packs on SageMaker Processing: plans locally, prints the request, confirms and sends it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from sm_train.cost.prices import PriceTable
from sm_train.entrypoints.leases.holder import Holder
from sm_train.entrypoints.models.components import component_files
from sm_train.entrypoints.packing.storage import S3Prefix, Storage, open_storage
from sm_train.entrypoints.packing.stored_plan import PackPlan, store_plan
from sm_train.estimators.bundle.bundle import ARCHIVE_NAME, Bundle, build_bundle
from sm_train.estimators.bundle.user_code import UserCode
from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.launch_plan import DEFAULT_PYTORCH
from sm_train.estimators.request.processing import (
    CONVERT_REQUIREMENTS,
    PackingJob,
    ProcessingRequest,
    convert_requirements,
    processing_image,
    processing_instance_types,
    processing_request,
)
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import require_bucket
from sm_train.toolkit.aws.session import open_session
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.extras import require_extra
from sm_train.toolkit.packing.append import Comparison
from sm_train.toolkit.packing.file_kinds import describe_skipped
from sm_train.toolkit.packing.inputs import PackInputs
from sm_train.toolkit.packing.lock import acquire_lease
from sm_train.toolkit.packing.pack import (
    PackJob,
    find_finished,
    open_finished,
    plan_pack,
    read_unfinished_append,
    remove_stale_state,
    require_not_extended,
    require_same_plan,
)
from sm_train.toolkit.packing.pack_report import describe_comparison, describe_filtered
from sm_train.toolkit.terminal.confirmation import ask
from sm_train.toolkit.terminal.console import stderr_console, write_json
from sm_train.toolkit.terminal.formatting import format_duration, format_usd

if TYPE_CHECKING:
    import boto3

BYTES_PER_VCPU_SECOND = 20e6
"""Assumed speed. benchmarks/pack.py measures 45 MB/s per core when it decodes images that are in
memory. A vCPU is half a core, and S3 is slower than memory."""

START_SECONDS = 300.0
"""Assumed start-up time: pulling the container image and installing packages."""

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
    def instance_type(self) -> str:
        return self.request["ProcessingResources"]["ClusterConfig"]["InstanceType"]

    @property
    def instances(self) -> int:
        return self.request["ProcessingResources"]["ClusterConfig"]["InstanceCount"]

    @property
    def max_runtime_seconds(self) -> int:
        return self.request["StoppingCondition"]["MaxRuntimeInSeconds"]

    @property
    def encodes_latents(self) -> bool:
        """Whether latents are encoded, which takes far longer than packing."""
        return self.pack.plans[0].options.latents is not None


class ProcessingPackDocument(TypedDict):
    """The output of ``pack --on sagemaker --dry-run``."""

    request: ProcessingRequest
    images: int
    filtered: int
    shards: int
    bytes: int
    cost_usd: float | None
    cost_limit_usd: float | None
    seconds: float | None
    price_per_instance_hour_usd: float | None
    price_source: str


@dataclass(frozen=True)
class PackCost:
    """Estimated and maximum cost of all instances in US dollars; None if unknown.

    ``seconds`` is the estimated duration of the job.
    """

    usd_per_hour: float | None
    seconds: float | None
    usd: float | None
    max_usd: float | None
    source: str


@dataclass(frozen=True)
class ProcessingOptions:
    """The options of ``pack --on sagemaker``, by the names of the command's.

    Without ``instance`` the type is one with a GPU if latents are encoded, else one with many CPUs.
    """

    instance: str | None
    instances: int
    dry_run: bool
    yes: bool
    as_json: bool


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
    ) as planned:
        cost = estimate_cost(planned, prices, region)
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
    job: PackJob, config: RunConfig, *, instance_type: str, instances: int, region: str
) -> Iterator[ProcessingPack]:
    """Plan the pack and build the request, reading only the list of inputs.

    The files of the plan are removed at the end.

    Raises:
        UserError: an input or the destination is not in S3, there are more instances than shards,
            or Processing does not offer the instance type.
    """
    started_ns = time.time_ns()
    if not job.destination.startswith("s3://"):
        raise UserError(f"--on: DST {job.destination} must be an S3 prefix, as s3://BUCKET/PREFIX/")
    packed = None
    if job.append:
        destination = open_storage(job.destination, job.access)
        packed = open_finished(job, destination)
        unfinished = read_unfinished_append(job, packed.index, destination)
        if unfinished is not None:
            _require_shards(unfinished, instances)
            request = _request(job, config, instance_type, instances, region)
            yield ProcessingPack(request, unfinished, None, started_ns)
            return
    with plan_pack(job, packed) as (inputs, pack):
        if inputs.local is not None:
            raise UserError(f"--on: {inputs.local} is a local file; SageMaker reads only from S3")
        if not inputs.is_empty:
            _require_shards(pack, instances)
        request = _request(job, config, instance_type, instances, region)
        yield ProcessingPack(request, pack, inputs, started_ns)


def _require_shards(pack: PackPlan, instances: int) -> None:
    if instances > len(pack.plans):
        raise UserError(
            f"--instances: {instances} for {len(pack.plans)} shards; the rest would idle but "
            "be billed"
        )


def _request(
    job: PackJob, config: RunConfig, instance_type: str, instances: int, region: str
) -> ProcessingRequest:
    known = processing_instance_types()
    if instance_type not in known:
        similar = get_close_matches(instance_type, known, n=1)
        hint = f"; did you mean {similar[0]}?" if similar else ""
        raise UserError(f"--instance: Processing does not offer {instance_type}{hint}")
    packing = PackingJob(
        job.destination,
        instance_type,
        instances,
        with_model=job.options.latents is not None,
        converts=job.options.convert,
    )
    try:
        image = processing_image(instance_type, region)
    except ValueError as error:
        raise UserError(f"--instance: {error}") from None
    return processing_request(config, packing, region=region, image=image, now=datetime.now(UTC))


def print_plan(planned: ProcessingPack, cost: PackCost) -> None:
    """Print the plan and its cost on standard error."""
    inputs = planned.inputs
    notes = ["completes an unfinished append; run the command again to add other new images"]
    if inputs is not None:
        notes = [describe_filtered(inputs.filtered)] if inputs.filtered else []
        notes += describe_skipped(inputs.skipped)
        notes += describe_comparison(inputs.comparison) if inputs.comparison is not None else []
    for line in (
        f"{planned.pack.images:,} images, {planned.pack.image_bytes / 1e6:,.1f} MB → "
        f"{len(planned.pack.plans):,} shards in "
        f"{planned.request['Environment']['SM_TRAIN_DESTINATION']}",
        f"{planned.instances} × {planned.instance_type} for at most "
        f"{format_duration(planned.max_runtime_seconds)}; {_format_cost(cost)}",
        *notes,
    ):
        stderr_console().print(line, markup=False, soft_wrap=True)


def _format_cost(cost: PackCost) -> str:
    if cost.usd_per_hour is None or cost.max_usd is None:
        return f"cost unknown: {cost.source} (get it from AWS with `sm-train cost --refresh`)"
    estimate = ""
    if cost.usd is not None and cost.seconds is not None:
        duration = format_duration(cost.seconds)
        estimate = f"about {format_usd(cost.usd)} for {duration}, if {_ASSUMPTION}; "
    price = f"${cost.usd_per_hour:.4f} per instance-hour, {cost.source}"
    return f"{estimate}at most {format_usd(cost.max_usd)} ({price})"


def estimate_cost(planned: ProcessingPack, table: PriceTable, region: str) -> PackCost:
    """Return the cost at the assumed speed and the cost at the time limit."""
    price = table.processing_price(planned.instance_type, region)
    hourly = price.usd_per_instance_hour
    if hourly is None:
        return PackCost(None, None, None, None, price.source)
    seconds = None
    if not planned.encodes_latents and (vcpus := _vcpus(planned.instance_type)):
        speed = BYTES_PER_VCPU_SECOND * vcpus * planned.instances
        seconds = min(START_SECONDS + planned.pack.image_bytes / speed, planned.max_runtime_seconds)
    per_second = float(hourly) * planned.instances / 3600
    return PackCost(
        float(hourly),
        seconds,
        None if seconds is None else per_second * seconds,
        per_second * planned.max_runtime_seconds,
        price.source,
    )


def _vcpus(instance_type: str) -> int | None:
    """Derive the vCPUs from the name: an xlarge has four, an Nxlarge N times as many."""
    match = re.fullmatch(r"ml\.[a-z0-9-]+\.(\d*)xlarge", instance_type)
    return 4 * int(match[1] or 1) if match else None


def submit(
    planned: ProcessingPack, job: PackJob, config: RunConfig, *, region: str, yes: bool
) -> str | None:
    """Ask for confirmation and start the job; return its name, or None if all is packed already.

    Raises:
        UserError: no role is set, a bucket does not exist, or AWS rejects a request.
    """
    if config.role is None:
        raise UserError(
            "role: not set; write role: arn:aws:iam::ACCOUNT:role/NAME in the run file",
            ExitCode.PERMISSION,
        )
    require_extra("aws", "sagemaker", purpose="packing on SageMaker")
    session = open_session(job.access.profile, region)
    bucket = staging_bucket(config, region)
    require_bucket(session, f"s3://{bucket}/{config.name}/", region, "bucket")
    destination = open_storage(job.destination, job.access)
    with translate_aws_errors(job.destination):
        if _is_finished(planned, job, destination):
            return None
    if not yes:
        ask("Start the job?")
    assert isinstance(destination, S3Prefix)
    with translate_aws_errors(job.destination):
        holder = Holder.of_job(planned.request["ProcessingJobName"])
        lease = acquire_lease(destination, holder)
    try:
        with translate_aws_errors(job.destination):
            _store_plan(planned, job, destination)
        return _create(planned, job, config, session, bucket)
    except BaseException:
        lease.release()
        raise


def _create(
    planned: ProcessingPack, job: PackJob, config: RunConfig, session: boto3.Session, bucket: str
) -> str:
    """Upload the code and start the job; return its name."""
    files: dict[str, bytes | Path] = {
        f"code/{ARCHIVE_NAME}": _packing_bundle(config, converts=job.options.convert).archive,
    }
    if job.options.latents is not None:
        model = Path(job.options.latents)
        for path in component_files(model):
            files[f"model/{path.relative_to(model).as_posix()}"] = path
    with translate_aws_errors("CreateProcessingJob"):
        from sm_train.estimators.sdk.processor import create_processing_job

        return create_processing_job(planned.request, files, boto_session=session, bucket=bucket)


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


def _packing_bundle(config: RunConfig, *, converts: bool) -> Bundle:
    """Build the code bundle: no user code, but network access to install packages."""
    files = {CONVERT_REQUIREMENTS: convert_requirements()} if converts else {}
    cluster = config.cluster.model_copy(update={"network_isolation": False})
    packing = config.model_copy(update={"code": None, "entry": None, "cluster": cluster})
    return build_bundle(packing, DEFAULT_PYTORCH, UserCode(files))


def dry_run_document(planned: ProcessingPack, cost: PackCost) -> ProcessingPackDocument:
    """Return the document that ``pack --on sagemaker --dry-run`` prints."""
    return {
        "request": planned.request,
        "images": planned.pack.images,
        "filtered": 0 if planned.inputs is None else planned.inputs.filtered,
        "shards": len(planned.pack.plans),
        "bytes": planned.pack.image_bytes,
        "cost_usd": cost.usd,
        "cost_limit_usd": cost.max_usd,
        "seconds": cost.seconds,
        "price_per_instance_hour_usd": cost.usd_per_hour,
        "price_source": cost.source,
    }
