"""Packs on SageMaker Processing: plans here, shows the request, asks, and sends it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
from sm_train.cost.prices import PROCESSING, PriceTable
from sm_train.entrypoints.models.components import component_files
from sm_train.entrypoints.packing.pack import PackPlan
from sm_train.entrypoints.packing.processing_job import PLAN_FILE
from sm_train.entrypoints.packing.storage import open_storage
from sm_train.estimators.bundle.bundle import ARCHIVE_NAME, Bundle, build_bundle
from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.launcher import FRAMEWORK
from sm_train.estimators.request.processing import (
    PackingJob,
    ProcessingRequest,
    processing_image,
    processing_instance_types,
    processing_request,
)
from sm_train.toolkit.aws.session import open_session, require_bucket, translate_aws_errors
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.packing.pack import (
    PackJob,
    already_packed,
    begin,
    list_inputs,
    plan_pack,
    require_same,
)
from sm_train.toolkit.terminal.console import stderr_console
from sm_train.toolkit.terminal.formatting import format_duration, format_usd

BYTES_PER_VCPU_SECOND = 20e6
"""Assumed speed. benchmarks/pack.py: 45 MB/s a core with images decoded, out of memory; a vCPU is
half a core, and S3 is no memory."""

START_SECONDS = 300.0
"""Assumed until the first image: the container's image, and its packages."""

_ASSUMED = f"a vCPU packs {BYTES_PER_VCPU_SECOND / 1e6:.0f} MB/s"


@dataclass(frozen=True)
class CloudPack:
    """A pack that was planned here and is made there."""

    request: ProcessingRequest
    pack: PackPlan
    newest_ns: int
    started_ns: int

    @property
    def instance_type(self) -> str:
        return self.request["ProcessingResources"]["ClusterConfig"]["InstanceType"]

    @property
    def machines(self) -> int:
        return self.request["ProcessingResources"]["ClusterConfig"]["InstanceCount"]

    @property
    def limit_seconds(self) -> int:
        return self.request["StoppingCondition"]["MaxRuntimeInSeconds"]

    @property
    def images(self) -> int:
        return sum(len(plan.inputs) for plan in self.pack.plans)

    @property
    def bytes(self) -> int:
        """Of the images to pack."""
        return sum(item.bytes for plan in self.pack.plans for item in plan.inputs)

    @property
    def encodes(self) -> bool:
        """Whether latents are computed, which takes far longer than packing."""
        return self.pack.plans[0].options.latents is not None


@dataclass(frozen=True)
class PackCost:
    """US dollars and seconds of all machines together; None is unknown."""

    usd_per_hour: float | None
    seconds: float | None
    usd: float | None
    limit_usd: float | None
    source: str


def plan_cloud_pack(
    job: PackJob, config: RunConfig, *, instance_type: str, machines: int, region: str
) -> CloudPack:
    """The request and the plan that goes with it; reads the list of inputs and nothing else.

    Raises:
        UserError: an address is not in S3, or nothing is to be packed.
    """
    started = time.time_ns()
    if not job.destination.startswith("s3://"):
        raise UserError(f"--on: DST {job.destination} must be an S3 prefix, as s3://BUCKET/PREFIX/")
    inputs = list_inputs(job)
    here = next((one for one in inputs.images if not one.address.startswith("s3://")), None)
    if here is not None:
        raise UserError(f"--on: {here.address} is on this machine; SageMaker reads from S3 alone")
    pack = plan_pack(job, inputs)
    if machines > len(pack.plans):
        raise UserError(
            f"--instances: {machines} for {len(pack.plans)} shards; the others would idle, billed"
        )
    known = processing_instance_types()
    if instance_type not in known:
        near = get_close_matches(instance_type, known, n=1)
        mend = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"--instance: {instance_type} is no instance of Processing{mend}")
    cloud = PackingJob(job.destination, instance_type, machines, job.options.latents is not None)
    try:
        image = processing_image(instance_type, region)
    except ValueError as error:
        raise UserError(f"--instance: {error}") from None
    request = processing_request(config, cloud, region=region, image=image, now=datetime.now(UTC))
    return CloudPack(request, pack, inputs.newest_ns, started)


def show(cloud: CloudPack, cost: PackCost) -> None:
    """The plan for a person."""
    for line in (
        f"{cloud.images:,} images, {cloud.bytes / 1e6:,.1f} MB → {len(cloud.pack.plans):,} shards "
        f"in {cloud.request['Environment']['SM_TRAIN_DESTINATION']}",
        f"{cloud.machines} × {cloud.instance_type} for at most "
        f"{format_duration(cloud.limit_seconds)}; " + _cost_in_words(cost),
    ):
        stderr_console().print(line, markup=False, soft_wrap=True)


