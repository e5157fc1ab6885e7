"""The run file's ``heartbeat``, ``doctor``, ``alerts`` and ``budget``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator
from sm_train.entrypoints.job_interface.job_config import (
    AlertLevel,
    AlertsConfig,
    DoctorConfig,
    DoctorMode,
    HeartbeatConfig,
    StallAction,
)
from sm_train.estimators.config.fields import (
    Duration,
    PositiveFloat,
    SecretName,
    Section,
    TopicArn,
    reject_bool,
)


class HeartbeatSection(Section):
    """Stall detection: how soon missing progress is noticed, and what happens then.

    The timeouts of steps, data loading, checkpoints and evaluations are learned separately: five
    times the longest of the latest durations, or more if durations vary widely. Stalls do not
    count, and one isolated pause extends a timeout at most 1.6 times. Phases that occur once have
    the timeout ``max_timeout``.
    """

    interval: Annotated[Duration, Field(ge=1, le=3600)] = Field(
        default=30,
        description="Time between two `heartbeat` events of a node. Its `node` events (network, "
        "GPUs, stragglers) are half as frequent.",
    )
    min_timeout: Annotated[Duration, Field(ge=1)] = Field(
        default=120, description="Lower bound of the learned timeouts, for slow storage."
    )
    max_timeout: Annotated[Duration, Field(ge=1)] = Field(
        default=1200,
        description="Upper bound of the learned timeouts, and the timeout until one is learned.",
    )
    on_stall: StallAction = Field(
        default="kill",
        description="kill writes a stall report and ends the job, which can then be resumed; warn "
        "only reports the stall.",
    )

    def job_config(self) -> HeartbeatConfig:
        return self._job_struct(HeartbeatConfig)

    @model_validator(mode="after")
    def _check_bounds(self) -> HeartbeatSection:
        if self.max_timeout < self.min_timeout:
            raise ValueError(
                f"max_timeout: {self.max_timeout} s is less than min_timeout {self.min_timeout} s"
            )
        return self


class DoctorSection(Section):
    """The check of GPUs, network and files before training."""

    mode: Annotated[
        DoctorMode,
        # YAML 1.1 reads a bare `off` as False.
        BeforeValidator(lambda value: "off" if value is False else value),
    ] = Field(
        default="auto",
        description="fail refuses to train on an unfit cluster, warn only reports it, off skips "
        "the check. auto is warn on several instances, and off on one instance and in local runs.",
    )
    timeout: Annotated[Duration, Field(ge=30, le=900)] = Field(
        default=120,
        description="Maximum duration of the check. It then reports what it has measured so far.",
    )
    max_slowdown: Annotated[float, BeforeValidator(reject_bool), Field(gt=1, le=100)] = Field(
        default=1.5,
        description="Ratio of the predicted to the expected step time above which the cluster is "
        "unfit.",
    )

    def job_config(self) -> DoctorConfig:
        return self._job_struct(DoctorConfig)


class AlertsSection(Section):
    """Where the job sends alerts. URLs are secrets: the run file holds only their names."""

    slack_secret: SecretName | None = Field(
        default=None,
        description="Name of the secret in Secrets Manager, or ssm: and the name of a parameter, "
        "that holds a Slack incoming webhook. The job's role must be allowed to read it.",
    )
    webhook_secret: SecretName | None = Field(
        default=None,
        description="The same for any other webhook, which receives every field as JSON.",
    )
    sns_topic: TopicArn | None = Field(
        default=None,
        description="ARN of an SNS topic. The job's role must be allowed to publish to it.",
    )
    level: AlertLevel = Field(default="warning", description="Lowest severity that is sent.")

    def job_config(self) -> AlertsConfig:
        return self._job_struct(AlertsConfig)


class BudgetSection(Section):
    """The maximum cost of the whole run."""

    usd: PositiveFloat = Field(description="Maximum cost of the run in US dollars.")
    on_exceed: Literal["stop", "warn"] = Field(
        default="stop",
        description="stop refuses to submit a run above the budget; warn submits it with a "
        "warning.",
    )
