"""Builds the request of a SageMaker Processing job, asks for confirmation and starts the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path

from sm_train.entrypoints.storage.lease import Holder
from sm_train.entrypoints.storage.storage import open_storage
from sm_train.entrypoints.storage.store import S3Access
from sm_train.estimators.bundle.bundle import ARCHIVE_NAME, build_bundle
from sm_train.estimators.bundle.user_code import UserCode
from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.launch_plan import DEFAULT_PYTORCH
from sm_train.estimators.request.processing import (
    ProcessingJob,
    ProcessingRequest,
    processing_image,
    processing_instance_types,
    processing_request,
)
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import require_bucket
from sm_train.toolkit.aws.session import open_session
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.base.extras import require_extra
from sm_train.toolkit.data_prep.processing.destination_lock import acquire_lease
from sm_train.toolkit.terminal.confirmation import ask


@dataclass(frozen=True)
class ProcessingOptions:
    """The options of ``--on sagemaker``, by the names of the command's."""

    instance: str | None
    instances: int
    dry_run: bool
    yes: bool
    as_json: bool


def require_s3(destination: str) -> None:
    """Require that the destination of a job is in S3.

    Raises:
        UserError: it is not.
    """
    if not destination.startswith("s3://"):
        raise UserError(f"--on: DST {destination} must be an S3 prefix, as s3://BUCKET/PREFIX/")


def require_parts(instances: int, num_parts: int, parts: str) -> None:
    """Require that each instance has something to do; ``parts`` is what is divided.

    Raises:
        UserError: there are more instances than parts.
    """
    if instances > num_parts:
        raise UserError(
            f"--instances: {instances} for {num_parts} {parts}; the rest would idle but be billed"
        )


def plan_request(config: RunConfig, job: ProcessingJob, region: str) -> ProcessingRequest:
    """Return the request of a job.

    Raises:
        UserError: Processing does not offer the instance type.
    """
    known = processing_instance_types()
    if job.instance_type not in known:
        similar = get_close_matches(job.instance_type, known, n=1)
        hint = f"; did you mean {similar[0]}?" if similar else ""
        raise UserError(f"--instance: Processing does not offer {job.instance_type}{hint}")
    try:
        image = processing_image(job.instance_type, region)
    except ValueError as error:
        raise UserError(f"--instance: {error}") from None
    return processing_request(config, job, region=region, image=image, now=datetime.now(UTC))


def start_job(
    request: ProcessingRequest,
    config: RunConfig,
    destination: str,
    access: S3Access,
    *,
    region: str,
    is_finished: Callable[[], bool],
    store_plan: Callable[[], None],
    files: Callable[[], Mapping[str, bytes | Path]],
    yes: bool,
) -> str | None:
    """Ask for confirmation and start the job; return its name, or None if nothing is to do.

    ``files`` returns what is uploaded for the job. ``store_plan`` is called once the job has the
    lease of the destination.

    Raises:
        UserError: no role is set, a bucket does not exist, or AWS rejects a request.
    """
    if config.role is None:
        raise UserError(
            "role: not set; write role: arn:aws:iam::ACCOUNT:role/NAME in the run file",
            ExitCode.PERMISSION,
        )
    require_extra("aws", "sagemaker", purpose="SageMaker Processing")
    session = open_session(access.profile, region)
    bucket = staging_bucket(config, region)
    require_bucket(session, f"s3://{bucket}/{config.name}/", region, "bucket")
    with translate_aws_errors(destination):
        if is_finished():
            return None
    uploaded = dict(files())
    if not yes:
        ask("Start the job?")
    with translate_aws_errors(destination):
        holder = Holder.of_job(request["ProcessingJobName"])
        lease = acquire_lease(open_storage(destination, access), holder)
    try:
        with translate_aws_errors(destination):
            store_plan()
        with translate_aws_errors("CreateProcessingJob"):
            from sm_train.estimators.sdk.processor import create_processing_job

            return create_processing_job(request, uploaded, boto_session=session, bucket=bucket)
    except BaseException:
        lease.release()
        raise


def code_files(config: RunConfig, code: UserCode) -> dict[str, bytes]:
    """Return the archive with the code of a job, which may install packages from the network.

    Raises:
        UserCodeError: ``code`` contains a credential or a reserved name.
    """
    cluster = config.cluster.model_copy(update={"network_isolation": False})
    without_training = {"code": None, "entry": None, "cluster": cluster}
    bundle = build_bundle(config.model_copy(update=without_training), DEFAULT_PYTORCH, code)
    return {f"code/{ARCHIVE_NAME}": bundle.archive}
