"""A run's training jobs as SageMaker describes them: the tags hold all state, laptops hold none.

The path of a job is how and where it starts: a job that ran on a path is evidence for the next one.
The logs of a job include the facts that only SageMaker reports.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from sm_train.cost.prices import ON_DEMAND, SPOT, TRAINING_PLAN, Price
from sm_train.entrypoints.base.sagemaker_paths import host_names
from sm_train.entrypoints.storage.bucket_settings import declare_buckets
from sm_train.estimators.config.placement import PLACEMENT_TAG
from sm_train.estimators.request.training_request import (
    BUCKET_OWNER_TAG,
    REGIONS_TAG,
    RUN_TAG,
    STAGE_TAG,
)
from sm_train.toolkit.aws.aws_errors import is_throttling, translate_aws_errors
from sm_train.toolkit.base.errors import TRANSIENT, UserError
from sm_train.toolkit.records.run_job import ENDED, JobPhase, Platform, RunJob, phase_table

if TYPE_CHECKING:
    import boto3
    from types_boto3_sagemaker import SageMakerClient
    from types_boto3_sagemaker.type_defs import FilterTypeDef, TagTypeDef


from collections.abc import Iterator
from datetime import UTC
from typing import TYPE_CHECKING

from sm_train.toolkit.aws.cloudwatch_logs import read_stream, stream_names
from sm_train.toolkit.records.job_logs import JobLogs, LogStream, attempts

if TYPE_CHECKING:
    import boto3


_SMDDP = "sagemaker_distributed_dataparallel_enabled"
"""Hyperparameter with which AWS's toolkit starts SMDDP (estimators/request/training_request.py)."""


@dataclass(frozen=True)
class JobPath:
    """What decides how SageMaker starts a job, in words of the run file."""

    instance_type: str
    image: str
    backend: str
    capacity: str
    network: str
    has_several: bool
    """Whether it has several instances, which talk to each other."""

    def __str__(self) -> str:
        nodes = "several instances" if self.has_several else "a single instance"
        return (
            f"{self.instance_type} ({self.capacity}), {nodes}, {self.backend}, {self.network}, "
            f"image {self.image}"
        )

    def proves(self, other: JobPath, *, capacity: bool) -> bool:
        """Return whether a job on this path shows that one on the other starts.

        Without ``capacity`` it may have been bought in another way.
        """
        same = replace(self, has_several=other.has_several)
        same = same if capacity else replace(same, capacity=other.capacity)
        return same == other and (self.has_several or not other.has_several)


def job_path(job: Mapping[str, Any]) -> JobPath:
    """Return the path of a request of CreateTrainingJob, or of a job that AWS describes."""
    kind, count = instances_of(job)
    network = ["a VPC" if job.get("VpcConfig") else "no VPC"]
    network += ["isolated"] if job.get("EnableNetworkIsolation") else []
    network += ["encrypted"] if job.get("EnableInterContainerTrafficEncryption") else []
    is_smddp = _SMDDP in (job.get("HyperParameters") or {})
    return JobPath(
        kind,
        str((job.get("AlgorithmSpecification") or {}).get("TrainingImage", "")),
        "SMDDP" if is_smddp else "NCCL",
        _capacity(job),
        ", ".join(network),
        count > 1,
    )


def instances_of(job: Mapping[str, Any]) -> tuple[str, int]:
    """Return type and number of the billed instances: of ordered preferences, the selected ones."""
    resources = job["ResourceConfig"]
    if "SelectedInstanceType" in resources:
        return resources["SelectedInstanceType"], resources["SelectedInstanceCount"]
    if "InstanceType" in resources:
        return resources["InstanceType"], resources["InstanceCount"]
    [first, *_] = resources.get("InstanceGroups") or resources["InstancePreferences"]
    return first["InstanceType"], first.get("InstanceCount", resources.get("InstanceCount", 1))


def is_on_training_plan(job: Mapping[str, Any]) -> bool:
    """Return whether the instances of :func:`instances_of` are those of a training plan."""
    resources = job["ResourceConfig"]
    plans = {
        preference["InstanceType"]: preference.get("TrainingPlanArns")
        for preference in resources.get("InstancePreferences", [])
    }
    return bool(resources.get("TrainingPlanArn") or plans.get(instances_of(job)[0]))


