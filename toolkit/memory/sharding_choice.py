"""Chooses the sharding strategy of stages whose run file says ``sharding: auto``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sm_train.cost.instances import instance_type
from sm_train.estimators.config.consistency import sharding_obstacle
from sm_train.toolkit.memory.memory_fit import fits, memory_fit, unplanned

if TYPE_CHECKING:
    from sm_train.entrypoints.job_interface.job_config import Sharding
    from sm_train.estimators.config.schema import RunConfig
    from sm_train.estimators.config.stage import StageSection

_CANDIDATES: tuple[Sharding, ...] = ("none", "hybrid_shard", "full_shard")
"""Strategies that ``auto`` chooses from, by the amount of communication, least first."""

_LEAST: Sharding = "full_shard"
"""The strategy that takes the least memory."""


def with_sharding(config: RunConfig) -> RunConfig:
    """Return ``config`` with a strategy in place of each stage's ``sharding: auto``.

    The strategy is that of the run file's instance type. It is recorded with the run, so that a
    resumed run keeps it.
    """
    stages = [
        stage.with_sharding(*choose_sharding(config, stage)) if stage.sharding == "auto" else stage
        for stage in config.stages
    ]
    return config.model_copy(update={"stages": stages})


def possible_strategies(config: RunConfig, stage: StageSection) -> Sequence[str]:
    """Return what a stage may use on any cluster: several strategies if it was ``auto``."""
    if stage.sharding_reason is None or sharding_obstacle(config.training, config.cluster):
        return (stage.sharding,)
    return _CANDIDATES


def choose_sharding(config: RunConfig, stage: StageSection) -> tuple[Sharding, str]:
    """Return the first of the candidates whose planned memory fits a GPU, and why."""
    instance = instance_type(config.cluster.instance_type)
    memory = instance.accelerator_memory_gib
    if config.entry is not None:
        return "none", "the script is the user's own"
    if stage.instances * instance.accelerators <= 1:
        return "none", "there is one GPU"
    if obstacle := sharding_obstacle(config.training, config.cluster):
        return "none", obstacle
    if problem := unplanned(config):
        return _LEAST, f"the memory is not planned: {problem.reason}"
    if memory is None:
        return _LEAST, f"the GPU memory of {instance.name} is unknown"
    need = {strategy: memory_fit(config, stage, sharding=strategy) for strategy in _CANDIDATES}
    gib = {strategy: fit.gib for strategy, fit in need.items() if fit}
    strategy = next((name for name in _CANDIDATES if fits(config, stage, sharding=name)), _LEAST)
    text = f"{gib[strategy]:.0f} GiB of each GPU's {memory:.0f}"
    return strategy, text if strategy == "none" else f"{text}; none needs {gib['none']:,.0f}"
