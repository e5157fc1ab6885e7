"""The account's quotas against what the run asks for at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.terminal.formatting import format_duration

DEFAULT_RUNTIME_SECONDS = 5 * 86400
_MOST_PAGES = 100

_SOURCE = "AWS General Reference, Amazon SageMaker AI endpoints and quotas (2026-11)"

INSTANCE_QUOTA = Check(
    "instance-quota",
    ("error",),
    means="The account may not have as many instances at once as the run's largest stage: of this "
    "type, in one job, or in all jobs together. What runs already counts too and is not looked at.",
    impact="CreateTrainingJob is refused (ResourceLimitExceeded). New quotas of large GPU machines "
    "take days.",
    fix="Ask for the quota by the command that the finding prints, or take fewer instances.",
    source=_SOURCE,
)
WARM_POOL_QUOTA = Check(
    "warm-pool-quota",
    ("warning",),
    means="`capacity: warm-pool`, and the account's quota for kept machines of this type is less "
    "than a stage's instances. The default is 0.",
    impact="The job runs, and no machines are kept after it: the next one waits for its own again.",
    fix="Ask for the quota by the command that the finding prints, or write another capacity.",
    source="SageMaker developer guide, Request a warm pool quota increase (2026-11)",
)
RUNTIME_QUOTA = Check(
    "runtime-quota",
    ("error", "info"),
    means="`cluster.max_runtime` is longer than the account allows a job to run. Where the "
    "account was not asked, an info if it is longer than the default of 5 days.",
    impact="CreateTrainingJob is refused (ResourceLimitExceeded).",
    fix="Ask for the quota by the command that the finding prints (28 days at most), or write a "
    "shorter `max_runtime`: a stage goes on from its checkpoint in another job.",
    source=_SOURCE,
)
QUOTA_UNKNOWN = Check(
    "quota-unknown",
    ("info",),
    means="Service Quotas lists no quota of the name that AWS's documentation has for it.",
    impact="Nothing by itself: a quota may still refuse the job.",
    fix="Look in the console, Service Quotas, Amazon SageMaker.",
    source=_SOURCE,
)

_RUNTIME = "Longest run time for a training job"


@dataclass(frozen=True)
class Quota:
    """One quota as it applies to the account in the region."""

    name: str
    code: str
    value: float

    def request(self, wanted: int, region: str) -> str:
        """The command that asks for more."""
        return (
            "aws service-quotas request-service-quota-increase --service-code sagemaker "
            f"--region {region} --quota-code {self.code} --desired-value {wanted}"
        )


def default_runtime_findings(config: RunConfig) -> Iterator[Finding]:
    """Without asking AWS: by the default quota."""
    if config.cluster.max_runtime > DEFAULT_RUNTIME_SECONDS:
        yield RUNTIME_QUOTA.found(
            "info",
            "cluster.max_runtime",
            f"{format_duration(config.cluster.max_runtime)} are more than the default quota of "
            f"{format_duration(DEFAULT_RUNTIME_SECONDS)}",
            "look at the account's quota in Service Quotas",
        )


def quota_findings(config: RunConfig, session: Any, region: str) -> Iterator[Finding]:
    """What the account does not allow.

    Raises:
        ClientError: Service Quotas refuses to say.
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
                "info", "cluster", f"no quota is called {name!r}", "look in the console"
            )
        elif amount > quota.value:
            yield _exceeded(quota, amount, warm, quota.request(amount, region))


def _exceeded(quota: Quota, amount: int, warm: str, fix: str) -> Finding:
    if quota.name == _RUNTIME:
        return RUNTIME_QUOTA.found(
            "error",
            "cluster.max_runtime",
            f"{format_duration(amount)} are more than the account's {format_duration(quota.value)}",
            fix,
        )
    message = f"{amount} instances are more than the account's {quota.value:g} ({quota.name})"
    if quota.name == warm:
        return WARM_POOL_QUOTA.found("warning", "cluster.keep_alive_period", message, fix)
    return INSTANCE_QUOTA.found("error", "cluster.instance_type", message, fix)


def instance_quotas(config: RunConfig) -> tuple[str, ...]:
    """The names of the quotas that count a job's instances; a training plan's are prepaid."""
    cluster = config.cluster
    if cluster.capacity == "training-plan":
        return ()
    spot = "spot " if cluster.capacity == "spot" else ""
    return (
        f"{cluster.instance_type} for {spot}training job usage",
        f"Maximum number of instances per {spot}training job",
        f"Number of instances across all {spot}training jobs",
    )


def read_quotas(client: Any, names: Iterable[str]) -> dict[str, Quota]:
    """The quotas called ``names``, of SageMaker's some thousands; reading ends with the last.

    Raises:
        ClientError: Service Quotas refuses to say.
    """
    missing, found = set(names), {}
    pages = client.get_paginator("list_service_quotas").paginate(
        ServiceCode="sagemaker", PaginationConfig={"MaxItems": 100 * _MOST_PAGES, "PageSize": 100}
    )
    for page in pages:
        for one in page["Quotas"]:
            if one["QuotaName"] in missing:
                missing.discard(one["QuotaName"])
                found[one["QuotaName"]] = Quota(one["QuotaName"], one["QuotaCode"], one["Value"])
        if not missing:
            break
    return found
