"""Turn a stage's request into that of a short job that only checks its cluster."""

from __future__ import annotations

from copy import deepcopy
from datetime import datetime

from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.training_request import STAGE_TAG, TrainingRequest

MAX_STARTUP_SECONDS = 1200
"""Time for the image and the packages, at most."""

_NEEDED_CHANNELS = ("train", "code", "sm_drivers")


def doctor_job_name(config: RunConfig, stage: str, now: datetime) -> str:
    """Return the name of a doctor job, unique to the second."""
    return f"{config.name}--{stage}-doctor-{now:%Y%m%d%H%M%S}"


def max_doctor_seconds(config: RunConfig) -> int:
    """Return the seconds after which SageMaker stops a doctor job."""
    return MAX_STARTUP_SECONDS + 2 * config.doctor.timeout


def doctor_request(request: TrainingRequest, config: RunConfig, name: str) -> TrainingRequest:
    """Return the request of the job ``name``, which checks the cluster of ``request``.

    It reads the shards but no model, and writes its result next to the stage's checkpoints. It has
    the run's tag but not the stage's, so that it is not taken for one of the stage's jobs.
    """
    job = deepcopy(request)
    job["TrainingJobName"] = name
    job["HyperParameters"] = {**request["HyperParameters"], "doctor-only": "true"}
    job["InputDataConfig"] = [
        channel
        for channel in request["InputDataConfig"]
        if channel["ChannelName"] in _NEEDED_CHANNELS
    ]
    job["StoppingCondition"]["MaxRuntimeInSeconds"] = max_doctor_seconds(config)
    job.pop("RetryStrategy", None)
    job["Tags"] = [
        *(tag for tag in request["Tags"] if tag["Key"] != STAGE_TAG),
        {"Key": "sm-train:doctor", "Value": "true"},
    ]
    return job
