"""The run file's ``trackers``: experiment trackers that show a run while it trains."""

from __future__ import annotations

import re
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from sm_train.entrypoints.job_interface.job_config import TrackerConfig
from sm_train.estimators.config.fields import (
    MLFLOW_PATTERN,
    PROJECT_PATTERN,
    SERVER_PATTERN,
    SecretName,
    Section,
)

_LOOPBACK = {"127.0.0.1", "::1", "localhost"}
_WANDB_KEY = re.compile(r"(?:local-)?[0-9a-f]{40}|wandb_v\d.*")


def _check_server(uri: str) -> str:
    """Reject addresses that send the key unencrypted, or that contain one."""
    if uri.startswith("arn:"):
        return uri
    parts = urlsplit(uri)
    if parts.username is not None or parts.password is not None or parts.query:
        raise ValueError("must not contain credentials; name a secret in `secret`")
    if parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK):
        return uri
    raise ValueError("must be an https:// address")


def _check_name(name: str) -> str:
    """Reject a key of W&B in place of the name of its secret."""
    if _WANDB_KEY.fullmatch(name):
        raise ValueError("is a key itself; store it in Secrets Manager, and name the secret here")
    return name


_ProjectName = Annotated[str, Field(pattern=PROJECT_PATTERN, max_length=128)]
_KeyName = Annotated[SecretName, AfterValidator(_check_name)]
_Server = Annotated[
    str, Field(pattern=SERVER_PATTERN, max_length=512), AfterValidator(_check_server)
]
_MlflowServer = Annotated[
    str,
    Field(pattern=MLFLOW_PATTERN, max_length=512),
    AfterValidator(_check_server),
]


class TensorBoardSection(Section):
    """TensorBoard: event files in `trackers/tensorboard` next to the checkpoints."""


class WandbSection(Section):
    """Weights & Biases."""

    project: _ProjectName | None = Field(
        default=None, description="Project; default: the run's name."
    )
    entity: _ProjectName | None = Field(
        default=None, description="User or team that owns the project; default: the key's."
    )
    base_url: _Server | None = Field(
        default=None, description="Address of a server of your own; default: W&B's."
    )
    secret: _KeyName | None = Field(
        default=None,
        description="Name of the secret in Secrets Manager, or ssm: and the name of a parameter, "
        "that holds the API key. The job's role must be allowed to read it. None writes files, "
        "which `wandb sync` uploads.",
    )


class MlflowSection(Section):
    """MLflow."""

    uri: _MlflowServer | None = Field(
        default=None,
        description="Tracking server: https://… or the ARN of an MLflow tracking server or app of "
        "SageMaker. None writes files.",
    )
    experiment: _ProjectName | None = Field(
        default=None, description="Experiment; default: the run's name."
    )
    secret: _KeyName | None = Field(
        default=None,
        description="Name of the secret with the server's token, or with a JSON object of "
        "username and password. An ARN needs none.",
    )


class TrackersSection(Section):
    """Experiment trackers: a list of names, or a mapping from each name to its settings."""

    tensorboard: TensorBoardSection | None = Field(default=None, description="TensorBoard.")
    wandb: WandbSection | None = Field(default=None, description="Weights & Biases.")
    mlflow: MlflowSection | None = Field(default=None, description="MLflow.")

    @model_serializer(mode="wrap")
    def _omit_unused(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A name without settings means the tracker's defaults.
        return {name: tracker for name, tracker in serialize(self).items() if tracker is not None}

    def job_config(self) -> tuple[TrackerConfig, ...]:
        trackers = []
        if self.tensorboard is not None:
            trackers.append(TrackerConfig("tensorboard"))
        if (wandb := self.wandb) is not None:
            trackers.append(
                TrackerConfig("wandb", wandb.project, wandb.entity, wandb.base_url, wandb.secret)
            )
        if (mlflow := self.mlflow) is not None:
            trackers.append(
                TrackerConfig("mlflow", mlflow.experiment, None, mlflow.uri, mlflow.secret)
            )
        return tuple(trackers)


def _from_names(value: Any) -> Any:
    """Read ``[tensorboard, wandb]`` as a mapping; a name without settings has the defaults."""
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        if len(set(value)) < len(value):
            raise ValueError("names a tracker twice")
        value = dict.fromkeys(value)
    if isinstance(value, dict):
        return {name: {} if options is None else options for name, options in value.items()}
    return value


TrackersField = Annotated[
    TrackersSection,
    BeforeValidator(
        _from_names,
        json_schema_input_type=TrackersSection | list[str],
    ),
]
