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
from sm_train.entrypoints.job_interface.job_config import CompileChoice, choose_compile
from sm_train.estimators.config.cluster import SMDDP_PYTORCH
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection

DEFAULT_PYTORCH = "2.13.0"
"""PyTorch of the newest AWS training image with a known end of patch, 2027-07-20
(aws/deep-learning-containers, docs/src/data/pytorch/2.13-cuda-sagemaker.yml, 2026-08). Local runs
and tests use the same version."""


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
    uses_smddp = any(choose_route(config, stage)[0] == "smddp" for stage in config.stages)
    return SMDDP_PYTORCH if uses_smddp else DEFAULT_PYTORCH


def pytorch_version(config: RunConfig) -> str | None:
    """Return the PyTorch version of the image.

    For a user's image, it is what the run file states or SMDDP requires, else None.
    """
    cluster = config.cluster
    if cluster.image is None or cluster.framework_version is not None:
        return cluster.framework_version or framework_version(config)
    return SMDDP_PYTORCH if cluster.backend == "smddp" else None


def compile_choice(config: RunConfig) -> CompileChoice:
    """Return whether the run's jobs compile the network's layers, as they will decide."""
    if config.entry is not None:
        return CompileChoice(False, "the script is the user's own")
    return choose_compile(
        config.training.compile,
        gpu=True,
        pytorch=pytorch_version(config),
        shapes_vary=config.data.aspect_buckets,
        adapter=config.model.lora is not None,
    )


def with_program_of(config: RunConfig) -> RunConfig:
    """Return the run with the image and the compilation stated that follow from all of its stages.

    A part of it then runs the same program: one stage on one instance would otherwise get another
    PyTorch, and be compiled.
    """
    cluster = config.cluster.model_copy(update={"framework_version": framework_version(config)})
    if config.cluster.image is not None:
        cluster = config.cluster
    compiled = compile_choice(config).compiled
    training = config.training
    if config.entry is None:
        training = training.model_copy(update={"compile": compiled})
    return config.model_copy(update={"cluster": cluster, "training": training})


def launch_plan(config: RunConfig, stage: StageSection, image: str) -> LaunchPlan:
    """Resolve how ``stage`` starts in ``image``."""
    return LaunchPlan(*choose_route(config, stage), framework_version(config), image)


def launch_plans(
    config: RunConfig, stages: Iterable[StageSection], image: str
) -> dict[str, LaunchPlan]:
    """Resolve how each of ``stages`` starts, by its name; all use one image."""
    return {stage.name: launch_plan(config, stage, image) for stage in stages}


def choose_route(config: RunConfig, stage: StageSection) -> tuple[Route, str]:
    """Choose the route of ``stage``, with the reason shown to the user."""
    cluster = config.cluster
    if stage.instances == 1:
        return "torchrun", "one instance: NCCL over NVLink or PCIe"
    # The run file's models accept smddp only where it can run: on A100 types, without sharding, and
    # in an image that includes it.
    if cluster.backend == "smddp":
        return "smddp", f"{cluster.instance_type} × {stage.instances}: SMDDP all-reduce"
    reason = f"{cluster.instance_type}: NCCL"
    if instance_type(cluster.instance_type).supports_efa:
        reason += " over EFA"
    return "torchrun", reason