def _capacity(job: Mapping[str, Any]) -> str:
    if is_on_training_plan(job):
        return "training-plan"
    if job.get("EnableManagedSpotTraining"):
        return "spot"
    is_kept = job["ResourceConfig"].get("KeepAlivePeriodInSeconds")
    return "warm-pool" if is_kept else "on-demand"


FROM_STEP_TAG, CAUSE_TAG = "sm-train:from-step", "sm-train:cause"
"""A job's tags: the step of the checkpoint it resumes from, and why it was started."""

AUTO_ADVANCE_TAG, STOPPED_TAG = "sm-train:auto-advance", "sm-train:stopped-for"
"""A job's tags: whether the next stage starts automatically (on, off), and why it was stopped."""

STALL, BUDGET, USER = "stall", "budget", "user"
"""Why a job was stopped, as recorded in its tag. A stop in the console has no tag: the user's."""

PRICE_TAG = "sm-train:price"
"""A job's tag: the price with which its plan was accepted, as :func:`price_tag` writes it."""

_API = "API reference, DescribeTrainingJob"

SAGEMAKER = Platform(
    "sagemaker",
    "SageMaker",
    phase_table(
        [
            # Waits for instances, which are not billed.
            *(
                JobPhase(name, "waits", is_billed=False, source=_API)
                for name in ("Starting", "LaunchingMLInstances", "PreparingTrainingStack")
            ),
            *(
                JobPhase(name, "waits", is_billed=False, source=f"{_API}: waits for capacity")
                for name in ("Pending", "Interrupted", "Restarting")
            ),
            JobPhase(
                "DownloadingTrainingImage",
                "prepares",
                is_billed=True,
                source=_API,
                usual=timedelta(minutes=30),
                limit=timedelta(hours=3),
            ),
            JobPhase(
                "Downloading",
                "prepares",
                is_billed=True,
                source=f"{_API}: channels in File mode and checkpoints are downloaded",
                usual=timedelta(hours=1),
                limit=timedelta(hours=6),
            ),
            JobPhase(
                "Training",
                "trains",
                is_billed=True,
                source=_API,
                usual=timedelta(minutes=30),
                limit=timedelta(hours=2),
            ),
            JobPhase(
                "Uploading",
                "stores",
                is_billed=True,
                source=f"{_API}: models, output and checkpoints are uploaded",
                usual=timedelta(hours=1),
                limit=timedelta(hours=6),
            ),
            JobPhase(
                "Stopping",
                "stores",
                is_billed=True,
                source=f"{_API}: the program has two minutes, then its output is uploaded",
                usual=timedelta(hours=1),
            ),
            *(
                JobPhase(name, "ended", is_billed=False, source=_API)
                for name in (
                    *("Completed", "Failed", "Stopped"),
                    *("MaxRuntimeExceeded", "MaxWaitTimeExceeded"),
                )
            ),
        ]
    ),
    log_delay=300.0,
    support="AWS Support",
    own_retries="SageMaker's own retries",
)
"""SageMaker's secondary statuses. The usual times and limits are ours: of the largest model and
30 GB of image in storage of one region, with ample room."""

_CONCURRENT_CALLS = 4
"""Jobs described at a time: SageMaker throttles an account's calls together."""

_RUN_JOB_NAME = re.compile(r"--.+-\d{4,}$")


