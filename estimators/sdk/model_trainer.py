"""Send a training request through the SageMaker SDK: build the ModelTrainer that sends exactly it.

The SDK stages the bundle and its own scripts in the bucket, in a folder named after the current
time. Everything else must equal the request that the user has confirmed. A botocore event handler
compares them before the call is sent: a difference stops the submission.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from botocore.exceptions import ClientError
from sm_train.entrypoints.base.pip_install import CODEARTIFACT
from sm_train.estimators.bundle.bundle import ARCHIVE_NAME, LAUNCHER, Bundle
from sm_train.estimators.bundle.user_code import REQUIREMENTS
from sm_train.estimators.config.naming import code_prefix
from sm_train.estimators.request.entrypoint import SDK_ARGUMENTS
from sm_train.estimators.request.request_patch import with_additions, without_additions
from sm_train.estimators.request.training_request import (
    TrainingRequest,
    code_uri,
    hyperparameter,
    stage_name,
)

if TYPE_CHECKING:
    import boto3
    from sagemaker.train import ModelTrainer

_TIMESTAMP = re.compile(r"-\d{14}(?=$|/)")


class RequestDriftError(RuntimeError):
    """The SDK was about to send another request than the one that the user confirmed."""


@contextmanager
def quiet_sdk() -> Iterator[None]:
    """Disable the SDK's telemetry, its role check and defaults that would change the request.

    The SDK reads them from environment variables whenever a session or trainer is created.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        opt_out = {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}
        config.write_text(json.dumps({"SchemaVersion": "1.0", "SageMaker": opt_out}))
        overrides = {
            # The check needs iam:SimulatePrincipalPolicy, which few users may call.
            "SAGEMAKER_VALIDATE_ROLE": "false",
            "SAGEMAKER_ADMIN_CONFIG_OVERRIDE": str(config),
            "SAGEMAKER_USER_CONFIG_OVERRIDE": str(config),
        }
        original = {name: os.environ.get(name) for name in overrides}
        os.environ.update(overrides)
        try:
            yield
        finally:
            for name, value in original.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


Sending = AbstractContextManager[Callable[[TrainingRequest], None]]
"""Entered before a job is created: yields a function that is called with the final request, which
names the staged code. If that function raises, the job is not created."""


def create_training_job(
    request: TrainingRequest,
    bundle: Bundle,
    *,
    boto_session: boto3.Session,
    bucket: str,
    added: Mapping[str, Any],
) -> None:
    """Create the training job of ``request`` and return at once (:func:`job_trainer`)."""
    trainer = job_trainer(
        request,
        bundle,
        boto_session=boto_session,
        bucket=bucket,
        sending=nothing_else,
        added=added,
    )
    trainer.train(wait=False, logs=False)


@contextmanager
def nothing_else() -> Iterator[Callable[[TrainingRequest], None]]:
    """A :data:`Sending` without effect."""
    yield lambda sent: None


def job_trainer(
    request: TrainingRequest,
    bundle: Bundle,
    *,
    boto_session: boto3.Session,
    bucket: str,
    sending: Callable[[], Sending],
    added: Mapping[str, Any],
) -> ModelTrainer:
    """Build the SDK's trainer whose ``train()`` creates exactly the job of ``request``.

    ``added`` are the fields that :mod:`request_patch` has added to it, which the SDK may not know.
    ``train()`` stages the code and enters ``sending()`` until the job is created. It raises
    RequestDriftError before the call if the SDK would send another request, and
    botocore.exceptions.ClientError if AWS rejects it.
    """
    calls: list[Callable[[TrainingRequest], None]] = []

    def before_send(params: TrainingRequest, **_: object) -> None:
        for call in calls:
            call(params)

    plain = without_additions(request, added)

    def add(params: dict[str, Any], **_: object) -> None:
        params.update(with_additions(without_additions(params, added), added))

    # Register before any client is created: clients copy the session's event handlers.
    boto_session.events.register_first("provide-client-params.sagemaker.CreateTrainingJob", add)
    reject_drift(boto_session, request, "CreateTrainingJob")
    boto_session.events.register("provide-client-params.sagemaker.CreateTrainingJob", before_send)
    folder = Path(tempfile.mkdtemp(prefix="sm-train-"))
    archive = folder / ARCHIVE_NAME
    archive.write_bytes(bundle.archive)
    with quiet_sdk():
        session = session_of(boto_session, bucket)
        # On the smddp route AWS's toolkit downloads the code; the SDK stages none.
        is_smddp = hyperparameter(request, "sagemaker_submit_directory") is not None
        source = {} if is_smddp else _source(request, archive, bundle)

        @contextmanager
        def creating() -> Iterator[list[TrainingRequest]]:
            """Prepare one call of CreateTrainingJob; yields the list of requests sent in it."""
            sent: list[TrainingRequest] = []
            with sending() as call, quiet_sdk():
                calls[:] = [call, sent.append]
                if is_smddp:
                    _upload(code_uri(request) or "", archive, session)
                yield sent

        trainer = _model_trainer(_job_trainer_class(plain, creating), plain, session, source)
    weakref.finalize(trainer, shutil.rmtree, folder, ignore_errors=True)
    return cast("ModelTrainer", trainer)


