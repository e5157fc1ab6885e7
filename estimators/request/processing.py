"""Turn a processing job into the CreateProcessingJob request, as boto3 takes it: a pure function.

What the SDK sends is compared with it on the wire, as with a training request.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from sm_train.entrypoints.storage.bucket_settings import ACCOUNT_VARIABLE, bucket_variables
from sm_train.estimators.bundle.bundle import ARCHIVE_NAME
from sm_train.estimators.config.naming import ROLE_NOT_SET, staging_bucket
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.images import aws_image
from sm_train.estimators.request.launch_plan import DEFAULT_PYTORCH
from sm_train.estimators.request.training_request import package_index_variables

if TYPE_CHECKING:
    from types_boto3_sagemaker.literals import ProcessingInstanceTypeType
    from types_boto3_sagemaker.type_defs import (
        CreateProcessingJobRequestTypeDef,
        ProcessingInputTypeDef,
    )

    ProcessingRequest: TypeAlias = CreateProcessingJobRequestTypeDef
    """The keyword arguments of boto3's ``create_processing_job``."""
else:
    ProcessingRequest = dict

INDEX_INSTANCE = "ml.c7i.8xlarge"
"""Instance type of jobs that index shards, unless another one is named."""

MAX_SECONDS = 5 * 24 * 3600
"""Maximum duration of a processing job (SageMaker quotas)."""

_INPUT = "/opt/ml/processing/input"
_START = (
    f"mkdir -p /tmp/code && tar xzf {_INPUT}/code/{ARCHIVE_NAME} -C /tmp/code && cd /tmp/code && "
    "python -m sm_train.entrypoints.base.pip_install{more} && "
    "python -m {module}"
)

WorkName = Literal["pack", "enrich", "index"]

_MODULES: dict[WorkName, str] = {
    "pack": "sm_train.entrypoints.data_prep.packing.processing_job",
    "enrich": "sm_train.entrypoints.data_prep.enrichment.enrichment_job",
    "index": "sm_train.entrypoints.data_prep.indexing.indexing_job",
}
"""Entry points of processing jobs."""

CONVERT_REQUIREMENTS = "requirements-convert.txt"
"""File of the bundle with what `pack --convert` needs besides the job's requirements."""


def convert_requirements() -> bytes:
    """Return the content of :data:`CONVERT_REQUIREMENTS`."""
    return (files("sm_train.estimators") / "data" / CONVERT_REQUIREMENTS).read_bytes()


InputName = Literal["code", "model"]


@dataclass(frozen=True)
class ProcessingJob:
    """What a job does, the S3 prefix that it writes to, and its instances.

    ``with_model`` stages a model. ``requirements`` are files of the bundle with packages to install
    besides the job's own. The disk of ``volume_gb`` holds little but the code and the model.
    """

    work: WorkName
    destination: str
    instance_type: str
    instances: int
    with_model: bool = False
    requirements: tuple[str, ...] = ()
    volume_gb: int = 50


def processing_instance_types() -> list[str]:
    """Return the instance types of Processing, from botocore's service model."""
    from botocore.loaders import Loader

    model = Loader().load_service_model("sagemaker", "service-2")
    names: list[str] = model["shapes"]["ProcessingInstanceType"]["enum"]
    return names


def processing_image(instance_type: str, region: str) -> str:
    """Return AWS's PyTorch image, which has Python, Pillow and boto3, for the instance type.

    Raises:
        ValueError: AWS has no such image in the region.
    """
    return aws_image(DEFAULT_PYTORCH, instance_type, region)


def processing_request(
    config: RunConfig, job: ProcessingJob, *, region: str, image: str, now: datetime
) -> ProcessingRequest:
    """Return the request of a job, whose name ends in ``now`` to the second."""
    name = f"{config.name}-{job.work}-{now:%Y%m%d%H%M%S}"
    staged = f"s3://{staging_bucket(config, region)}/{config.name}/{name}/input"
    more = "".join(f" {name}" for name in job.requirements)
    start = _START.format(more=more, module=_MODULES[job.work])
    inputs: list[InputName] = ["code"]
    if job.with_model:
        inputs.append("model")
    request: ProcessingRequest = {
        "ProcessingJobName": name,
        "ProcessingInputs": [_input(input_name, staged) for input_name in inputs],
        "ProcessingResources": {
            "ClusterConfig": {
                "InstanceType": _instance_type(job.instance_type),
                "InstanceCount": job.instances,
                "VolumeSizeInGB": job.volume_gb,
            }
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": min(config.cluster.max_runtime, MAX_SECONDS)},
        "AppSpecification": {
            "ImageUri": image,
            "ContainerEntrypoint": ["/bin/bash", "-c", start],
        },
        "Environment": {
            "SM_TRAIN_DESTINATION": job.destination,
            "AWS_DEFAULT_REGION": region,
            ACCOUNT_VARIABLE: (config.role or ROLE_NOT_SET).split(":")[4],
            **bucket_variables(config.bucket_owners, config.bucket_keys),
            **package_index_variables(config.cluster),
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


def _instance_type(name: str) -> ProcessingInstanceTypeType:
    return cast("ProcessingInstanceTypeType", name)


def _input(name: InputName, staged: str) -> ProcessingInputTypeDef:
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
