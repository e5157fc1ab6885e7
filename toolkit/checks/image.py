"""The container: whether there is such an image, what it carries, what its variables do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any

from sm_train.cost.instances import instance_type
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.images import image_uri
from sm_train.estimators.request.launcher import choose_route, framework_version
from sm_train.toolkit.checks.finding import Check, Finding

IMAGE_UNAVAILABLE = Check(
    "image-unavailable",
    ("error",),
    means="AWS has no PyTorch training image of this version for the instance type in this region, "
    "by the SageMaker SDK's table.",
    impact="`submit` cannot make a request.",
    fix="Write another `framework_version`, or leave it out: the newest image that fits is taken.",
    source="sagemaker 3.27, image_uri_config/pytorch.json",
)
IMAGE_REGION = Check(
    "image-region",
    ("error",),
    means="`cluster.image` lies in the registry of another region than the job's.",
    impact="SageMaker pulls images from its own region's registry; the job fails before it trains.",
    fix="Push the image to the job's region (ECR can replicate), or run in the image's.",
    source="SageMaker API reference, ContainerDefinition: image and job in one region (2026-11)",
)
IMAGE_ABSENT = Check(
    "image-absent",
    ("error",),
    means="ECR has no such repository, tag or digest.",
    impact="The job fails when machines have been waited for.",
    fix="Push the image, or name one that is there.",
)
IMAGE_UNPROVEN = Check(
    "image-unproven",
    ("warning",),
    means="The run needs something of its own image that no description tells: SMDDP and the "
    "SageMaker training toolkit for `backend: smddp`, or PyTorch 2.6 for `sharding`.",
    impact="Without them the job fails in its first minutes, on all machines.",
    fix="Try the image on one instance first, or take AWS's own.",
)
SMDDP_UNUSED = Check(
    "smddp-unused",
    ("info",),
    means="The machines could sum gradients by SMDDP, and the run will not: its image is without "
    "it, its stages have one instance each, or they are sharded. Or the run file asks for SMDDP "
    "and no stage can use it.",
    impact="NCCL over EFA instead of SMDDP's all-reduce: some throughput on several A100 "
    "instances, none on one.",
    fix="Leave `framework_version` out for the last image with SMDDP, PyTorch 2.3.0; or write "
    "`backend: nccl` to say that it is meant.",
    source="SageMaker developer guide, SMDDP: supported frameworks (2024-10)",
)
FRAMEWORK_UNPATCHED = Check(
    "framework-unpatched",
    ("warning", "info"),
    means="AWS does not patch its images of this PyTorch any more. An info where SMDDP needs it: "
    "no later image carries SMDDP.",
    impact="Nothing today; security updates and fixes of the EFA and NCCL libraries do not come.",
    fix="Write a later `framework_version`; where SMDDP holds the run back, `backend: nccl`.",
    source="https://aws.github.io/deep-learning-containers/reference/support_policy and the DLAMI "
    "support policy table (2026-11)",
)
ENVIRONMENT_DEPRECATED = Check(
    "environment-deprecated",
    ("warning",),
    means="`cluster.environment` sets a variable that PyTorch has renamed, or that AWS's guide for "
    "EFA says not to set.",
    impact="A renamed one is read for the time being, with a warning of every process; "
    "`RDMAV_FORK_SAFE` can break processes that fork, and channel and buffer sizes of other "
    "machines slow the all-reduce down.",
    fix="Take it out, or write the name that the finding gives.",
    source="PyTorch, ProcessGroupNCCL.hpp; "
    "awsome-distributed-training, 1.architectures/efa-cheatsheet.md (2026-11)",
)

# End of patch of AWS's PyTorch training images, by the support policy that the page names. Of
# 2.3 to 2.5 it is the AMIs' table, which has the same rule: a year after PyTorch's own release.
_END_OF_PATCH = {
    "2.3": date(2025, 4, 24),
    "2.4": date(2025, 7, 24),
    "2.5": date(2025, 11, 24),
    "2.6": date(2026, 1, 29),
    "2.7": date(2026, 4, 23),
    "2.8": date(2026, 8, 6),
    "2.9": date(2026, 10, 15),
    "2.10": date(2027, 1, 21),
}

_RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
}
_NOT_ON_EFA = ("RDMAV_FORK_SAFE", "NCCL_MIN_CHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_BUFFSIZE")

_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?/"
    r"(?P<repository>[^:@]+)(:(?P<tag>[^@]+))?(@(?P<digest>.+))?"
)


@dataclass(frozen=True)
class EcrImage:
    """Where an image lies in ECR."""

    account: str
    region: str
    repository: str
    tag: str | None
    digest: str | None


def ecr_image(address: str) -> EcrImage | None:
    """The parts of an ECR address; None where it is another registry's."""
    match = _ECR.fullmatch(address)
    return EcrImage(**match.groupdict()) if match else None


