"""A stage's request turned into that of a short job that only examines its cluster."""

from __future__ import annotations

from copy import deepcopy
from datetime import datetime

from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.training import STAGE_TAG, TrainingRequest

START_SECONDS = 1200
"""For the image and the packages, at most."""

_NEEDED = ("train", "code", "sm_drivers")


def doctor_name(config: RunConfig, stage: str, now: datetime) -> str:
    """The name of a job that only examines, to the second."""
    return f"{config.name}--{stage}-doctor-{now:%Y%m%d%H%M%S}"


def doctor_request(request: TrainingRequest, config: RunConfig, name: str) -> TrainingRequest:
    """The examination of the cluster of ``request``, as the job ``name``.

    Its result lies beside the checkpoints of the stage. It reads the shards, no model. It is of the
    run, and none of the stage's own jobs.
    """
    asked = deepcopy(request) | {"TrainingJobName": name}
    asked["HyperParameters"]["doctor-only"] = "true"
    asked["InputDataConfig"] = [
        channel for channel in asked["InputDataConfig"] if channel["ChannelName"] in _NEEDED
    ]
    asked["StoppingCondition"]["MaxRuntimeInSeconds"] = START_SECONDS + 2 * config.doctor.timeout
    asked.pop("RetryStrategy", None)
    asked["Tags"] = [tag for tag in asked["Tags"] if tag["Key"] != STAGE_TAG]
    asked["Tags"].append({"Key": "sm-train:doctor", "Value": "true"})
    return asked
