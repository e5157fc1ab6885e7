"""Choose how a job's processes start, and which library reduces their gradients.

There are two routes. ``torchrun``: the bundle's launcher starts ``train.py`` on every node.
``smddp``: the toolkit in AWS's container starts it through ``smddprun``; the SDK has no driver for
that (sagemaker 3.27), so the request contains the hyperparameters that the toolkit reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sm_train.cost.instances import instance_type
from sm_train.estimators.config.cluster import SMDDP_PYTORCH, major_minor
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection

DEFAULT_PYTORCH = "2.10.0"
"""PyTorch of the newest AWS training image in the image table of sagemaker 3.27."""


Route = Literal["torchrun", "smddp"]


@dataclass(frozen=True)
class LaunchPlan:
    """How one stage starts: by which route and why, and in which image.

    ``framework_version`` is the image's PyTorch; None if the image is the user's own.
    """

    route: Route
    reason: str
    framework_version: str | None
    image: str


def framework_version(config: RunConfig) -> str | None:
    """Return the PyTorch version of AWS's image, one for all stages; None for a user's image."""
    cluster = config.cluster
    if cluster.image is not None:
        return None
    if cluster.framework_version is not None:
        return cluster.framework_version
    wants_smddp = any(_smddp_helps(config, stage) for stage in config.stages)
    return SMDDP_PYTORCH if wants_smddp else DEFAULT_PYTORCH


def pytorch_version(config: RunConfig) -> str | None:
    """Return the PyTorch version of the image.

    For a user's image, it is what the run file states or SMDDP requires, else None.
    """
    cluster = config.cluster
    if cluster.image is None or cluster.framework_version is not None:
        return cluster.framework_version or framework_version(config)
    return SMDDP_PYTORCH if cluster.backend == "smddp" else None


def launch_plan(config: RunConfig, stage: StageSection, image: str) -> LaunchPlan:
    """Resolve how ``stage`` starts in ``image``."""
    return LaunchPlan(*choose_route(config, stage), framework_version(config), image)


def launch_plans(
    config: RunConfig, stages: Iterable[StageSection], image: str
) -> dict[str, LaunchPlan]:
    """Resolve how each of ``stages`` starts, by its name; all use one image."""
    return {stage.name: launch_plan(config, stage, image) for stage in stages}


def route_conflict(config: RunConfig, other: RunConfig) -> str | None:
    """Return why a job cannot resume a stage of ``config`` with the settings of ``other``.

    All jobs of a stage must use one route and one PyTorch. None if every stage can be resumed.
    """
    for stage, other_stage in zip(config.stages, other.stages, strict=True):
        route, _ = choose_route(config, stage)
        other_route, _ = choose_route(other, other_stage)
        if route != other_route:
            return (
                f"{stage.name} starts by {route} at first and by {other_route} there, from another "
                "image; write cluster.backend: nccl, which both support"
            )
    return None


def choose_route(config: RunConfig, stage: StageSection) -> tuple[Route, str]:
    """Choose the route of ``stage``, with the reason shown to the user."""
    cluster = config.cluster
    if stage.instances == 1:
        return "torchrun", "one instance: NCCL over NVLink; SMDDP gains nothing there"
    if not _smddp_helps(config, stage):
        reason = f"{cluster.instance_type}: NCCL"
        if instance_type(cluster.instance_type).supports_efa:
            reason += " over EFA"
        if cluster.backend == "nccl":
            reason += ", as set in the run file"
        elif unsupported := _types_without_smddp(config):
            if cluster.instance_type not in unsupported:
                reason += f"; {unsupported[0]} has no SMDDP"
        elif any(other.sharding != "none" for other in config.stages):
            reason += "; sharding needs a newer PyTorch than SMDDP's"
        return "torchrun", reason
    version = framework_version(config)
    if version is None and cluster.backend == "auto":
        return "torchrun", "user image: NCCL; write backend: smddp if it carries SMDDP"
    if version is not None and major_minor(version) != major_minor(SMDDP_PYTORCH):
        return "torchrun", f"PyTorch {version}: NCCL; the last image with SMDDP is 2.3.0"
    return "smddp", f"{cluster.instance_type} × {stage.instances}: SMDDP all-reduce"


def _smddp_helps(config: RunConfig, stage: StageSection) -> bool:
    cluster = config.cluster
    return (
        cluster.backend != "nccl"
        # All stages share one image, and FSDP2 needs a newer PyTorch than SMDDP's.
        and all(other.sharding == "none" for other in config.stages)
        and stage.instances > 1
        and not _types_without_smddp(config)
    )


def _types_without_smddp(config: RunConfig) -> list[str]:
    """Return the run's instance types without SMDDP support: one image serves all types."""
    return [
        name for name in config.cluster.instance_types if not instance_type(name).supports_smddp
    ]