def image_findings(config: RunConfig, region: str, today: date) -> Iterator[Finding]:
    """What the run file and the SDK's table say of the image."""
    yield from _environment(config)
    if config.cluster.image is not None:
        yield from _own_image(config, config.cluster.image, region)
        return
    yield from _unavailable(config, region)
    yield from _smddp(config)
    yield from _patched(config, today)


def _unavailable(config: RunConfig, region: str) -> Iterator[Finding]:
    try:
        image_uri(config, region)
    except ValueError as error:
        reason = " ".join(str(error).split())
        yield IMAGE_UNAVAILABLE.found(
            "error", "cluster.framework_version", reason, "write another version, or none"
        )


def _own_image(config: RunConfig, address: str, region: str) -> Iterator[Finding]:
    image = ecr_image(address)
    if image is not None and image.region != region:
        yield IMAGE_REGION.found(
            "error",
            "cluster.image",
            f"{address} is in {image.region} and the job would run in {region}",
            f"push it to {region}, or run there",
        )
    needs = []
    if config.cluster.backend == "smddp":
        needs.append("SMDDP and SageMaker's training toolkit (backend: smddp)")
    if any(stage.sharding != "none" for stage in config.stages):
        needs.append("PyTorch 2.6 or newer (sharding)")
    for need in needs:
        yield IMAGE_UNPROVEN.found(
            "warning",
            "cluster.image",
            f"nothing says whether it carries {need}",
            "try it on one instance, or take AWS's image",
        )


def _smddp(config: RunConfig) -> Iterator[Finding]:
    """Where SMDDP could be and is not, or is asked for and nothing comes of it."""
    cluster = config.cluster
    if cluster.backend == "nccl" or not instance_type(cluster.instance_type).supports_smddp:
        return
    routes = [choose_route(config, stage) for stage in config.stages]
    if any(route == "smddp" for route, _ in routes):
        return
    several = [index for index, stage in enumerate(config.stages) if stage.instances > 1]
    if not several and cluster.backend == "auto":
        return
    yield SMDDP_UNUSED.found(
        "info",
        "cluster.backend",
        f"{cluster.instance_type} could use SMDDP: {routes[several[0] if several else 0][1]}",
        "write backend: nccl if that is meant",
    )


def _patched(config: RunConfig, today: date) -> Iterator[Finding]:
    version = framework_version(config) or ""
    end = _END_OF_PATCH.get(".".join(version.split(".")[:2]))
    if end is None or today <= end:
        return
    smddp = any(choose_route(config, stage)[0] == "smddp" for stage in config.stages)
    yield FRAMEWORK_UNPATCHED.found(
        "info" if smddp else "warning",
        "cluster.framework_version",
        f"AWS has not patched its images of PyTorch {version} since {end}"
        + ("; no later one carries SMDDP" if smddp else ""),
        "backend: nccl takes the newest image" if smddp else "write a later version, or none",
    )


def _environment(config: RunConfig) -> Iterator[Finding]:
    cluster = config.cluster
    for name in sorted(cluster.environment):
        where = f"cluster.environment.{name}"
        if name in _RENAMED:
            yield ENVIRONMENT_DEPRECATED.found(
                "warning", where, "is a name that PyTorch has given up", f"write {_RENAMED[name]}"
            )
        elif name in _NOT_ON_EFA and instance_type(cluster.instance_type).supports_efa:
            yield ENVIRONMENT_DEPRECATED.found(
                "warning", where, "is not to be set on EFA (AWS's guide)", "take it out"
            )


def registry_findings(config: RunConfig, session: Any, region: str) -> Iterator[Finding]:
    """Whether ECR has the run file's own image.

    Raises:
        ClientError: ECR refuses to say.
    """
    from botocore.exceptions import ClientError

    address = config.cluster.image or ""
    image = ecr_image(address)
    if image is None or image.region != region:
        return
    number = {"imageDigest": image.digest} if image.digest else {"imageTag": image.tag or "latest"}
    try:
        session.client("ecr").describe_images(
            registryId=image.account, repositoryName=image.repository, imageIds=[number]
        )
    except ClientError as error:
        if error.response["Error"]["Code"] not in (
            "RepositoryNotFoundException",
            "ImageNotFoundException",
        ):
            raise
        message = error.response["Error"]["Message"]
        yield IMAGE_ABSENT.found("error", "cluster.image", message, "push it, or name another")
