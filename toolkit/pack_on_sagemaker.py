"""Packs on SageMaker Processing: plans here, shows the request, asks, and sends it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any

import click
from sm_train.entrypoints.pack_processing import PLAN_FILE
from sm_train.entrypoints.pack_run import Pack
from sm_train.entrypoints.storage import place
from sm_train.estimators.bundle import ARCHIVE_NAME, build_bundle
from sm_train.estimators.launch import FRAMEWORK
from sm_train.estimators.processing_request import (
    PackingJob,
    ProcessingRequest,
    instance_types,
    processing_image,
    processing_request,
)
from sm_train.estimators.request import staging_bucket
from sm_train.estimators.run_config import RunConfig
from sm_train.toolkit.amounts import span
from sm_train.toolkit.aws import open_session, refusals_in_words, require_bucket
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.output import people
from sm_train.toolkit.packing import PackJob, already_packed, begin, plan_pack, require_same
from sm_train.toolkit.packing_inputs import find_inputs


@dataclass(frozen=True)
class CloudPack:
    """A pack that was planned here and is made there."""

    request: ProcessingRequest
    pack: Pack
    newest_ns: int
    started_ns: int


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
    if job.options.latents is not None:
        raise UserError("--latents: with --on sagemaker is not supported; pack on a GPU machine")
    inputs = find_inputs(
        job.source,
        job.captions,
        image_column=job.image_column,
        caption_column=job.caption_column,
        access=job.access,
    )
    here = next((one for one in inputs.images if not one.address.startswith("s3://")), None)
    if here is not None:
        raise UserError(f"--on: {here.address} is on this machine; SageMaker reads from S3 alone")
    pack = plan_pack(job, inputs)
    if machines > len(pack.plans):
        raise UserError(
            f"--instances: {machines} for {len(pack.plans)} shards; the others would idle, billed"
        )
    known = instance_types()
    if instance_type not in known:
        near = get_close_matches(instance_type, known, n=1)
        mend = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"--instance: {instance_type} is no instance of Processing{mend}")
    cloud = PackingJob(job.destination, instance_type, machines)
    try:
        image = processing_image(instance_type, region)
    except ValueError as error:
        raise UserError(f"--instance: {error}") from None
    request = processing_request(config, cloud, region=region, image=image, now=datetime.now(UTC))
    return CloudPack(request, pack, inputs.newest_ns, started)


def show(cloud: CloudPack) -> None:
    """The plan for a person; no price of Processing is in the table, and unknown is said."""
    resources = cloud.request["ProcessingResources"]["ClusterConfig"]
    images = sum(len(plan.inputs) for plan in cloud.pack.plans)
    megabytes = sum(item.bytes for plan in cloud.pack.plans for item in plan.inputs) / 1e6
    limit = cloud.request["StoppingCondition"]["MaxRuntimeInSeconds"]
    for line in (
        f"{images:,} images, {megabytes:,.1f} MB → {len(cloud.pack.plans):,} shards in "
        f"{cloud.request['Environment']['SM_TRAIN_DESTINATION']}",
        f"{resources['InstanceCount']} × {resources['InstanceType']} for at most {span(limit)}; "
        "cost unknown: no price of Processing for it is in the table",
    ):
        people().print(line, markup=False, soft_wrap=True)


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
    destination = place(job.destination, job.access)
    with refusals_in_words(job.destination):
        if already_packed(job, cloud.pack, cloud.newest_ns, destination) is not None:
            return None
        require_same(job, cloud.pack, cloud.newest_ns, destination)
    if not yes and not click.confirm("Start the job?", err=True):
        raise UserError("nothing was started", ExitCode.INTERRUPTED)
    with refusals_in_words(job.destination):
        begin(cloud.pack, destination, cloud.started_ns)
    files = {
        f"code/{ARCHIVE_NAME}": build_bundle(config, FRAMEWORK).archive,
        f"plan/{PLAN_FILE}": cloud.pack.to_bytes(),
    }
    with refusals_in_words("CreateProcessingJob"):
        from sm_train.estimators.processor import send_processing

        return send_processing(cloud.request, files, boto_session=session, bucket=bucket)


def document(cloud: CloudPack) -> dict[str, Any]:
    """The shape of ``pack --on sagemaker --dry-run --json``."""
    return {
        "request": cloud.request,
        "images": sum(len(plan.inputs) for plan in cloud.pack.plans),
        "shards": len(cloud.pack.plans),
        "cost_usd": None,
    }
