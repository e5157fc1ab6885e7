"""A pack on SageMaker → the CreateProcessingJob request, as boto3 takes it: a pure function.

What the SDK sends is held against this on the wire, as a training request is.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sm_train.estimators.bundle.bundle import ARCHIVE_NAME
from sm_train.estimators.config.naming import ROLE_NOT_SET, staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.images import aws_image
from sm_train.estimators.request.launcher import FRAMEWORK

ProcessingRequest = dict[str, Any]
"""The keyword arguments of boto3's ``create_processing_job``."""

LONGEST_SECONDS = 5 * 24 * 3600
"""A processing job may run for five days (SageMaker quotas)."""

_INPUT = "/opt/ml/processing/input"
_START = (
    f"mkdir -p /tmp/code && tar xzf {_INPUT}/code/{ARCHIVE_NAME} -C /tmp/code && cd /tmp/code && "
    "pip install -q -r requirements.txt && python -m sm_train.entrypoints.packing.processing_job"
)


@dataclass(frozen=True)
class PackingJob:
    """``destination`` is an S3 prefix; ``volume_gb`` of disk hold the code and little else.

    A ``model`` that computes latents is staged beside the code.
    """

    destination: str
    instance_type: str
    instances: int
    model: bool = False
    volume_gb: int = 50


def instance_types() -> list[str]:
    """The instance types that Processing knows, by botocore's own service model."""
    from botocore.loaders import Loader

    model = Loader().load_service_model("sagemaker", "service-2")
    names: list[str] = model["shapes"]["ProcessingInstanceType"]["enum"]
    return names


def processing_image(instance_type: str, region: str) -> str:
    """AWS's PyTorch image, which has Python, Pillow and boto3, for a CPU or a GPU instance.

    Raises:
        ValueError: AWS has no such image in the region.
    """
    return aws_image(FRAMEWORK, instance_type, region)


def processing_request(
    config: RunConfig, job: PackingJob, *, region: str, image: str, now: datetime
) -> ProcessingRequest:
    """The request of one pack; the job's name carries ``now`` to the second."""
    name = f"{config.name}-pack-{now:%Y%m%d%H%M%S}"
    staged = f"s3://{staging_bucket(config, region)}/{config.name}/{name}/input"
    request: ProcessingRequest = {
        "ProcessingJobName": name,
        "ProcessingInputs": [
            _input(one, staged) for one in ("code", "plan", *(["model"] if job.model else []))
        ],
        "ProcessingResources": {
            "ClusterConfig": {
                "InstanceType": job.instance_type,
                "InstanceCount": job.instances,
                "VolumeSizeInGB": job.volume_gb,
            }
        },
        "StoppingCondition": {
            "MaxRuntimeInSeconds": min(config.cluster.max_runtime, LONGEST_SECONDS)
        },
        "AppSpecification": {
            "ImageUri": image,
            "ContainerEntrypoint": ["/bin/bash", "-c", _START],
        },
        "Environment": {
            "SM_TRAIN_DESTINATION": job.destination,
            "AWS_DEFAULT_REGION": region,
            "PYTHONUNBUFFERED": "1",
        },
        "RoleArn": config.role or ROLE_NOT_SET,
        "Tags": [
            {"Key": key, "Value": value}
            for key, value in {**config.tags, "sm-train:run": config.name}.items()
        ],
    }
    if config.cluster.vpc:
        request["NetworkConfig"] = {
            "EnableNetworkIsolation": False,
            "VpcConfig": {
                "SecurityGroupIds": config.cluster.vpc.security_groups,
                "Subnets": config.cluster.vpc.subnets,
            },
        }
    return request


def _input(name: str, staged: str) -> dict[str, Any]:
    return {
        "InputName": name,
        "S3Input": {
            "S3Uri": f"{staged}/{name}",
            "LocalPath": f"{_INPUT}/{name}",
            "S3DataType": "S3Prefix",
            "S3InputMode": "File",
            "S3DataDistributionType": "FullyReplicated",
            "S3CompressionType": "None",
        },
    }
