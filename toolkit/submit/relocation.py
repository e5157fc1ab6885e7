"""Submits and starts a run's jobs at any of its placements.

Code is staged at every placement at submission. A job's request at a fallback is a pure function
of the home placement's request and the placement, so it is computed whenever it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from sm_train.cost.estimate import Purchase, hourly_price
from sm_train.cost.json_document import as_document
from sm_train.entrypoints.storage.store import store_of
from sm_train.estimators.bundle.bundle import ARCHIVE_NAME, Bundle, rebuild_bundle
from sm_train.estimators.config.placement import PLACEMENT_TAG, Placement, placements
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.images import image_uri
from sm_train.estimators.request.launch_plan import launch_plan, pytorch_version
from sm_train.estimators.request.training_request import (
    BUNDLE_TAG,
    COMMIT_TAG,
    TrainingRequest,
    hyperparameter,
    stage_name,
    staged_uri,
    training_request,
)
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import require_bucket, split_uri
from sm_train.toolkit.aws.session import session_in_region
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.checks.training_data import require_index, require_shards
from sm_train.toolkit.memory.memory_fit import custom_plan
from sm_train.toolkit.planning.price_table import price_table
from sm_train.toolkit.planning.run_price import estimate_run, predicted_speeds
from sm_train.toolkit.platforms.sagemaker.sagemaker_run import SageMakerRun
from sm_train.toolkit.records.stage_state import StageState
from sm_train.toolkit.runs.remediation import StartJob
from sm_train.toolkit.submit.replicate import FolderCopy, copy_folder, replicate_inputs
from sm_train.toolkit.submit.start_job import JobLaunch, QuotaError, start_next_job
from sm_train.toolkit.terminal.console import bytes_bar
from sm_train.toolkit.terminal.formatting import format_usd

if TYPE_CHECKING:
    import boto3


# ------------------------------------------------------------------ requests


@dataclass(frozen=True)
class _RecordedBundle:
    """The identity of a staged bundle, as a request holds it."""

    sha256: str
    entry: str


def placement_request(home: TrainingRequest, placement: Placement) -> TrainingRequest:
    """Return the request of ``home``, a job at the home placement, for ``placement``.

    The bundle's digest in its tags stays that of the home placement: it identifies the submission.

    Raises:
        UserError: AWS has no image for the placement.
    """
    if placement.number == 0:
        return home
    stage = placement.stage(stage_name(home))
    tags = {tag["Key"]: tag["Value"] for tag in home["Tags"]}
    bundle = _RecordedBundle(tags[BUNDLE_TAG], hyperparameter(home, "sagemaker_program") or "")
    try:
        image = image_uri(placement.config, placement.region)
    except ValueError as error:
        raise UserError(f"{placement.key}: {error}") from None
    request = training_request(
        placement.config,
        stage,
        launch_plan(placement.config, stage, image),
        bundle,
        region=placement.region,
        staged=_staged(staged_uri(home), placement),
        commit=tags.get(COMMIT_TAG),
    )
    tags |= {tag["Key"]: tag["Value"] for tag in request["Tags"]}
    tags[PLACEMENT_TAG] = str(placement.number)
    return request | {"Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}


def _staged(home_uri: str, placement: Placement) -> str:
    """Return the folder of staged code at a fallback; ``home_uri`` is the home placement's."""
    path = home_uri.split("/", 3)[3]
    return f"s3://{placement.bucket}/{path}-{placement.number}"


def relocated_requests(
    config: RunConfig, region: str, home: Sequence[TrainingRequest]
) -> list[tuple[Placement, list[TrainingRequest]]]:
    """Return each fallback with the requests of ``home`` for it.

    Raises:
        UserError: AWS has no image for a fallback.
    """
    relocated = []
    for placement in placements(config, region)[1:]:
        requests = [placement_request(request, placement) for request in home]
        relocated.append((placement, requests))
    return relocated


# ------------------------------------------------------------------ submission


def require_run_buckets(session: boto3.Session, config: RunConfig, region: str) -> None:
    """Reject a run whose bucket does not exist at a placement.

    Raises:
        UserError: a bucket does not exist, or is in another region.
    """
    for placement in placements(config, region):
        regional = session_in_region(session, placement.region)
        field = f"{placement.key}: its bucket" if placement.number else "bucket"
        require_bucket(regional, f"s3://{placement.bucket}/{config.name}/", placement.region, field)


def require_run_data(session: boto3.Session, config: RunConfig, region: str, stage: str) -> None:
    """Reject a run whose data are missing at a placement, or too few for the stage's instances.

    Raises:
        UserError: bucket, shards or index are missing.
    """
    if config.data.synthetic_samples:
        return
    for placement in placements(config, region):
        regional, data = session_in_region(session, placement.region), placement.config.data
        require_bucket(regional, data.uri, placement.region, "data.uri")
        instances = placement.config.cluster.max_instances(placement.stage(stage).instances)
        sharded = placement.config.train_sharded
        require_shards(regional, data.uri, instances if sharded else 1)
        require_index(regional, data.uri, placement.config.index_uri)
        for name, uri in placement.config.source_indexes.items():
            require_index(regional, placement.config.channels[name].uri or "", uri)