def session_of(boto_session: boto3.Session, bucket: str) -> Any:
    """Return the SDK's session, which stages in ``bucket`` and sends no request for it.

    ``Session(default_bucket=...)`` lists all buckets before it uses the name, and probes a bucket
    that it may not list (sagemaker 3.27, session_helper.py). A least-privilege policy has neither
    right.
    """
    from sagemaker.core.helper.session_helper import Session

    session = Session(boto_session=boto_session)
    vars(session)["_default_bucket"] = bucket
    return session


def _job_trainer_class(
    request: TrainingRequest, creating: Callable[[], AbstractContextManager[list[TrainingRequest]]]
) -> Any:
    """Return a trainer class whose ``train`` calls CreateTrainingJob inside ``creating()``."""
    from sagemaker.core.resources import TrainingJob

    class JobTrainer(pinned_trainer_class(request)):  # type: ignore[misc]
        """Trains the job of one request of sm-train."""

        def train(
            self,
            input_data_config: Any = None,
            wait: bool = True,
            logs: bool = True,
            dry_run: bool = False,
        ) -> None:
            """Stage the code and create the job; ``wait`` until it has ended, with its ``logs``.

            ``dry_run`` only validates.
            """
            if dry_run:
                with quiet_sdk():
                    super().train(input_data_config, wait=False, logs=False, dry_run=True)
                return
            with creating() as sent:
                try:
                    super().train(input_data_config, wait=False, logs=False)
                except ClientError as error:
                    session = self.sagemaker_session.boto_session
                    if not sent or not _was_accepted_before(error, sent[-1], session):
                        raise
                    name = sent[-1]["TrainingJobName"]
                    self._latest_training_job = TrainingJob.get(name, session=session)
            if wait:
                with quiet_sdk():
                    self._latest_training_job.wait(logs=logs)

    return JobTrainer


def _was_accepted_before(
    error: ClientError, sent: TrainingRequest, boto_session: boto3.Session
) -> bool:
    """Return whether the name is taken because an earlier retry of this request was accepted.

    That happens if the response to it was lost.
    """
    if error.response["Error"]["Code"] != "ResourceInUse":
        return False
    client = boto_session.client("sagemaker")
    existing = client.describe_training_job(TrainingJobName=sent["TrainingJobName"])
    # Both contain the folder of the staged code, which is unique to this submission.
    return (existing["InputDataConfig"], existing["HyperParameters"]) == (
        sent["InputDataConfig"],
        sent["HyperParameters"],
    )


def _upload(uri: str, archive: Path, session: Any) -> None:
    bucket, key = uri.removeprefix("s3://").split("/", 1)
    session.upload_data(str(archive), bucket=bucket, key_prefix=key.rsplit("/", 1)[0])


def _source(request: TrainingRequest, archive: Path, bundle: Bundle) -> dict[str, Any]:
    """Return the trainer arguments that make the SDK stage the bundle and start it.

    The SDK's script gives CodeArtifact's token to pip as an argument, which the log holds if pip
    fails (sagemaker 3.27, install_requirements.py). The bundle's own installer does not.
    """
    from sagemaker.core.training.configs import SourceCode

    packages = any(file.path == REQUIREMENTS for file in bundle.files)
    installs = packages and CODEARTIFACT in request["Environment"]
    command = launch_command(bundle.entry)
    source = SourceCode(
        source_dir=str(archive),
        command=f"$SM_PYTHON_CMD -m {_INSTALLER} && {command}" if installs else command,
        requirements=REQUIREMENTS if packages and not installs else None,
    )
    return {"source_code": source}


