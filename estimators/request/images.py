"""Select the container image of a run: AWS's, from the SDK's table, or the user's own."""

from __future__ import annotations

import re
from importlib.resources import files

from sm_train.cost.instances import instance_type, is_own_machine
from sm_train.entrypoints.base.pip_install import USER_REQUIREMENTS, install_command
from sm_train.entrypoints.job_interface.job_config import major_minor
from sm_train.estimators.bundle.bundle import job_requirements
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.image_table import training_image
from sm_train.estimators.request.launch_plan import (
    DEFAULT_PYTORCH,
    framework_version,
    pytorch_version,
)

_ECR = re.compile(r"^\d{12}\.dkr\.ecr(-fips)?\.[a-z0-9-]+\.(amazonaws\.com|on\.aws)(\.cn)?/")

_AMAZON_LINUX = (2, 11)
"""First PyTorch whose AWS images use Amazon Linux and have their own table (sagemaker 3.27)."""


def image_uri(config: RunConfig, region: str) -> str:
    """Return the run file's image, or AWS's PyTorch image from the SDK's table.

    Raises:
        ValueError: AWS has no such image in the region or for the instance type, or SageMaker
            cannot pull the run file's image.
    """
    for name in config.cluster.instance_types:
        if obstacle := instance_type(name).obstacle:
            own = is_own_machine(name)
            fix = "`sm-train manifest` starts it" if own else "choose another GPU type"
            raise ValueError(f"cluster.instance_type: {name} {obstacle}; {fix}")
    version = framework_version(config)
    if version is None:
        image = config.cluster.image
        assert image is not None
        if in_ecr(image) or config.cluster.vpc:
            return image
        raise ValueError(
            f"cluster.image: {image} is not in Amazon ECR; push it to "
            "ACCOUNT.dkr.ecr.REGION.amazonaws.com, or set cluster.vpc: SageMaker pulls from "
            "another registry only through the job's own network"
        )
    return aws_image(version, config.cluster.instance_type, region)


def in_ecr(image: str) -> bool:
    """Return whether SageMaker pulls ``image`` from Amazon ECR, not from a private registry."""
    return _ECR.match(image) is not None


def aws_image(version: str, instance: str, region: str) -> str:
    """Return AWS's training image with PyTorch ``version`` for the instance type.

    Raises:
        ValueError: AWS has none in the region.
    """
    framework = "pytorch"
    if major_minor(version) >= _AMAZON_LINUX:
        framework, version = "pytorch-amzn2023", ".".join(map(str, major_minor(version)))
    image = training_image(framework, version, region, instance)
    if image is not None:
        return image
    try:
        from sagemaker.core import image_uris
    except ModuleNotFoundError:
        raise ValueError(
            f"cluster.framework_version or region: no image of PyTorch {version} for {instance} in "
            f"{region} is known here; {install_command('aws')} looks in the SageMaker SDK"
        ) from None
    try:
        uri: str = image_uris.retrieve(
            framework,
            region=region,
            version=version,
            instance_type=instance,
            image_scope="training",
        )
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"cluster.framework_version or region: {reason}") from None
    return uri


def dockerfile(config: RunConfig, region: str, packages: tuple[str, ...] = ()) -> str:
    """Return a Dockerfile that installs all packages, so that no job start waits for pip.

    ``packages`` are those of the user code.

    Raises:
        ValueError: AWS has no base image.
    """
    version = pytorch_version(config) or DEFAULT_PYTORCH
    base = aws_image(version, config.cluster.instance_type, region)
    pinned = [
        line
        for line in job_requirements(config, version).splitlines()
        if not line.lstrip().startswith("#")
    ]
    text = (files("sm_train.estimators") / "data" / "Dockerfile").read_text(encoding="utf-8")
    return (
        text.replace("@BASE@", base)
        .replace("@REGISTRY@", base.split("/")[0])
        .replace("@REGION@", region)
        .replace("@ACCOUNT@", config.role.split(":")[4] if config.role else "ACCOUNT")
        .replace("@PACKAGES@", "\n".join(pinned))
        .replace("@USER_PACKAGES@", _install_user_packages(packages))
    )


def _install_user_packages(packages: tuple[str, ...]) -> str:
    """Return the instructions that install the user's packages, which have no hashes."""
    if not packages:
        return ""
    lines = "\n".join(packages)
    return (
        f"\nCOPY <<'PACKAGES' /tmp/{USER_REQUIREMENTS}\n{lines}\nPACKAGES\n"
        f"RUN pip install --no-cache-dir -r /tmp/{USER_REQUIREMENTS}\n"
    )
