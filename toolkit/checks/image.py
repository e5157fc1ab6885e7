"""Checks the container image: that it exists, what it includes, and its environment variables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING

from sm_train.cost.instances import instance_type
from sm_train.entrypoints.job_interface.job_config import major_minor
from sm_train.estimators.config.cluster import SMDDP_PYTORCH
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.images import image_uri
from sm_train.estimators.request.launch_plan import (
    DEFAULT_PYTORCH,
    choose_route,
    framework_version,
)
from sm_train.toolkit.checks.finding import Check, Finding

if TYPE_CHECKING:
    import boto3
    from types_boto3_ecr.type_defs import ImageIdentifierTypeDef

IMAGE_UNAVAILABLE = Check("image-unavailable", ("error",))
IMAGE_REGION = Check("image-region", ("error",))
IMAGE_ABSENT = Check("image-absent", ("error",))
IMAGE_UNPROVEN = Check("image-unproven", ("warning",))
SMDDP_TRADEOFF = Check("smddp-tradeoff", ("info",))
SMDDP_UNUSED = Check("smddp-unused", ("info",))
FRAMEWORK_UNPATCHED = Check("framework-unpatched", ("warning", "info"))
FRAMEWORK_VULNERABLE = Check("framework-vulnerable", ("warning", "info"))
GPU_TOO_OLD = Check("gpu-too-old", ("error",))
ENVIRONMENT_DEPRECATED = Check("environment-deprecated", ("warning",))

# Last patch dates of AWS's PyTorch training images, from the sources of FRAMEWORK_UNPATCHED. For
# 2.3 to 2.5 the dates come from the DLAMI table, which has the same rule: a year after the release.
# 2.14 is in the SDK's table of images, but its date was not published when these were read.
_END_OF_PATCH = {
    "2.3": date(2025, 4, 24),
    "2.4": date(2025, 7, 24),
    "2.5": date(2025, 11, 24),
    "2.6": date(2026, 1, 29),
    "2.7": date(2026, 4, 23),
    "2.8": date(2026, 8, 6),
    "2.9": date(2026, 10, 15),
    "2.10": date(2027, 1, 21),
    "2.11": date(2027, 4, 30),
    "2.12": date(2027, 7, 2),
    "2.13": date(2027, 7, 20),
}
_LOAD_VULNERABILITIES = (((2, 6), "CVE-2025-32434"), ((2, 10), "CVE-2026-24747"))
"""First version without a vulnerability of torch.load, in ascending order."""

_FIRST_WITH_CUDA_13 = (2, 9)
_NOTICE = timedelta(days=92)
"""Three months, in which to test a run with another image."""

_RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
}
_HARMFUL_ON_EFA = ("RDMAV_FORK_SAFE", "NCCL_MIN_CHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_BUFFSIZE")

_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?/"
    r"(?P<repository>[^:@]+)(:(?P<tag>[^@]+))?(@(?P<digest>.+))?"
)


@dataclass(frozen=True)
class EcrImage:
    """An image address in ECR, parsed."""

    account: str
    region: str
    repository: str
    tag: str | None
    digest: str | None


def ecr_image(address: str) -> EcrImage | None:
    """Parse an ECR address; return None for other registries."""
    match = _ECR.fullmatch(address)
    return EcrImage(**match.groupdict()) if match else None


def image_findings(config: RunConfig, region: str, today: date) -> Iterator[Finding]:
    """Check the image by the run file and the SDK's table of images, without calling AWS."""
    yield from _deprecated_environment(config)
    if config.cluster.is_own_machine:
        return  # the manifest checks its image
    yield from _unavailable_image(config, region)
    if config.cluster.image is not None:
        yield from _custom_image(config, config.cluster.image, region)
        return
    yield from _unsupported_gpu(config)
    yield from _smddp(config, today)
    yield from _unpatched_framework(config, today)
    yield from _vulnerable_framework(config)


def _unavailable_image(config: RunConfig, region: str) -> Iterator[Finding]:
    try:
        image_uri(config, region)
    except ValueError as error:
        where, _, reason = " ".join(str(error).split()).partition(": ")
        problem, _, fix = reason.partition("; ")
        fix = fix or "set another version, or remove it"
        yield IMAGE_UNAVAILABLE.found("error", where, problem, fix)


def _unsupported_gpu(config: RunConfig) -> Iterator[Finding]:
    version = framework_version(config) or ""
    if major_minor(version) < _FIRST_WITH_CUDA_13:
        return
    for name in config.cluster.instance_types:
        if instance_type(name).accelerator.startswith("V100"):
            yield GPU_TOO_OLD.found(
                "error",
                "cluster.instance_type",
                f"the image of PyTorch {version} has CUDA 13, which does not support the V100 of "
                f"{name}",
                "set framework_version: 2.6.0, or another instance type",
            )


