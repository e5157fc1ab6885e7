"""Sends a request through the real SDK: builds the ModelTrainer that sends exactly that body.

The SDK stages the bundle and its own scripts below the bucket, in a folder stamped with its own
clock; everything else must equal the request that was shown. That is checked on the wire, before
the call leaves: a difference stops the submission.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError
from sm_train.estimators.bundle.bundle import ARCHIVE_NAME, LAUNCHER, Bundle
from sm_train.estimators.bundle.user_code import REQUIREMENTS
from sm_train.estimators.config.naming import code_prefix
from sm_train.estimators.request.training import TrainingRequest, code_uri, start_arguments

_STAMP = re.compile(r"-\d{14}(?=$|/)")


class RequestDriftError(RuntimeError):
    """The SDK was about to send something else than what was shown and agreed to."""


@contextmanager
def quiet_sdk() -> Iterator[None]:
    """Turn off the SDK's telemetry, its role check and any defaults that would add to the request.

    All are read from environment variables, at the moment a session or trainer is made.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        opt_out = {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}
        config.write_text(json.dumps({"SchemaVersion": "1.0", "SageMaker": opt_out}))
        overrides = {
            # The check needs iam:SimulatePrincipalPolicy, which few laptops may call.
            "SAGEMAKER_VALIDATE_ROLE": "false",
            "SAGEMAKER_ADMIN_CONFIG_OVERRIDE": str(config),
            "SAGEMAKER_USER_CONFIG_OVERRIDE": str(config),
        }
        before = {name: os.environ.get(name) for name in overrides}
        os.environ.update(overrides)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def send(
    request: TrainingRequest,
    bundle: Bundle,
    *,
    boto_session: Any,
    bucket: str,
    before: Callable[[TrainingRequest], None] = lambda sent: None,
) -> None:
    """Create the training job of ``request``.

    ``before`` is told of it as it is about to be sent, with the place of its code; where it raises,
    nothing is started.

    Raises:
        RequestDriftError: the SDK would have sent another request; nothing was started.
        botocore.exceptions.ClientError: AWS refused.
    """
    sent: TrainingRequest = {}

    def about_to_send(params: TrainingRequest, **_: Any) -> None:
        before(params)
        sent.update(params)

    # Before any client is made: clients copy the session's event handlers.
    refuse_drift(boto_session, request, "CreateTrainingJob")
    boto_session.events.register("provide-client-params.sagemaker.CreateTrainingJob", about_to_send)
    with quiet_sdk(), tempfile.TemporaryDirectory() as folder:
        from sagemaker.core.helper.session_helper import Session

        archive = Path(folder) / ARCHIVE_NAME
        archive.write_bytes(bundle.archive)
        session = Session(boto_session=boto_session, default_bucket=bucket)
        smddp = "ContainerEntrypoint" not in request["AlgorithmSpecification"]
        if smddp:
            _upload(code_uri(request) or "", archive, session)
        source = {} if smddp else _source(archive, bundle)
        trainer = _model_trainer(request, session, source)
        try:
            trainer.train(wait=False, logs=False)
        except ClientError as error:
            if not _answer_was_lost(error, sent, boto_session):
                raise


def _answer_was_lost(error: ClientError, sent: TrainingRequest, boto_session: Any) -> bool:
    """Whether AWS refuses a name because this very request was accepted in an earlier try."""
    if error.response["Error"]["Code"] != "ResourceInUse" or not sent:
        return False
    client = boto_session.client("sagemaker")
    there = client.describe_training_job(TrainingJobName=sent["TrainingJobName"])
    # Both name the place of the code, which is this submission's own.
    fields = ("InputDataConfig", "HyperParameters")
    return all(there[key] == sent[key] for key in fields)


def _upload(uri: str, archive: Path, session: Any) -> None:
    bucket, key = uri.removeprefix("s3://").split("/", 1)
    session.upload_data(str(archive), bucket=bucket, key_prefix=key.rsplit("/", 1)[0])


def _source(archive: Path, bundle: Bundle) -> dict[str, Any]:
    """What makes the SDK stage the bundle and start it."""
    from sagemaker.core.training.configs import SourceCode

    packages = any(file.path == REQUIREMENTS for file in bundle.files)
    source = SourceCode(
        source_dir=str(archive),
        command=launch_command(bundle.entry),
        requirements=REQUIREMENTS if packages else None,
    )
    return {"source_code": source}