def _model_trainer(
    trainer_class: Any, request: TrainingRequest, session: Any, source: dict[str, Any]
) -> Any:
    """Build the SDK's trainer with every setting taken from the request."""
    from sagemaker.core.training.configs import (
        CheckpointConfig,
        MetricDefinition,
        OutputDataConfig,
        RemoteDebugConfig,
        RetryStrategy,
        StoppingCondition,
        Tag,
    )

    algorithm = request["AlgorithmSpecification"]
    trainer = trainer_class(
        sagemaker_session=session,
        role=request["RoleArn"],
        base_job_name=stage_name(request),
        input_s3_key_prefix=code_prefix(_run_name(request)),
        training_image=algorithm["TrainingImage"],
        training_input_mode=algorithm["TrainingInputMode"],
        compute=_compute(request),
        networking=_networking(request),
        stopping_condition=StoppingCondition(**_snake_case(request["StoppingCondition"])),
        output_data_config=OutputDataConfig(**_snake_case(request["OutputDataConfig"])),
        checkpoint_config=CheckpointConfig(**_snake_case(request["CheckpointConfig"])),
        input_data_config=_channels(request, staged_by_sdk=bool(source)),
        environment=request["Environment"],
        hyperparameters=request["HyperParameters"],
        tags=[Tag(key=tag["Key"], value=tag["Value"]) for tag in request["Tags"]],
        **source,
    ).with_metric_definitions(
        [MetricDefinition(**_snake_case(metric)) for metric in algorithm["MetricDefinitions"]]
    )
    if "RetryStrategy" in request:
        trainer.with_retry_strategy(RetryStrategy(**_snake_case(request["RetryStrategy"])))
    if "RemoteDebugConfig" in request:
        trainer.with_remote_debug_config(
            RemoteDebugConfig(**_snake_case(request["RemoteDebugConfig"]))
        )
    return trainer


_INSTALLER = "sm_train.entrypoints.base.pip_install"


def launch_command(entry: str) -> str:
    """Return the command of the SDK's start script: the launcher with ``entry``.

    It replaces the SDK's Torchrun driver (launch.py says why). Only the hyperparameters name the
    stage, so the jobs of later stages start with the same script.
    """
    return f"exec $SM_PYTHON_CMD -m {LAUNCHER} {shlex.quote(entry)}"


