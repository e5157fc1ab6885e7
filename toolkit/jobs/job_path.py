"""The path of a job: how it starts, and where. One that ran on it is evidence for the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_SMDDP = "sagemaker_distributed_dataparallel_enabled"
"""Hyperparameter with which AWS's toolkit starts SMDDP (estimators/request/training_request.py)."""


@dataclass(frozen=True)
class JobPath:
    """What decides how SageMaker starts a job, in words of the run file."""

    instance_type: str
    image: str
    backend: str
    capacity: str
    network: str
    has_several: bool
    """Whether it has several instances, which talk to each other."""

    def __str__(self) -> str:
        nodes = "several instances" if self.has_several else "a single instance"
        return (
            f"{self.instance_type} ({self.capacity}), {nodes}, {self.backend}, {self.network}, "
            f"image {self.image}"
        )

    def proves(self, other: JobPath, *, capacity: bool) -> bool:
        """Return whether a job on this path shows that one on the other starts.

        Without ``capacity`` it may have been bought in another way.
        """
        same = replace(self, has_several=other.has_several)
        same = same if capacity else replace(same, capacity=other.capacity)
        return same == other and (self.has_several or not other.has_several)


def job_path(job: Mapping[str, Any]) -> JobPath:
    """Return the path of a request of CreateTrainingJob, or of a job that AWS describes."""
    kind, count = instances_of(job)
    network = ["a VPC" if job.get("VpcConfig") else "no VPC"]
    network += ["isolated"] if job.get("EnableNetworkIsolation") else []
    network += ["encrypted"] if job.get("EnableInterContainerTrafficEncryption") else []
    is_smddp = _SMDDP in (job.get("HyperParameters") or {})
    return JobPath(
        kind,
        str((job.get("AlgorithmSpecification") or {}).get("TrainingImage", "")),
        "SMDDP" if is_smddp else "NCCL",
        _capacity(job),
        ", ".join(network),
        count > 1,
    )


def instances_of(job: Mapping[str, Any]) -> tuple[str, int]:
    """Return type and number of the billed instances: of ordered preferences, the selected ones."""
    resources = job["ResourceConfig"]
    if "SelectedInstanceType" in resources:
        return resources["SelectedInstanceType"], resources["SelectedInstanceCount"]
    if "InstanceType" in resources:
        return resources["InstanceType"], resources["InstanceCount"]
    [first, *_] = resources.get("InstanceGroups") or resources["InstancePreferences"]
    return first["InstanceType"], first.get("InstanceCount", resources.get("InstanceCount", 1))


def is_on_training_plan(job: Mapping[str, Any]) -> bool:
    """Return whether the instances of :func:`instances_of` are those of a training plan."""
    resources = job["ResourceConfig"]
    plans = {
        preference["InstanceType"]: preference.get("TrainingPlanArns")
        for preference in resources.get("InstancePreferences", [])
    }
    return bool(resources.get("TrainingPlanArn") or plans.get(instances_of(job)[0]))


def _capacity(job: Mapping[str, Any]) -> str:
    if is_on_training_plan(job):
        return "training-plan"
    if job.get("EnableManagedSpotTraining"):
        return "spot"
    is_kept = job["ResourceConfig"].get("KeepAlivePeriodInSeconds")
    return "warm-pool" if is_kept else "on-demand"
