"""Compares the account's quotas with what the run requests at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.terminal.formatting import format_duration

if TYPE_CHECKING:
    import boto3
    from types_boto3_service_quotas.client import ServiceQuotasClient

DEFAULT_RUNTIME_SECONDS = 5 * 86400
_MOST_PAGES = 100


INSTANCE_QUOTA = Check("instance-quota", ("error",))
WARM_POOL_QUOTA = Check("warm-pool-quota", ("warning",))
RUNTIME_QUOTA = Check("runtime-quota", ("error", "info"))
QUOTA_UNKNOWN = Check("quota-unknown", ("info",))

_RUNTIME = "Longest run time for a training job"


@dataclass(frozen=True)
class Quota:
    """One quota as applied to the account in the region."""

    name: str
    code: str
    value: float

    def increase_command(self, wanted: int, region: str) -> str:
        """Return the AWS CLI command that requests an increase to ``wanted``."""
        return (
            "aws service-quotas request-service-quota-increase --service-code sagemaker "
            f"--region {region} --quota-code {self.code} --desired-value {wanted}"
        )


def default_runtime_findings(config: RunConfig) -> Iterator[Finding]:
    """Check the maximum runtime against the default quota, without calling AWS."""
    if config.cluster.max_runtime > DEFAULT_RUNTIME_SECONDS:
        yield RUNTIME_QUOTA.found(
            "info",
            "cluster.max_runtime",
            f"{format_duration(config.cluster.max_runtime)} exceed the default quota of "
            f"{format_duration(DEFAULT_RUNTIME_SECONDS)}",
            "check the account's quota in Service Quotas",
        )


def quota_findings(config: RunConfig, session: boto3.Session, region: str) -> Iterator[Finding]:
    """Check the run against the account's quotas.

    Raises:
        ClientError: Service Quotas rejects a request.
    """
    instances = max(stage.instances for stage in config.stages)
    wanted = dict.fromkeys(instance_quotas(config), instances) | {
        _RUNTIME: config.cluster.max_runtime
    }
    warm = f"{config.cluster.instance_type} for training warm pool usage"
    if config.cluster.capacity == "warm-pool":
        wanted[warm] = instances
    quotas = read_quotas(session.client("service-quotas"), wanted)
    for name, amount in wanted.items():
        quota = quotas.get(name)
        if quota is None:
            yield QUOTA_UNKNOWN.found(
                "info", "cluster", f"Service Quotas lists no quota {name!r}", "check the console"
            )
        elif amount > quota.value:
            yield _exceeded(quota, amount, warm, quota.increase_command(amount, region))


def _exceeded(quota: Quota, amount: int, warm: str, fix: str) -> Finding:
    if quota.name == _RUNTIME:
        return RUNTIME_QUOTA.found(
            "error",
            "cluster.max_runtime",
            f"{format_duration(amount)} exceed the account's quota of "
            f"{format_duration(quota.value)}",
            fix,
        )
    message = f"{amount} instances exceed the account's quota of {quota.value:g} ({quota.name})"
    if quota.name == warm:
        return WARM_POOL_QUOTA.found("warning", "cluster.keep_alive_period", message, fix)
    return INSTANCE_QUOTA.found("error", "cluster.instance_type", message, fix)


def instance_quotas(config: RunConfig) -> tuple[str, ...]:
    """Return the quotas on a job's instances; a training plan has none, being prepaid."""
    cluster = config.cluster
    if cluster.capacity == "training-plan":
        return ()
    spot = "spot " if cluster.capacity == "spot" else ""
    return (
        f"{cluster.instance_type} for {spot}training job usage",
        f"Maximum number of instances per {spot}training job",
        f"Number of instances across all {spot}training jobs",
    )


def read_quotas(client: ServiceQuotasClient, names: Iterable[str]) -> dict[str, Quota]:
    """Return the quotas with these ``names``.

    SageMaker has thousands of quotas, so paging stops once all of them are found.

    Raises:
        ClientError: Service Quotas rejects a request.
    """
    missing, quotas = set(names), {}
    pages = client.get_paginator("list_service_quotas").paginate(
        ServiceCode="sagemaker", PaginationConfig={"MaxItems": 100 * _MOST_PAGES, "PageSize": 100}
    )
    for page in pages:
        for quota in page["Quotas"]:
            if quota["QuotaName"] in missing:
                missing.discard(quota["QuotaName"])
                quotas[quota["QuotaName"]] = Quota(
                    quota["QuotaName"], quota["QuotaCode"], quota["Value"]
                )
        if not missing:
            break
    return quotas