def _model_trainer(request: TrainingRequest, session: Any, source: dict[str, Any]) -> Any:
    """The SDK's trainer, every setting taken from the request."""
    from sagemaker.core.training.configs import (
        CheckpointConfig,
        InfraCheckConfig,
        MetricDefinition,
        OutputDataConfig,
        RemoteDebugConfig,
        RetryStrategy,
        StoppingCondition,
        Tag,
    )

    algorithm = request["AlgorithmSpecification"]
    trainer = pinned_trainer_class(request)(
        sagemaker_session=session,
        role=request["RoleArn"],
        base_job_name=request["HyperParameters"]["stage"],
        input_s3_key_prefix=code_prefix(_run_name(request)),
        training_image=algorithm["TrainingImage"],
        training_input_mode=algorithm["TrainingInputMode"],
        compute=_compute(request),
        networking=_networking(request),
        stopping_condition=StoppingCondition(**_snake(request["StoppingCondition"])),
        output_data_config=OutputDataConfig(**_snake(request["OutputDataConfig"])),
        checkpoint_config=CheckpointConfig(**_snake(request["CheckpointConfig"])),
        input_data_config=_channels(request, staged_by_sdk=bool(source)),
        environment=request["Environment"],
        hyperparameters=request["HyperParameters"],
        tags=[Tag(key=tag["Key"], value=tag["Value"]) for tag in request["Tags"]],
        **source,
    ).with_metric_definitions(
        [MetricDefinition(**_snake(metric)) for metric in algorithm["MetricDefinitions"]]
    )
    if "RetryStrategy" in request:
        trainer.with_retry_strategy(RetryStrategy(**_snake(request["RetryStrategy"])))
    if "RemoteDebugConfig" in request:
        trainer.with_remote_debug_config(RemoteDebugConfig(**_snake(request["RemoteDebugConfig"])))
    if "InfraCheckConfig" in request:
        trainer.with_infra_check_config(InfraCheckConfig(**_snake(request["InfraCheckConfig"])))
    return trainer


def launch_command(entry: str) -> str:
    """What the SDK's start script runs: the launcher with ``entry``, in the place of the shell.

    So SIGTERM reaches it; under the SDK's Torchrun driver (3.27) it would not. Which stage it is
    stands in the job's hyperparameters alone: the jobs of later stages start by the same script.
    """
    return f"exec $SM_PYTHON_CMD -m {LAUNCHER} {shlex.quote(entry)}"


def pinned_trainer_class(request: TrainingRequest) -> Any:
    """The SDK's trainer as it should be."""
    from sagemaker.train import ModelTrainer

    class PinnedTrainer(ModelTrainer):  # type: ignore[misc, unused-ignore]
        """Stages in the bucket that the plan names, without asking IAM for another, and gives the
        job the request's name instead of one by the clock.
        """

        def _resolve_staging_bucket(self) -> tuple[str, None]:
            return self.sagemaker_session.default_bucket(), None

        def _create_training_job_args(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            made: dict[str, Any] = super()._create_training_job_args(*args, **kwargs)
            made["training_job_name"] = request["TrainingJobName"]
            algorithm = made["algorithm_specification"]
            if algorithm.container_arguments == start_arguments(replaced=False):
                algorithm.container_arguments = start_arguments(replaced=True)
            return made

    return PinnedTrainer


def _run_name(request: TrainingRequest) -> str:
    output: str = request["OutputDataConfig"]["S3OutputPath"]
    return output.removeprefix("s3://").split("/")[1]


def _compute(request: TrainingRequest) -> Any:
    from sagemaker.core.shapes import InstancePreference
    from sagemaker.core.training.configs import Compute

    resources = dict(request["ResourceConfig"])
    if "InstancePreferences" in resources:
        resources["InstancePreferences"] = [
            # Left out, the SDK warns of its own placeholder for this one.
            InstancePreference(**_snake(one), training_plan_arns=None)
            for one in resources["InstancePreferences"]
        ]
    spot = request.get("EnableManagedSpotTraining")
    return Compute(**_snake(resources), enable_managed_spot_training=spot)


def _networking(request: TrainingRequest) -> Any:
    from sagemaker.core.training.configs import Networking

    fields = dict(request.get("VpcConfig", {}))
    for name in ("EnableNetworkIsolation", "EnableInterContainerTrafficEncryption"):
        if name in request:
            fields[name] = request[name]
    return Networking(**_snake(fields)) if fields else None


def _channels(request: TrainingRequest, *, staged_by_sdk: bool) -> list[Any]:
    """The channels; those that the SDK stages, for code and drivers, are its own to add."""
    from sagemaker.core.training.configs import Channel, DataSource, S3DataSource

    return [
        Channel(
            channel_name=channel["ChannelName"],
            input_mode=channel["InputMode"],
            data_source=DataSource(
                s3_data_source=S3DataSource(**_snake(channel["DataSource"]["S3DataSource"]))
            ),
        )
        for channel in request["InputDataConfig"]
        if not (staged_by_sdk and channel["ChannelName"] in ("code", "sm_drivers"))
    ]


def _snake(fields: dict[str, Any]) -> dict[str, Any]:
    """boto3's field names as the SDK's: ``S3OutputPath`` becomes ``s3_output_path``."""
    return {
        re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower(): value
        for name, value in fields.items()
    }


def refuse_drift(boto_session: Any, request: dict[str, Any], operation: str) -> None:
    """Let clients of the session raise RequestDriftError where they would send another request."""

    def compare(params: dict[str, Any], **_: Any) -> None:
        sent = comparable(params)
        shown = comparable(request)
        different = [
            f"{field} {sent.get(field)} instead of {shown.get(field)}"
            for field in sorted(sent.keys() | shown.keys())
            if sent.get(field) != shown.get(field)
        ]
        if different:
            raise RequestDriftError(
                f"nothing was started: the SDK would send {'; '.join(different)}"
            )

    boto_session.events.register(f"provide-client-params.sagemaker.{operation}", compare)


def comparable(request: TrainingRequest) -> TrainingRequest:
    """A request without the time stamps of its job's name and staged addresses."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return _STAMP.sub("-<time>", value) if isinstance(value, str) else value

    cleaned: TrainingRequest = plain(request)
    return cleaned
