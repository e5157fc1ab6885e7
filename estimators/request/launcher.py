"""How a job's processes are started and by which library they sum gradients.

Two routes exist. ``torchrun``: the bundle's launcher starts ``train.py`` on every node.
``smddp``: the container's own toolkit starts it through ``smddprun``; the SDK has no driver that
does (sagemaker 3.27), so the request carries the hyperparameters which that toolkit reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sm_train.cost.instances import instance_type
from sm_train.estimators.config.cluster import SMDDP_PYTORCH, major_minor
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection

# The newest of AWS's PyTorch training images that sagemaker 3.27's image table knows.
FRAMEWORK = "2.10.0"


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
    """PyTorch of the run's image, one for all stages; None where the image is the user's own."""
    cluster = config.cluster
    if cluster.image is not None:
        return None
    if cluster.framework_version is not None:
        return cluster.framework_version
    wants_smddp = any(_smddp_helps(config, stage) for stage in config.stages)
    return SMDDP_PYTORCH if wants_smddp else FRAMEWORK


def pytorch_version(config: RunConfig) -> str | None:
    """PyTorch of the image; of the user's own, what the run file says or SMDDP asks for."""
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
    """Return why a job cannot resume a stage of ``config`` with the settings of ``other``: all
    jobs of a stage start by one route, with one PyTorch. None if every stage can.
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
            reason += ", as the run file asks"
        elif without := _without_smddp(config):
            reason += "" if cluster.instance_type in without else f"; {without[0]} has no SMDDP"
        elif any(one.sharding != "none" for one in config.stages):
            reason += "; sharding needs a newer PyTorch than SMDDP's"
        return "torchrun", reason
    version = framework_version(config)
    if version is None and cluster.backend == "auto":
        return "torchrun", "own image: NCCL; write backend: smddp if the image carries SMDDP"
    if version is not None and major_minor(version) != major_minor(SMDDP_PYTORCH):
        return "torchrun", f"PyTorch {version}: NCCL; the last image with SMDDP is 2.3.0"
    return "smddp", f"{cluster.instance_type} × {stage.instances}: SMDDP all-reduce"


def _smddp_helps(config: RunConfig, stage: StageSection) -> bool:
    cluster = config.cluster
    return (
        cluster.backend != "nccl"
        # One image for all stages: FSDP2 needs a newer PyTorch than the last one with SMDDP.
        and all(one.sharding == "none" for one in config.stages)
        and stage.instances > 1
        and not _without_smddp(config)
    )


def _without_smddp(config: RunConfig) -> list[str]:
    """The types among the run's on which SMDDP does not run: one image serves them all."""
    return [
        name for name in config.cluster.instance_types if not instance_type(name).supports_smddp
    ]
