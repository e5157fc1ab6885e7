"""Send a packing job through the SageMaker SDK: build the Processor that sends exactly it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.entrypoints.storage.store import store_of
from sm_train.estimators.request.processing import ProcessingRequest
from sm_train.estimators.sdk.model_trainer import quiet_sdk, reject_drift, session_of

if TYPE_CHECKING:
    import boto3


def create_processing_job(
    request: ProcessingRequest,
    files: dict[str, bytes | Path],
    *,
    boto_session: boto3.Session,
    bucket: str,
) -> str:
    """Upload ``files`` (path below the staged inputs → content), create the job, return its name.

    Raises:
        RequestDriftError: the SDK would have sent another request; the job was not created.
        botocore.exceptions.ClientError: AWS refused.
    """
    # Register before any client is created: clients copy the session's event handlers.
    reject_drift(boto_session, request, "CreateProcessingJob")
    staged = request["ProcessingInputs"][0]["S3Input"]["S3Uri"].rpartition("/")[0]
    prefix = staged.removeprefix(f"s3://{bucket}/")
    store = store_of(boto_session)
    for name, content in files.items():
        if isinstance(content, bytes):
            store.put(bucket, f"{prefix}/{name}", content)
        else:
            store.upload(content, bucket, f"{prefix}/{name}")
    with quiet_sdk():
        _processor(request, session_of(boto_session, bucket)).run(
            inputs=_inputs(request), job_name=request["ProcessingJobName"], wait=False, logs=False
        )
    return request["ProcessingJobName"]


def _processor(request: ProcessingRequest, session: Any) -> Any:
    from sagemaker.core.network import NetworkConfig
    from sagemaker.core.processing import Processor

    cluster = request["ProcessingResources"]["ClusterConfig"]
    network = None
    if "NetworkConfig" in request:
        vpc = request["NetworkConfig"]["VpcConfig"]
        network = NetworkConfig(security_group_ids=vpc["SecurityGroupIds"], subnets=vpc["Subnets"])
    return Processor(
        role=request["RoleArn"],
        image_uri=request["AppSpecification"]["ImageUri"],
        entrypoint=request["AppSpecification"]["ContainerEntrypoint"],
        instance_type=cluster["InstanceType"],
        instance_count=cluster["InstanceCount"],
        volume_size_in_gb=cluster["VolumeSizeInGB"],
        max_runtime_in_seconds=request["StoppingCondition"]["MaxRuntimeInSeconds"],
        env=request["Environment"],
        tags=request["Tags"],
        network_config=network,
        sagemaker_session=session,
    )


def _inputs(request: ProcessingRequest) -> list[Any]:
    from sagemaker.core.shapes import ProcessingInput, ProcessingS3Input

    return [
        ProcessingInput(
            input_name=processing_input["InputName"],
            s3_input=ProcessingS3Input(
                s3_uri=processing_input["S3Input"]["S3Uri"],
                local_path=processing_input["S3Input"]["LocalPath"],
                s3_data_type=processing_input["S3Input"]["S3DataType"],
                s3_input_mode=processing_input["S3Input"]["S3InputMode"],
                s3_data_distribution_type=processing_input["S3Input"]["S3DataDistributionType"],
                s3_compression_type=processing_input["S3Input"]["S3CompressionType"],
            ),
        )
        for processing_input in request["ProcessingInputs"]
    ]