def _cost_in_words(cost: PackCost) -> str:
    if cost.usd_per_hour is None or cost.limit_usd is None:
        return (
            f"cost unknown: {cost.source} (`sm-train cost --refresh` asks AWS, and --prices FILE "
            f"takes rows of kind {PROCESSING})"
        )
    about = ""
    if cost.usd is not None and cost.seconds is not None:
        about = f"about {format_usd(cost.usd)} for {format_duration(cost.seconds)}, if {_ASSUMED}; "
    price = f"${cost.usd_per_hour:.4f} an instance-hour, {cost.source}"
    return f"{about}at most {format_usd(cost.limit_usd)} ({price})"


def cost_of(cloud: CloudPack, table: PriceTable, region: str) -> PackCost:
    """What the job costs, at the speed of :data:`BYTES_PER_VCPU_SECOND`, and at its time limit."""
    price = table.processing_price(cloud.instance_type, region)
    hourly = price.usd_per_instance_hour
    if hourly is None:
        return PackCost(None, None, None, None, price.source)
    seconds = None
    if not cloud.encodes and (vcpus := _vcpus(cloud.instance_type)):
        speed = BYTES_PER_VCPU_SECOND * vcpus * cloud.machines
        seconds = min(START_SECONDS + cloud.bytes / speed, cloud.limit_seconds)
    per_second = float(hourly) * cloud.machines / 3600
    return PackCost(
        float(hourly),
        seconds,
        None if seconds is None else per_second * seconds,
        per_second * cloud.limit_seconds,
        price.source,
    )


def _vcpus(instance_type: str) -> int | None:
    """By EC2's naming: an xlarge has four, an Nxlarge N times as many."""
    match = re.fullmatch(r"ml\.[a-z0-9-]+\.(\d*)xlarge", instance_type)
    return 4 * int(match[1] or 1) if match else None


def submit(
    cloud: CloudPack, job: PackJob, config: RunConfig, *, region: str, yes: bool
) -> str | None:
    """Ask, then start the job; returns its name, or None where everything is packed already.

    Raises:
        UserError: no role, a bucket is missing, or AWS refuses.
    """
    if config.role is None:
        raise UserError(
            "role: not set; write role: arn:aws:iam::ACCOUNT:role/NAME in the run file",
            ExitCode.PERMISSION,
        )
    session = open_session(job.access.profile, region)
    bucket = staging_bucket(config, region)
    require_bucket(session, bucket, region, "bucket")
    destination = open_storage(job.destination, job.access)
    with translate_aws_errors(job.destination):
        if already_packed(job, cloud.pack, cloud.newest_ns, destination) is not None:
            return None
        require_same(job, cloud.pack, cloud.newest_ns, destination)
    if not yes and not click.confirm("Start the job?", err=True):
        raise UserError("nothing was started", ExitCode.INTERRUPTED)
    with translate_aws_errors(job.destination):
        begin(cloud.pack, destination, cloud.started_ns)
    files: dict[str, bytes | Path] = {
        f"code/{ARCHIVE_NAME}": _packing_bundle(config).archive,
        f"plan/{PLAN_FILE}": cloud.pack.to_bytes(),
    }
    if job.options.latents is not None:
        model = Path(job.options.latents)
        for path in component_files(model):
            files[f"model/{path.relative_to(model).as_posix()}"] = path
    with translate_aws_errors("CreateProcessingJob"):
        from sm_train.estimators.sdk.processor import create_processing_job

        return create_processing_job(cloud.request, files, boto_session=session, bucket=bucket)


def _packing_bundle(config: RunConfig) -> Bundle:
    """The bundle for packing: it trains nothing of one's own, and installs its packages."""
    cluster = config.cluster.model_copy(update={"network_isolation": False})
    packing = config.model_copy(update={"code": None, "entry": None, "cluster": cluster})
    return build_bundle(packing, FRAMEWORK)


def document(cloud: CloudPack, cost: PackCost) -> dict[str, Any]:
    """The shape of ``pack --on sagemaker --dry-run --json``."""
    return {
        "request": cloud.request,
        "images": cloud.images,
        "shards": len(cloud.pack.plans),
        "bytes": cloud.bytes,
        "cost_usd": cost.usd,
        "cost_limit_usd": cost.limit_usd,
        "seconds": cost.seconds,
        "price_per_instance_hour_usd": cost.usd_per_hour,
        "price_source": cost.source,
    }