def _custom_image(config: RunConfig, address: str, region: str) -> Iterator[Finding]:
    image = ecr_image(address)
    if image is not None and image.region != region:
        yield IMAGE_REGION.found(
            "error",
            "cluster.image",
            f"{address} is in {image.region}, but the job would run in {region}",
            f"push it to {region}, or run there",
        )
    requirements = []
    if config.cluster.backend == "smddp":
        requirements.append("SMDDP and SageMaker's training toolkit (backend: smddp)")
    if any(stage.sharding != "none" for stage in config.stages):
        requirements.append("PyTorch 2.6 or newer (sharding)")
    if config.cluster.network_isolation:
        # Elsewhere the tracker's process installs them.
        requirements += [f"{tracker.name} (trackers)" for tracker in config.trackers.job_config()]
    for requirement in requirements:
        yield IMAGE_UNPROVEN.found(
            "warning",
            "cluster.image",
            f"cannot verify that the image includes {requirement}",
            "test it on one instance, or use an AWS image",
        )


def _smddp(config: RunConfig, today: date) -> Iterator[Finding]:
    """Report what SMDDP and NCCL would gain and cost, where a run may choose."""
    cluster = config.cluster
    if cluster.backend == "nccl" or not instance_type(cluster.instance_type).supports_smddp:
        return
    several = any(stage.instances > 1 for stage in config.stages)
    if cluster.backend == "smddp" and not several:
        yield SMDDP_UNUSED.found(
            "info",
            "cluster.backend",
            "SMDDP is requested, but every stage has one instance",
            "remove backend: smddp",
        )
    elif cluster.backend == "smddp":
        version = framework_version(config) or ""
        end = _end_of_patch(version)
        unpatched = f", which AWS has not patched since {end}" if end and today > end else ""
        yield SMDDP_TRADEOFF.found(
            "info",
            "cluster.backend",
            f"SMDDP runs on the image of PyTorch {version}{unpatched}; NCCL would run on "
            f"{DEFAULT_PYTORCH}",
            "measure both, or set backend: nccl for the newest image",
        )
    elif several and all(stage.sharding == "none" for stage in config.stages):
        yield SMDDP_TRADEOFF.found(
            "info",
            "cluster.backend",
            f"auto is NCCL on PyTorch {framework_version(config)}; on {cluster.instance_type} "
            f"SMDDP may be faster, on the older image of PyTorch {SMDDP_PYTORCH}",
            "measure backend: smddp; backend: nccl turns this message off",
        )


def _end_of_patch(version: str) -> date | None:
    return _END_OF_PATCH.get(".".join(version.split(".")[:2]))


def _unpatched_framework(config: RunConfig, today: date) -> Iterator[Finding]:
    version = framework_version(config) or ""
    if any(choose_route(config, stage)[0] == "smddp" for stage in config.stages):
        return  # smddp-tradeoff says it: a later version would have no SMDDP
    end = _end_of_patch(version)
    if end is not None and today <= end - _NOTICE:
        return
    if end is None:
        message = f"it is not known until when AWS patches its images of PyTorch {version}"
    elif today <= end:
        message = f"AWS patches its images of PyTorch {version} until {end}"
    else:
        message = f"AWS has not patched its images of PyTorch {version} since {end}"
    fix = f"set {DEFAULT_PYTORCH}, or remove it"
    if config.cluster.framework_version is None:
        fix = "update sm-train, or set a later version"
    yield FRAMEWORK_UNPATCHED.found(
        "info" if end is None else "warning", "cluster.framework_version", message, fix
    )


def _vulnerable_framework(config: RunConfig) -> Iterator[Finding]:
    version = framework_version(config) or ""
    known = [name for fixed, name in _LOAD_VULNERABILITIES if major_minor(version) < fixed]
    if known:
        yield FRAMEWORK_VULNERABLE.found(
            "info" if config.code is None else "warning",
            "cluster.framework_version",
            f"torch.load of PyTorch {version} runs code from crafted files ({', '.join(known)})",
            "load safetensors only, which sm-train does, or set 2.10.0 or later",
        )


def _deprecated_environment(config: RunConfig) -> Iterator[Finding]:
    cluster = config.cluster
    for name in sorted(cluster.environment):
        where = f"cluster.environment.{name}"
        if name in _RENAMED:
            yield ENVIRONMENT_DEPRECATED.found(
                "warning",
                where,
                "PyTorch has renamed this variable",
                f"rename it to {_RENAMED[name]}",
            )
        elif name in _HARMFUL_ON_EFA and instance_type(cluster.instance_type).supports_efa:
            yield ENVIRONMENT_DEPRECATED.found(
                "warning", where, "should not be set on EFA (AWS's guide)", "remove it"
            )


def registry_findings(config: RunConfig, session: boto3.Session, region: str) -> Iterator[Finding]:
    """Check that ECR has the run file's custom image.

    Raises:
        ClientError: ECR rejects the request.
    """
    from botocore.exceptions import ClientError

    address = config.cluster.image or ""
    image = ecr_image(address)
    if image is None or image.region != region:
        return
    image_id: ImageIdentifierTypeDef = (
        {"imageDigest": image.digest} if image.digest else {"imageTag": image.tag or "latest"}
    )
    try:
        session.client("ecr").describe_images(
            registryId=image.account, repositoryName=image.repository, imageIds=[image_id]
        )
    except ClientError as error:
        if error.response["Error"]["Code"] not in (
            "RepositoryNotFoundException",
            "ImageNotFoundException",
        ):
            raise
        message = error.response["Error"]["Message"]
        yield IMAGE_ABSENT.found("error", "cluster.image", message, "push it, or name another")