def stage_relocated_code(
    session: boto3.Session, config: RunConfig, bundle: Bundle, sent: TrainingRequest
) -> None:
    """Upload the run's code to each fallback, next to that of ``sent`` at the home placement.

    A fallback's bundle differs from ``bundle`` in its run document.

    Raises:
        UserError: AWS returns an error.
    """
    home_region, home_uri = session.region_name, staged_uri(sent)
    has_drivers = any(channel["ChannelName"] == "sm_drivers" for channel in sent["InputDataConfig"])
    version = pytorch_version(config)
    for placement in placements(config, home_region)[1:]:
        placement_version = pytorch_version(placement.config)
        same = placement_version == version
        placed = rebuild_bundle(
            bundle.archive,
            placement.config,
            placement_version,
            same_image=same,
            predicted_speeds=predicted_speeds(placement.config),
            model_plan=custom_plan(placement.config),
        )
        staged = _staged(home_uri, placement)
        bucket, key = split_uri(f"{staged}/code/{ARCHIVE_NAME}")
        with translate_aws_errors(f"{placement.key}: s3://{bucket}/{key}"):
            store_of(session, placement.region).put(bucket, key, placed.archive)
        if has_drivers:
            folder = FolderCopy(
                f"{home_uri}/sm_drivers", home_region, f"{staged}/sm_drivers", placement.region
            )
            copy_folder(session, folder, lambda done, total: None)


class FallbackDocument(TypedDict):
    """One fallback in ``submit --dry-run --json``."""

    placement: int
    region: str
    requests: list[TrainingRequest]
    cost: dict[str, Any]


class RelocatedDocuments(TypedDict):
    fallbacks: list[FallbackDocument]


def relocated_documents(
    config: RunConfig, region: str, home: Sequence[TrainingRequest]
) -> RelocatedDocuments:
    """Return each fallback's requests, and the cost of their stages if they all ran there."""
    names = [stage_name(request) for request in home]
    documents: list[FallbackDocument] = []
    for placement, requests in relocated_requests(config, region, home):
        stages = tuple(placement.stage(name) for name in names)
        cost = estimate_run(placement.config, placement.region, stages, stated=config)
        documents.append(
            {
                "placement": placement.number,
                "region": placement.region,
                "requests": requests,
                "cost": as_document(cost),
            }
        )
    return {"fallbacks": documents}


def relocation_rows(config: RunConfig, region: str, stage: str) -> list[tuple[str, str]]:
    """Return a (label, description) row of the plan for each fallback, with its hourly price."""
    rows = []
    for placement in placements(config, region)[1:]:
        cluster = placement.config.cluster
        purchase = Purchase(placement.region, cluster.capacity)
        price = hourly_price(cluster.instance_type, purchase, price_table()).usd_per_instance_hour
        cost = "price unknown"
        if price is not None:
            cost = f"{format_usd(float(price * placement.stage(stage).instances))} an hour"
        description = f"{placement.cluster(stage)}, {cluster.capacity}; {cost}"
        rows.append((f"fallback {placement.number}", description))
    return rows


# ------------------------------------------------------------------ starting jobs


@dataclass(frozen=True)
class StartedJob:
    """A job that was started; ``cluster`` describes where, if the run has several placements."""

    name: str
    start: StartJob
    cluster: str | None


def job_launch(run: SageMakerRun, start: StartJob) -> JobLaunch:
    """Return the launch of ``start`` at its placement.

    Raises:
        UserError: nothing was submitted, or the stage's code is not staged.
    """
    if run.record is None:
        raise UserError(f"{run.name}: nothing was submitted yet; `sm-train submit` it first")
    if start.stage not in run.record.requests:
        raise UserError(
            f"{start.stage}: it starts by another route than the stages before, so its code is not "
            f"staged; `sm-train submit` the run file with --stage {start.stage}"
        )
    placement = placements(run.submitted_config, run.region)[start.placement]
    return JobLaunch(
        run=run.name,
        start=start,
        config=placement.config,
        region=placement.region,
        request=placement_request(run.record.requests[start.stage], placement),
        record=replace(run.record, placement=start.placement),
        bucket=run.bucket,
    )


def launch_where_last(
    run: SageMakerRun, stages: Sequence[StageState], start: StartJob
) -> JobLaunch:
    """Return the launch of ``start`` at the placement of the run's newest job.

    Raises:
        UserError: nothing was submitted, or the stage's code is not staged.
    """
    jobs = sorted((job for stage in stages for job in stage.jobs), key=lambda job: job.created)
    count = len(placements(run.submitted_config, run.region))
    return job_launch(run, replace(start, placement=jobs[-1].placement % count))


def start_where_possible(
    run: SageMakerRun, stages: Sequence[StageState], start: StartJob
) -> StartedJob | None:
    """Start the job at its placement, or at the next one where the quota allows the instances.

    Return None after copying inputs to another region: that may take an hour, in which the user
    may stop the run, so the caller must decide again.

    Raises:
        QuotaError: no placement's quota allows the instances.
        ClaimedError: another process is starting the job.
        UserError: AWS returns another error.
    """
    choices = placements(run.submitted_config, run.region)
    first_rejection: QuotaError | None = None
    for offset in range(len(choices)):
        placement = choices[(start.placement + offset) % len(choices)]
        launch = job_launch(run, replace(start, placement=placement.number))
        with bytes_bar(f"copying to {launch.region}") as progress:
            if replicate_inputs(run.session, launch.request, launch.region, stages, progress):
                return None
        try:
            name = start_next_job(run.session, launch)
        except QuotaError as error:
            first_rejection = first_rejection or error
        else:
            cluster = placement.cluster(start.stage) if len(choices) > 1 else None
            return StartedJob(name, launch.start, cluster)
    assert first_rejection is not None  # there is at least the home placement
    raise first_rejection