@dataclass(frozen=True)
class TrainingJob(RunJob):
    """A job of SageMaker."""

    path: JobPath | None = field(default=None, kw_only=True)
    """How it was started, and where."""

    @classmethod
    def of(
        cls,
        name: str,
        run: str,
        stage: str,
        status: str,
        tags: Mapping[str, str],
        description: Mapping[str, Any],
    ) -> TrainingJob:
        """Return the facts in the job's tags and a DescribeTrainingJob response."""
        arn = str(description["TrainingJobArn"])
        phases = tuple(
            sorted(
                ((each["Status"], each["StartTime"]) for each in _transitions(description)),
                key=lambda phase: phase[1],
            )
        )
        resources = description["ResourceConfig"]
        instances, kind = instances_of(description), _price_kind(description)
        pool = description.get("WarmPoolStatus") or {}
        checkpoints = description.get("CheckpointConfig") or {}
        output = description.get("OutputDataConfig") or {}
        seconds = description.get("BillableTimeInSeconds")
        from_step = tags.get(FROM_STEP_TAG)
        region = arn.split(":")[3]
        accepted = parse_price_tag(tags.get(PRICE_TAG, ""), instances[0], region, kind)
        return cls(
            name,
            run,
            stage,
            status,
            platform=SAGEMAKER,
            region=region,
            created=description["CreationTime"],
            instances=instances,
            nodes=tuple(host_names(instances[1])),
            identifier=arn,
            stop_command="aws sagemaker stop-training-job "
            f"--training-job-name {name} --region {region}",
            output_uri=f"{str(output.get('S3OutputPath', '')).rstrip('/')}/{name}",
            checkpoint_uri=str(checkpoints.get("S3Uri", "")).rstrip("/"),
            secondary_status=str(description.get("SecondaryStatus", "")),
            started=description.get("TrainingStartTime"),
            ended=description.get("TrainingEndTime"),
            failure_reason=" ".join(str(description.get("FailureReason", "")).split()),
            phases=phases,
            reported_seconds=None if seconds is None else float(seconds),
            reported_retained_seconds=float(pool.get("ResourceRetainedBillableTimeInSeconds") or 0),
            has_warm_pool=pool.get("Status") == "Available",
            spot=bool(description.get("EnableManagedSpotTraining")),
            price_kind=kind,
            accepted_price=accepted,
            placement=int(tags.get(PLACEMENT_TAG, 0)),
            auto_advance=tags.get(AUTO_ADVANCE_TAG) == "on",
            stopped_for=tags.get(STOPPED_TAG),
            from_step=None if from_step is None else int(from_step),
            got_no_instances=status in ENDED and _pending_timed_out(description, dict(phases)),
            tags=tags,
            max_runtime=description.get("StoppingCondition", {}).get("MaxRuntimeInSeconds"),
            path=job_path(description),
            are_instances_chosen="InstancePreferences" not in resources
            or "SelectedInstanceType" in resources,
        )

    @property
    def regions(self) -> tuple[str, ...]:
        """Regions that may hold jobs of the run, its home region first."""
        return tuple(self.tags.get(REGIONS_TAG, self.region).split())

    @property
    def bucket(self) -> str:
        return self.checkpoint_uri.split("/")[2]