def pinned_trainer_class(request: TrainingRequest) -> Any:
    """Return a subclass of the SDK's trainer that does not change bucket, name and arguments."""
    from sagemaker.core.shapes import ProfilerConfig
    from sagemaker.train import ModelTrainer
    from sagemaker.train.model_trainer import Mode

    class PinnedTrainer(ModelTrainer):  # type: ignore[misc, unused-ignore]
        """Stages in the request's bucket without an IAM call, and sends the fields of the request
        that the SDK derives otherwise or has no setting for.
        """

        def _resolve_staging_bucket(self) -> tuple[str, None]:
            return self.sagemaker_session.default_bucket(), None

        def _create_training_job_args(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            arguments: dict[str, Any] = super()._create_training_job_args(*args, **kwargs)
            arguments["training_job_name"] = request["TrainingJobName"]
            arguments["profiler_config"] = ProfilerConfig(**_snake_case(request["ProfilerConfig"]))
            for channel in arguments["input_data_config"] or ():
                # In local mode the channel is a folder of this machine.
                if channel.channel_name != "sm_drivers":
                    continue
                source = channel.data_source.s3_data_source
                if hasattr(source, "s3_uri"):
                    source.s3_uri += "/"
            algorithm = arguments["algorithm_specification"]
            if registry := request["AlgorithmSpecification"].get("TrainingImageConfig"):
                algorithm.training_image_config = _image_config(registry)
            if algorithm.container_arguments in (None, SDK_ARGUMENTS):
                expected = request["AlgorithmSpecification"]
                algorithm.container_entrypoint = expected["ContainerEntrypoint"]
                algorithm.container_arguments = expected["ContainerArguments"]
                if self.training_mode == Mode.LOCAL_CONTAINER:
                    # docker compose expands variables in what the SDK writes to its file.
                    algorithm.container_arguments = [
                        argument.replace("$", "$$") for argument in algorithm.container_arguments
                    ]
            return arguments

    return PinnedTrainer


def _image_config(registry: Mapping[str, Any]) -> Any:
    """Return the SDK's form of the registry's access, which its trainer has no setting for."""
    from sagemaker.core.shapes import TrainingImageConfig, TrainingRepositoryAuthConfig

    fields: dict[str, Any] = _snake_case(registry)
    if "training_repository_auth_config" in fields:
        fields["training_repository_auth_config"] = TrainingRepositoryAuthConfig(
            **_snake_case(fields["training_repository_auth_config"])
        )
    return TrainingImageConfig(**fields)


def _run_name(request: TrainingRequest) -> str:
    output: str = request["OutputDataConfig"]["S3OutputPath"]
    return output.removeprefix("s3://").split("/")[1]


def _compute(request: TrainingRequest) -> Any:
    from sagemaker.core.shapes import InstancePreference
    from sagemaker.core.training.configs import Compute

    resources: dict[str, Any] = dict(request["ResourceConfig"])
    if "InstancePreferences" in resources:
        resources["InstancePreferences"] = [
            # Without an explicit None, the SDK warns about its own placeholder.
            InstancePreference(**{"training_plan_arns": None} | _snake_case(preference))
            for preference in resources["InstancePreferences"]
        ]
    spot = request.get("EnableManagedSpotTraining")
    return Compute(**_snake_case(resources), enable_managed_spot_training=spot)


def _networking(request: TrainingRequest) -> Any:
    from sagemaker.core.training.configs import Networking

    fields: dict[str, Any] = dict(request.get("VpcConfig", {}))
    if "EnableNetworkIsolation" in request:
        fields["EnableNetworkIsolation"] = request["EnableNetworkIsolation"]
    if "EnableInterContainerTrafficEncryption" in request:
        fields["EnableInterContainerTrafficEncryption"] = request[
            "EnableInterContainerTrafficEncryption"
        ]
    return Networking(**_snake_case(fields)) if fields else None


def _channels(request: TrainingRequest, *, staged_by_sdk: bool) -> list[Any]:
    """Build the channels; the SDK adds those for the code and drivers that it stages itself."""
    from sagemaker.core.training.configs import (
        Channel,
        DataSource,
        FileSystemDataSource,
        S3DataSource,
    )

    def source(fields: Mapping[str, Any]) -> Any:
        if "FileSystemDataSource" in fields:
            mounted = FileSystemDataSource(**_snake_case(fields["FileSystemDataSource"]))
            return DataSource(file_system_data_source=mounted)
        return DataSource(s3_data_source=S3DataSource(**_snake_case(fields["S3DataSource"])))

    return [
        Channel(
            channel_name=channel["ChannelName"],
            input_mode=channel["InputMode"],
            data_source=source(channel["DataSource"]),
        )
        for channel in request["InputDataConfig"]
        if not (staged_by_sdk and channel["ChannelName"] in ("code", "sm_drivers"))
    ]


def _snake_case(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert boto3's field names to the SDK's: ``S3OutputPath`` becomes ``s3_output_path``."""
    return {
        re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower(): value
        for name, value in fields.items()
    }


def reject_drift(boto_session: boto3.Session, request: Mapping[str, Any], operation: str) -> None:
    """Make clients of the session raise RequestDriftError before they send another request."""

    def compare(params: dict[str, Any], **_: object) -> None:
        sent, expected = without_timestamps(params), without_timestamps(request)
        differences = [
            f"{field} {sent.get(field)} instead of {expected.get(field)}"
            for field in sorted(sent.keys() | expected.keys())
            if sent.get(field) != expected.get(field)
        ]
        if differences:
            raise RequestDriftError(
                f"the job was not created: the SDK would send {'; '.join(differences)}"
            )

    boto_session.events.register(f"provide-client-params.sagemaker.{operation}", compare)


def without_timestamps(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with the time in its job name and staging URIs replaced."""

    def replace(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replace(item) for key, item in value.items()}
        if isinstance(value, list):
            return [replace(item) for item in value]
        return _TIMESTAMP.sub("-<time>", value) if isinstance(value, str) else value

    return {key: replace(value) for key, value in request.items()}
