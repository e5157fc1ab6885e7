"""A stage's request turned into that of a short job that only examines its cluster."""

from __future__ import annotations

from typing import Any

from sm_train.estimators.request import TrainingRequest
from sm_train.estimators.run_config import RunConfig

SUFFIX = "-doctor"
"""Stands in the names of jobs that only examine, behind the stage's."""

START_SECONDS = 1200
"""For the image and the packages, at most."""

_NEEDED = ("train", "code", "sm_drivers")


def doctor_request(request: TrainingRequest, config: RunConfig, base_name: str) -> TrainingRequest:
    """The examination of the cluster of ``request``, whose job's name begins with ``base_name``.

    Its result lies beside the checkpoints of the stage. It reads the shards, no model.
    """
    name: str = request["TrainingJobName"]
    own = name.replace(base_name, base_name + SUFFIX, 1)
    asked: TrainingRequest = _renamed(request, name, own)
    asked["HyperParameters"]["doctor-only"] = "true"
    asked["InputDataConfig"] = [
        channel for channel in asked["InputDataConfig"] if channel["ChannelName"] in _NEEDED
    ]
    asked["StoppingCondition"]["MaxRuntimeInSeconds"] = START_SECONDS + 2 * config.doctor.limit
    asked.pop("RetryStrategy", None)
    asked["Tags"].append({"Key": "sm-train:doctor", "Value": "true"})
    return asked


def _renamed(value: Any, name: str, own: str) -> Any:
    """A copy with the job's name replaced, in the addresses of what is staged for it too."""
    if isinstance(value, dict):
        return {key: _renamed(item, name, own) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, name, own) for item in value]
    return value.replace(name, own) if isinstance(value, str) else value
