"""Which jobs may be reading shards: live training jobs, running local runs, and recorded ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sm_train.toolkit.aws.s3 import regions_of_readers
from sm_train.toolkit.aws.session import open_session
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.packing.shard_set import ShardSet
from sm_train.toolkit.records.local_folder import DEFAULT_FOLDER, LocalRunFolder

if TYPE_CHECKING:
    from types_boto3_sagemaker import SageMakerClient

_LIVE: tuple[Literal["InProgress", "Stopping"], ...] = ("InProgress", "Stopping")
_CONCURRENT_CALLS = 4


@dataclass(frozen=True)
class RecordedJob:
    """A job outside of SageMaker that read the shards when it ``started``, by its record."""

    name: str
    started: datetime


@dataclass(frozen=True)
class ShardUsers:
    """The jobs that may read shards as an earlier index lists them.

    ``problem`` says why others are unknown; None if SageMaker listed its jobs in every region.
    """

    jobs: tuple[str, ...] = ()
    problem: str | None = None


def users_since(
    shards: ShardSet, moment: datetime, regions: Iterable[str], recorded: Iterable[RecordedJob]
) -> ShardUsers:
    """Return the jobs that were created before ``moment``, still run and read ``shards``.

    SageMaker is asked in the bucket's region, in the one of the environment and in ``regions``.
    A job that starts later gets the index of that time. ``recorded`` are jobs outside of SageMaker
    that may still run; others than these and this folder's local runs are not known.
    """
    others = tuple(job.name for job in recorded if job.started < moment)
    if not shards.address.startswith("s3://"):
        return ShardUsers((*_local_runs(Path(shards.address)), *others))
    from botocore.exceptions import BotoCoreError, ClientError

    jobs: list[str] = []
    problems = []
    try:
        asked = regions_of_readers(shards.address, shards.access, regions)
    except UserError as error:
        return ShardUsers(others, str(error))
    for region in asked:
        session = open_session(shards.access.profile, region)
        try:
            jobs += _jobs(session.client("sagemaker"), f"{shards.address}/", moment)
        except (BotoCoreError, ClientError) as error:
            problems.append(f"{region}: {' '.join(str(error).split())}")
    return ShardUsers((*jobs, *others), "; ".join(problems) or None)


def _jobs(client: SageMakerClient, uri: str, moment: datetime) -> Iterator[str]:
    names = [
        summary["TrainingJobName"]
        for status in _LIVE
        for page in client.get_paginator("list_training_jobs").paginate(StatusEquals=status)
        for summary in page["TrainingJobSummaries"]
        if summary["CreationTime"] < moment
    ]

    def describe(name: str) -> Mapping[str, Any]:
        return client.describe_training_job(TrainingJobName=name)

    with ThreadPoolExecutor(_CONCURRENT_CALLS) as pool:
        for name, description in zip(names, pool.map(describe, names), strict=True):
            if any(uri.startswith(read) or read.startswith(uri) for read in _reads(description)):
                yield name


def _reads(description: Mapping[str, Any]) -> Iterator[str]:
    """Yield the S3 prefixes that a job reads."""
    for channel in description.get("InputDataConfig", []):
        source = channel["DataSource"].get("S3DataSource")
        if source is not None:
            yield source["S3Uri"]


def _local_runs(folder: Path) -> Iterator[str]:
    """Yield the local runs below this folder that train on the shards in ``folder``."""
    shards = folder.resolve()
    for path in sorted(DEFAULT_FOLDER.glob("*")) if DEFAULT_FOLDER.is_dir() else []:
        run = LocalRunFolder(path)
        channels = path.glob("*/nodes/*/input/data/*")
        if run.is_training() and any(_leads_into(channel, shards) for channel in channels):
            yield str(path)


def _leads_into(channel: Path, shards: Path) -> bool:
    """Return whether a channel is a link to the folder ``shards``, or holds links to its files."""
    if channel.is_symlink():
        return channel.resolve() == shards
    return any(link.resolve().is_relative_to(shards) for link in channel.rglob("*.tar"))


def utc(timestamp_ns: int) -> datetime:
    """Return a time of the storage as an aware one."""
    return datetime.fromtimestamp(timestamp_ns / 1e9, UTC)