def _transitions(description: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return description.get("SecondaryStatusTransitions") or ()


def _pending_timed_out(description: Mapping[str, Any], newest: Mapping[str, datetime]) -> bool:
    """Return whether SageMaker gave an ended job up because it got no instances within
    cluster.max_pending; ``newest`` is when each phase began last.

    The service model has no status for that, so the job's waiting time decides: since it was
    created, or since it returned to Pending, as between the reserved hours of a training plan.
    """
    if "Stopping" in newest:
        return False  # somebody stopped it, as while it waited for the start of its plan
    longest = description.get("StoppingCondition", {}).get("MaxPendingTimeInSeconds")
    end = description.get("TrainingEndTime") or description.get("LastModifiedTime")
    has_started = description.get("TrainingStartTime") is not None
    since = newest.get("Pending") if has_started else description["CreationTime"]
    if longest is None or end is None or since is None:
        return False
    if "Training" in newest and newest["Training"] > since:
        return False  # it got instances again
    return bool((end - since).total_seconds() >= longest)


def _price_kind(description: Mapping[str, Any]) -> str:
    """Return how the seconds of a job are priced.

    Spot's saving is in the billed seconds that SageMaker reports, 1 − BillableTimeInSeconds ÷
    TrainingTimeInSeconds (SageMaker developer guide), so these cost the on-demand price; until
    it reports them, the seconds that have passed cost the spot price. A training plan is prepaid.
    """
    if is_on_training_plan(description):
        return TRAINING_PLAN
    is_reported = description.get("BillableTimeInSeconds") is not None
    is_spot = description.get("EnableManagedSpotTraining")
    return SPOT if is_spot and not is_reported else ON_DEMAND


def price_tag(price: Price, kind: str) -> str | None:
    """Return the tag's value for an instance-hour bought as ``kind``; None if it is unknown."""
    usd = price.usd_per_instance_hour
    if usd is None or not price.region:
        return None
    return f"{price.region}/{price.instance_type}/{kind}={usd.normalize():f}"


def parse_price_tag(value: str, name: str, region: str, kind: str) -> Price | None:
    """Return the price of a tag; None if it is of something else, or no price."""
    bought, _, usd = value.partition("=")
    if bought != f"{region}/{name}/{kind}" or not re.fullmatch(r"\d+(\.\d+)?", usd):
        return None
    return Price(name, region, Decimal(usd), "verified", "the plan of the job", None)


def jobs_of_run(session: boto3.Session, run: str) -> list[TrainingJob]:
    """Return all jobs tagged with ``run``, oldest first, from all of its regions."""
    jobs = _jobs_in_all_regions(session, run, NameContains=f"{run}--")
    return [job for job in jobs if job.run == run]


def jobs_since(session: boto3.Session, moment: datetime) -> list[TrainingJob]:
    """Return the jobs created since ``moment``, oldest first: those of every run that may have
    jobs in the session's region, including its jobs in other regions.
    """
    jobs = _jobs_in_all_regions(session, None, CreationTimeAfter=moment)
    runs = {job.run for job in jobs if session.region_name in job.regions}
    return [job for job in jobs if job.run in runs]


def _jobs_in_all_regions(
    session: boto3.Session, run: str | None, **filters: Any
) -> list[TrainingJob]:
    """List jobs in the session's region, then in every region that the tags of found jobs name."""
    jobs = _list_jobs(session, session.region_name, run, filters)
    listed = {session.region_name}
    while remaining := {region for job in jobs for region in job.regions} - listed:
        for region in sorted(remaining):
            jobs += _list_jobs(session, region, run, filters)
        listed |= remaining
    return sorted(jobs, key=lambda job: (job.created, job.name))


def _list_jobs(
    session: boto3.Session, region: str, run: str | None, filters: dict[str, Any]
) -> list[TrainingJob]:
    """Return the jobs that ListTrainingJobs returns, with their tags and descriptions.

    Search returns a hundred jobs with everything in one call, but lags behind. It is used for jobs
    whose status and tags are final: they have ended, and a newer job of their stage exists.
    """
    client = session.client("sagemaker", region_name=region)
    with translate_aws_errors("ListTrainingJobs"):
        summaries = {
            summary["TrainingJobName"]: summary
            for page in client.get_paginator("list_training_jobs").paginate(**filters)
            for summary in page["TrainingJobSummaries"]
            if _RUN_JOB_NAME.search(summary["TrainingJobName"])
        }
        newest: dict[str, str] = {}
        for name in sorted(summaries, key=lambda summary: summaries[summary]["CreationTime"]):
            newest[name.rpartition("-")[0]] = name
        final = {
            name: summary["TrainingJobStatus"]
            for name, summary in summaries.items()
            if summary["TrainingJobStatus"] in ENDED and name not in newest.values()
        }
        found = _search_jobs(client, final, run) if final else {}
        described = [name for name in summaries if name not in found]
        with ThreadPoolExecutor(_CONCURRENT_CALLS) as pool:
            arns = [summaries[name]["TrainingJobArn"] for name in described]
            jobs = pool.map(partial(_describe_with_tags, client), described, arns)
            return [job for job in (*found.values(), *jobs) if job is not None]


def _search_jobs(
    client: SageMakerClient, statuses: Mapping[str, str], run: str | None
) -> dict[str, TrainingJob | None]:
    """Return the jobs with these names and statuses that Search finds; None for foreign ones."""
    from botocore.exceptions import ClientError

    names: FilterTypeDef = {
        "Name": "TrainingJobName",
        "Operator": "Contains",
        "Value": f"{run or ''}--",
    }
    pages = client.get_paginator("search").paginate(
        Resource="TrainingJob",
        SearchExpression={"Filters": [names]},
        SortBy="CreationTime",
        SortOrder="Descending",
        PaginationConfig={"MaxItems": 2 * len(statuses) + 100, "PageSize": 100},
    )
    found: dict[str, TrainingJob | None] = {}
    try:
        for page in pages:
            for result in page["Results"]:
                record = result.get("TrainingJob", {})
                name = record.get("TrainingJobName", "")
                if statuses.get(name) == record.get("TrainingJobStatus", "unknown"):
                    tags = {tag["Key"]: tag["Value"] for tag in record.get("Tags", [])}
                    found[name] = _parse_job(record, tags)
            if len(found) == len(statuses):
                break
    except ClientError as error:
        # A policy of an earlier version does not allow it.
        if error.response["Error"]["Code"] not in ("AccessDenied", "AccessDeniedException"):
            raise
    return found


def _describe_with_tags(client: SageMakerClient, name: str, arn: str) -> TrainingJob | None:
    tags = _tags(client, arn)
    if RUN_TAG not in tags:
        return None
    return _parse_job(client.describe_training_job(TrainingJobName=name), tags)


def find_job(session: boto3.Session, name: str, region: str | None = None) -> TrainingJob | None:
    """Return the job called ``name``; None if it does not exist or belongs to no run.

    ``region`` is the session's unless given.
    """
    description = describe_job(session, name, region)
    return None if description is None else _with_tags(session, description, region)


def _with_tags(
    session: boto3.Session, description: dict[str, Any], region: str | None
) -> TrainingJob | None:
    with translate_aws_errors("ListTags"):
        client = session.client("sagemaker", region_name=region)
        return _parse_job(description, _tags(client, description["TrainingJobArn"]))


def refresh(session: boto3.Session, job: RunJob) -> RunJob:
    """Return the job as it is now."""
    return find_job(session, job.name, job.region) or job


def is_foreign(session: boto3.Session, name: str, region: str) -> bool:
    """Return whether a job that belongs to no run has that name in ``region``."""
    description = describe_job(session, name, region)
    return description is not None and _with_tags(session, description, region) is None


def describe_job(
    session: boto3.Session, name: str, region: str | None = None
) -> dict[str, Any] | None:
    """Return the DescribeTrainingJob response; None if there is no such job.

    ``region`` is the session's unless given.
    """
    from botocore.exceptions import ClientError

    with translate_aws_errors("DescribeTrainingJob"):
        try:
            client = session.client("sagemaker", region_name=region)
            return dict(client.describe_training_job(TrainingJobName=name))
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("ValidationException", "ResourceNotFound"):
                raise
            return None


def is_valid_job_name(name: str) -> bool:
    """Return whether SageMaker accepts ``name`` as a job's name."""
    return len(name) <= 63 and name.replace("-", "").isalnum()


def server_time(session: boto3.Session) -> datetime:
    """Return the time by SageMaker's clock: with a wrong local clock a live job looks stalled."""
    with translate_aws_errors("ListTrainingJobs"):
        response = session.client("sagemaker").list_training_jobs(MaxResults=1)
    return parsedate_to_datetime(response["ResponseMetadata"]["HTTPHeaders"]["date"])


def stop_job(
    session: boto3.Session, job: RunJob, reason: str, *, usd_per_hour: float | None
) -> str | None:
    """Stop the job after a checkpoint, then record ``reason`` in its tags for every watcher.

    A job that has ended meanwhile, or that something else stops, is left as it is: SageMaker
    rejects the call for it. The stop saves money, so it comes first, and is repeated until it is
    known whether the job runs; a tag that cannot be written is only reported.

    Returns:
        A warning if the reason could not be recorded.

    Raises:
        UserError: the job runs, or nobody knows whether it does; with its ``usd_per_hour``.
    """
    client = session.client("sagemaker", region_name=job.region)
    for delay in (*_STOP_SECONDS, None):
        try:
            with translate_aws_errors("StopTrainingJob"):
                client.stop_training_job(TrainingJobName=job.name)
            break
        except UserError as error:
            problem = error
        try:
            current = refresh(session, job)
        except UserError:
            known = False
        else:
            known = True
            if not current.live or current.status == "Stopping":
                break
        if delay is None or (known and problem.exit_code not in TRANSIENT):
            cost = "is billed" if usd_per_hour is None else f"costs ${usd_per_hour:,.2f} an hour"
            state = "still runs" if known else "may still run"
            text = f"{problem}; {job.name} {state} and {cost}: {job.stop_command}"
            raise UserError(text, problem.exit_code)
        time.sleep(delay)
    try:
        # What a user has said meanwhile counts: another reason would start a job again.
        if refresh(session, job).stopped_for is None:
            tag_job(session, job, STOPPED_TAG, reason)
    except UserError as error:
        return (
            f"{job.name} is stopped, but not the reason recorded ({error}): if it fails while it "
            "stops, a watcher may start another job"
        )
    return None


def end_warm_pool(session: boto3.Session, job: RunJob) -> None:
    """End the warm pool that keeps a job's instances.

    Raises:
        UserError: AWS returns an error, and the pool is billed further.
    """
    with translate_aws_errors("UpdateTrainingJob"):
        client = session.client("sagemaker", region_name=job.region)
        _repeat_throttled(
            lambda: client.update_training_job(
                TrainingJobName=job.name, ResourceConfig={"KeepAlivePeriodInSeconds": 0}
            )
        )


def tag_job(session: boto3.Session, job: RunJob, key: str, value: str) -> None:
    """Set a tag of the job, where every laptop sees it."""
    with translate_aws_errors("AddTags"):
        client = session.client("sagemaker", region_name=job.region)
        tags: list[TagTypeDef] = [{"Key": key, "Value": value}]
        _repeat_throttled(lambda: client.add_tags(ResourceArn=job.identifier, Tags=tags))


def _repeat_throttled(call: Callable[[], object]) -> None:
    """Make a call, and repeat it while it is throttled, beyond the attempts of botocore."""
    from botocore.exceptions import ClientError

    for delay in _THROTTLED_SECONDS:
        try:
            call()
            return
        except ClientError as error:
            if not is_throttling(error):
                raise
            time.sleep(delay)
    call()


_THROTTLED_SECONDS = _STOP_SECONDS = (0.5, 1.0, 2.0, 4.0)
"""Delays between attempts, in addition to those of botocore."""


def _parse_job(description: Mapping[str, Any], tags: dict[str, str]) -> TrainingJob | None:
    if RUN_TAG not in tags or STAGE_TAG not in tags:
        return None
    job = TrainingJob.of(
        description["TrainingJobName"],
        tags[RUN_TAG],
        tags[STAGE_TAG],
        description["TrainingJobStatus"],
        tags,
        description,
    )
    if BUCKET_OWNER_TAG in tags:
        declare_buckets({job.bucket: tags[BUCKET_OWNER_TAG]})
    return job


def _tags(client: SageMakerClient, arn: str) -> dict[str, str]:
    pages = client.get_paginator("list_tags").paginate(ResourceArn=arn)
    return {tag["Key"]: tag["Value"] for page in pages for tag in page["Tags"]}


_NODE = re.compile(r"algo-\d+")
_END_STATUSES = frozenset(
    "Interrupted MaxRuntimeExceeded MaxWaitTimeExceeded MaxPendingTimeExceeded Stopping "
    "Stopped".split()
)
"""Secondary statuses that explain why a job ended; AWS may add others at any time."""
_ACTIVE_STATUSES = frozenset(
    "Starting Restarting Pending LaunchingMLInstances PreparingTrainingStack Downloading "
    "DownloadingTrainingImage Training".split()
)


def job_logs(session: boto3.Session, job: str) -> JobLogs:
    """Return the logs of a job, one stream with SageMaker's own messages.

    Raises:
        UserError: the job does not exist, or AWS rejects a request.
    """
    description = describe_job(session, job)
    if description is None:
        raise UserError(
            f"{job}: no such file, and no such training job in {session.region_name}; check "
            "--region"
        )
    lines = list(_sagemaker_lines(description))
    now = datetime.now(UTC).timestamp()
    streams = [_stream(session, name, now) for name in stream_names(session, job)]
    if lines:
        content = "".join(f"{line}\n" for line in lines).encode()
        streams.append(LogStream("DescribeTrainingJob", lambda: [content], None, now))
    *earlier, last = attempts(streams)
    return JobLogs(job, description["TrainingJobStatus"], last, earlier)


def _stream(session: boto3.Session, name: str, now: float) -> LogStream:
    def blocks() -> Iterator[bytes]:
        for page in read_stream(session, name):
            yield "".join(
                f"{_iso(at)} {line}\n" for at, message in page for line in message.splitlines()
            ).encode()

    node = _NODE.search(name.rpartition("/")[2])
    return LogStream(name, blocks, node[0] if node else None, now)


def _sagemaker_lines(description: dict[str, Any]) -> Iterator[str]:
    """Yield the failure reason and the statuses that explain the job's end as log lines."""
    ends: list[str] = []
    for transition in description.get("SecondaryStatusTransitions", []):
        if transition["Status"] in _END_STATUSES:
            time = _iso(transition["StartTime"].timestamp())
            ends.append(f"{time} SecondaryStatus: {transition['Status']}")
        elif transition["Status"] in _ACTIVE_STATUSES:
            # The job was restarted: earlier statuses only ended a previous attempt.
            ends.clear()
    yield from ends
    reason = description.get("FailureReason")
    if reason:
        ended = description.get("TrainingEndTime") or description["LastModifiedTime"]
        stamp = _iso(ended.timestamp())
        first, *others = reason.splitlines()
        yield f"{stamp} FailureReason: {first}"
        for line in others:
            # The container quotes the program's last lines: `ErrorMessage "RuntimeError: …`
            yield f"{stamp} {line.removeprefix('ErrorMessage ').lstrip(chr(34))}"


def _iso(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")
