"""Runs all checks of a run: finds errors and waste before money is spent."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from sm_train.cost.json_document import as_document
from sm_train.entrypoints.job_interface.index_location import index_path
from sm_train.entrypoints.shards.shard_format import ShardError
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.aws.session import account_of, session_in_region
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.checks import storage
from sm_train.toolkit.checks.account.quotas import default_runtime_findings, quota_findings
from sm_train.toolkit.checks.account.role import ROLE_UNSET, role_findings, secret_findings
from sm_train.toolkit.checks.account.simulated_permissions import permission_findings
from sm_train.toolkit.checks.account.training_plan import training_plan_findings
from sm_train.toolkit.checks.account.vpc import file_system_findings, vpc_findings
from sm_train.toolkit.checks.budget import (
    alternative_budget_findings,
    budget_findings,
    limit_findings,
)
from sm_train.toolkit.checks.checkpoints import checkpoint_findings
from sm_train.toolkit.checks.components import (
    base_findings,
    local_components_findings,
    named_components_findings,
    stored_components_findings,
)
from sm_train.toolkit.checks.decoding import decoding_findings
from sm_train.toolkit.checks.disk import disk_findings
from sm_train.toolkit.checks.entry import entry_findings
from sm_train.toolkit.checks.finding import LEVELS, Finding, Subject, found_at
from sm_train.toolkit.checks.image import image_findings, registry_findings
from sm_train.toolkit.checks.local_data import read_local
from sm_train.toolkit.checks.network import network_findings
from sm_train.toolkit.checks.organization import organization_findings
from sm_train.toolkit.checks.permissions import UNCHECKED, attempt, call_or_finding
from sm_train.toolkit.checks.recovery import recovery_findings
from sm_train.toolkit.checks.relocation import (
    memory_findings_of_clusters,
    relocated_data_findings,
    relocated_subjects,
    relocation_findings,
)
from sm_train.toolkit.checks.run_file import placeholder_findings
from sm_train.toolkit.checks.shards import (
    Shards,
    augmentation_findings,
    color_findings,
    epoch_findings,
    expiry_findings,
    index_findings,
    of_index,
    shard_findings,
)
from sm_train.toolkit.checks.user_functions import user_function_findings
from sm_train.toolkit.planning.run_price import alternative_costs
from sm_train.toolkit.run_file.index_facts import local_expiries, stored_expiries
from sm_train.toolkit.shards.shard_listing import ShardListing

if TYPE_CHECKING:
    import boto3


def offline_findings(subject: Subject, today: date) -> list[Finding]:
    """Check the run file, its estimate and the shards on this machine.

    Raises:
        UserError: the index cannot be read.
    """
    shards, problems = _local_shards(subject, required=True)
    findings = [
        *_run_file_findings(subject, today),
        *problems,
        *base_findings(subject.config, subject.components),
        *local_components_findings(subject.config, subject.base),
        *_named_components(subject, None),
        *_default_quotas(subject.config),
        *_local_expiry_findings(subject, today),
    ]
    if shards is not None:
        findings += _partition_findings(subject, shards)
    return _most_severe_first(findings)


def _default_quotas(config: RunConfig) -> Iterator[Finding]:
    if not config.cluster.is_own_machine:
        yield from default_runtime_findings(config)


def online_findings(
    subject: Subject, session: boto3.Session, today: date, progress: storage.Progress
) -> list[Finding]:
    """Also check the AWS account; shards in S3 take precedence over those on this machine.

    Raises:
        UserError: the index cannot be read, or the credentials are invalid (exit code 4).
    """
    config, region = subject.config, subject.region
    account = account_of(session)
    with translate_aws_errors("AWS"):
        shards, problems = _local_shards(subject, required=False)
        findings = [
            *_run_file_findings(subject, today),
            *problems,
            *base_findings(config, subject.components),
            *local_components_findings(config, subject.base),
            *_named_components(subject, session),
        ]
        findings += _job_findings(config, session, region, account)
        needed = as_document(subject.estimate)["total"]["wall_seconds"]
        findings += training_plan_findings(config, session, region, needed)
        listings: dict[int, ShardListing] = {}
        findings += _s3_findings(subject, session, shards, progress, listings, today)
        for relocated in relocated_subjects(subject):
            regional = session_in_region(session, relocated.region)
            quotas = _quota_findings(relocated.config, regional, relocated.region)
            findings += found_at(relocated, quotas)
            secrets = _secret_findings(relocated.config, regional, relocated.region, account)
            findings += found_at(relocated, secrets)
            if relocated.region != region:
                networks = _network_findings(relocated.config, regional, relocated.region)
                findings += found_at(relocated, networks)
            findings += _relocated_account_findings(
                subject, relocated, regional, progress, listings, today
            )
    return _most_severe_first(findings)


def _job_findings(
    config: RunConfig, session: boto3.Session, region: str, account: str
) -> Iterator[Finding]:
    """Check what a training job needs besides its data: role, permissions, quotas, network, image.

    A run on machines of the user's own has no training jobs.
    """
    if config.cluster.is_own_machine:
        yield from _secret_findings(config, session, region, account)
        return
    role = list(
        attempt("the role", "role", "iam:GetRole", role_findings(config.role, session, account))
    )
    yield from role
    if not any(finding.level == "error" for finding in role):
        yield from attempt(
            "the permissions",
            "role",
            "iam:SimulatePrincipalPolicy",
            permission_findings(config, session, region),
        )
    yield from _secret_findings(config, session, region, account)
    yield from _quota_findings(config, session, region)
    yield from _network_findings(config, session, region)
    yield from attempt(
        "the image",
        "cluster.image",
        "ecr:DescribeImages",
        registry_findings(config, session, region),
    )


def _named_components(subject: Subject, session: boto3.Session | None) -> list[Finding]:
    """Check the components of ``--components``, if it is given."""
    if subject.components is None:
        return []
    findings = named_components_findings(subject.config, subject.components, session)
    if session is None:  # no call that AWS could reject
        return list(findings)
    return list(attempt("the components", "--components", "s3:GetObject", findings))


def _secret_findings(
    config: RunConfig, session: boto3.Session, region: str, account: str
) -> list[Finding]:
    findings = secret_findings(config, session, region, account)
    action = "secretsmanager:DescribeSecret, ssm:DescribeParameters and iam:SimulatePrincipalPolicy"
    return list(attempt("the secrets", "alerts, trackers", action, findings))


def _network_findings(config: RunConfig, session: boto3.Session, region: str) -> Iterator[Finding]:
    """Check the run's VPC and its file systems."""
    yield from attempt(
        "the VPC",
        "cluster.vpc",
        "ec2:DescribeSubnets, ec2:DescribeRouteTables and ec2:DescribeVpcEndpoints",
        vpc_findings(config, session, region),
    )
    yield from attempt(
        "the file systems",
        "data.file_system, channels",
        "fsx:DescribeFileSystems, elasticfilesystem:DescribeFileSystems and "
        "elasticfilesystem:DescribeMountTargets",
        file_system_findings(config, session, region),
    )


def _quota_findings(config: RunConfig, session: boto3.Session, region: str) -> list[Finding]:
    """Check the account's quotas, or the default quota where they cannot be read."""
    findings = list(
        attempt(
            "the quotas",
            "cluster",
            "servicequotas:ListServiceQuotas",
            quota_findings(config, session, region),
        )
    )
    if any(finding.code == UNCHECKED.code for finding in findings):
        findings += default_runtime_findings(config)
    return findings


def _run_file_findings(subject: Subject, today: date) -> Iterator[Finding]:
    """Check the run file and its estimate, on every cluster that the run may get."""
    config, document = subject.config, as_document(subject.estimate)
    yield from placeholder_findings(config)
    yield from organization_findings(config)
    yield from budget_findings(config, document)
    yield from limit_findings(config, subject.estimate)
    yield from index_findings(config, document)
    yield from epoch_findings(
        config, [priced_stage.stage for priced_stage in subject.estimate.stages]
    )
    others = alternative_costs(config, subject.region)
    yield from alternative_budget_findings(config, document, others)
    yield from memory_findings_of_clusters(config, subject.region)
    yield from relocation_findings(config, subject.region, today)
    yield from recovery_findings(config, document)
    yield from disk_findings(
        config, [priced_stage.stage for priced_stage in subject.estimate.stages]
    )
    yield from image_findings(config, subject.region, today)
    yield from network_findings(config)
    yield from entry_findings(config)
    yield from user_function_findings(config, subject.base)
    if config.role is None and not config.cluster.is_own_machine:
        yield ROLE_UNSET.found(
            "warning", "role", "role is not set", "set it to the role's ARN: submit requires it"
        )


def _relocated_account_findings(
    subject: Subject,
    relocated: Subject,
    session: boto3.Session,
    progress: storage.Progress,
    listings: dict[int, ShardListing],
    today: date,
) -> Iterator[Finding]:
    """Check image, buckets and shards in another region than the run's."""
    if relocated.region == subject.region:
        return
    yield from found_at(
        relocated,
        attempt(
            "the image",
            relocated.key,
            "ecr:DescribeImages",
            registry_findings(relocated.config, session, relocated.region),
        ),
    )
    yield from found_at(
        relocated, _s3_findings(relocated, session, None, progress, listings, today)
    )
    if subject.number in listings and relocated.number in listings:
        yield from relocated_data_findings(
            relocated, listings[subject.number], listings[relocated.number]
        )


def _local_shards(subject: Subject, *, required: bool) -> tuple[Shards | None, list[Finding]]:
    """Return the shards by ``--index`` or in ``data.local``, and their problems."""
    if subject.index is not None:
        try:
            return of_index(ShardIndex(subject.index), "--index"), []
        except ShardError as error:
            raise UserError(f"--index: {error}") from None
    if subject.config.data.local is None or not subject.config.reads_shards:
        return None, []
    folder = subject.base / subject.config.data.local
    if not folder.is_dir() and not required:  # the folder is on another computer
        return None, []
    return read_local(folder)


def _partition_findings(subject: Subject, shards: Shards) -> Iterator[Finding]:
    config = subject.config
    if not config.reads_shards:
        return
    yield from augmentation_findings(shards, config)
    if shards.header is not None:
        yield from color_findings(shards.location, shards.header, config)
    document = as_document(subject.estimate)
    yield from shard_findings(
        shards, document, config.training.decode_workers, sharded=config.train_sharded
    )
    yield from decoding_findings(shards, document, config)


def _s3_findings(
    subject: Subject,
    session: boto3.Session,
    local: Shards | None,
    progress: storage.Progress,
    listings: dict[int, ShardListing],
    today: date,
) -> Iterator[Finding]:
    """Check the buckets, and the objects in those that are usable.

    The shards are stored in ``listings`` under the subject's number.
    """
    config, region = subject.config, subject.region
    unusable: set[str] = set()
    for bucket, (where, uri) in storage.buckets(config, region).items():
        problems = list(
            attempt(
                f"bucket {bucket}",
                where,
                "s3:ListBucket",
                storage.bucket_findings(session, region, uri, where),
            )
        )
        yield from problems
        if problems:
            unusable.add(bucket)
    reaches_own_bucket = (
        storage.knows_its_bucket(config) and staging_bucket(config, region) not in unusable
    )
    if reaches_own_bucket:
        yield from attempt(
            "the bucket's encryption",
            "output_kms_key",
            "s3:GetBucketPolicy and s3:GetEncryptionConfiguration",
            storage.encryption_findings(config, session, region),
        )
    yield from _data_uri_findings(subject, session, local, progress, unusable, listings, today)
    yield from attempt(
        "a channel's prefix",
        "data.validation, model.components",
        "s3:ListBucket",
        storage.prefix_findings(config, session, unusable),
    )
    components = config.model.components
    if components is not None and split_uri(components)[0] not in unusable:
        yield from attempt(
            "the components",
            "model.components",
            "s3:GetObject",
            stored_components_findings(config, session),
        )
    # Checkpoints in other regions are copies of the run's own, so only the first one is checked.
    if subject.number == 0 and reaches_own_bucket:
        yield from attempt(
            "earlier checkpoints",
            "name",
            "s3:GetObject and sagemaker:ListTrainingJobs",
            checkpoint_findings(config, session, region),
        )


def _data_uri_findings(
    subject: Subject,
    session: boto3.Session,
    local: Shards | None,
    progress: storage.Progress,
    unusable: set[str],
    listings: dict[int, ShardListing],
    today: date,
) -> Iterator[Finding]:
    """Check the shards in S3, or those on this machine where S3 cannot be listed."""
    config = subject.config
    listing = None
    if split_uri(config.data.uri)[0] not in unusable:
        listing, problems = call_or_finding(
            "the shards",
            "data.uri",
            "s3:ListBucket",
            lambda: storage.list_data(config, session, progress),
        )
        yield from problems
    if listing is None:
        if local is not None:
            yield from _partition_findings(subject, local)
        return
    listings[subject.number] = listing
    yield from storage.listing_findings(config, listing)
    staged = storage.staged_findings(config, session)
    yield from attempt("the staged images", "data.uri", "s3:ListBucket", staged)
    if listing.shards:
        yield from _partition_findings(subject, storage.shards_in_s3(config, listing, local))
    indexed = _indexed_sizes(subject.index) if subject.index else None
    yield from attempt(
        "the index",
        "data.index",
        "s3:GetObject",
        storage.index_findings(config, session, listing, indexed),
    )
    yield from attempt(
        "the expiry of samples",
        "data.expiry",
        "s3:GetObject",
        _stored_expiry_findings(subject, session, today),
    )


def _stored_expiry_findings(
    subject: Subject, session: boto3.Session, today: date
) -> Iterator[Finding]:
    for expiries in stored_expiries(subject.config, session):
        yield from expiry_findings(expiries, as_document(subject.estimate), today)


def _local_expiry_findings(subject: Subject, today: date) -> Iterator[Finding]:
    """Name samples by ``--index``, or by the index next to ``data.local``."""
    config = subject.config
    if not config.reads_shards or (subject.index is None and config.data.local is None):
        return
    path = subject.index or index_path(subject.base / (config.data.local or ""))
    for expiries in local_expiries(config, path):
        yield from expiry_findings(expiries, as_document(subject.estimate), today)


def _indexed_sizes(path: Path) -> dict[str, int]:
    index = ShardIndex(path)
    return dict(zip(index.names, index.bytes.tolist(), strict=True))


def _most_severe_first(findings: list[Finding]) -> list[Finding]:
    return sorted(dict.fromkeys(findings), key=lambda fromkey: LEVELS.index(fromkey.level))
