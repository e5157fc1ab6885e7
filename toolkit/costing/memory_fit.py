"""Whether a stage fits on its GPUs, and the smallest change with which it does."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING, Any

from sm_train.cost.instances import InstanceType, instance_type
from sm_train.entrypoints.planning.memory import (
    MEASURE_MODULE,
    ModelPlan,
    UnplannedModelError,
    plan_preset,
)

if TYPE_CHECKING:
    from sm_train.estimators.config.schema import RunConfig

_GIB = 2**30

_STRATEGIES = ("none", "shard_grad_op", "hybrid_shard", "full_shard")
"""From what talks least to what talks most."""

Change = dict[str, Any]
"""Keys of a stage and what they would have to be."""


@dataclass(frozen=True)
class Fit:
    """Bytes on one GPU: ``states`` whatever the batch, ``activations`` of ``images`` of them."""

    states: float
    activations: float
    images: int

    @property
    def gib(self) -> float:
        return (self.states + self.activations) / _GIB


def plan_of(config: RunConfig, resolution: int | None) -> ModelPlan | None:
    """Return the plan of the run's model; None if it has none (:func:`unplanned`)."""
    if unplanned(config):
        return None
    return plan_preset(config.model.preset, resolution or 0, precision=config.training.precision)


def unplanned(config: RunConfig) -> str | None:
    """Return why the run's model has no plan and the command that writes one; None if it has one.

    Shipped presets have plans. Where PyTorch is installed, an added or edited preset is measured
    now.
    """
    return _unplanned(config.model.preset)


@cache
def _unplanned(preset: str) -> str | None:
    reason = _plan_problem(preset)
    if reason is not None and find_spec("torch") and find_spec("diffusers"):
        # In its own process: PyTorch takes seconds to import, and memory.
        command = [sys.executable, "-m", MEASURE_MODULE, preset]
        subprocess.run(command, capture_output=True, check=False)
        plan_preset.cache_clear()
        reason = _plan_problem(preset)
    return reason


def _plan_problem(preset: str) -> str | None:
    try:
        # Whether there is a plan does not depend on the size.
        plan_preset(preset, 64, precision="fp32")
    except UnplannedModelError as error:
        return str(error)
    return None


def fixed_bytes(
    plan: ModelPlan, config: RunConfig, strategy: str, world_size: int, per_node: int
) -> float:
    """What a GPU of the run holds before the first image."""
    return plan.fixed_bytes(
        ema=config.training.ema_decay > 0,
        strategy=strategy,
        world_size=world_size,
        per_node=per_node,
    )


def fit(config: RunConfig, stage: Any, **change: Any) -> Fit | None:
    """A stage of the run, with some keys changed; None where the model is not counted."""
    plan = plan_of(config, stage.resolution)
    if plan is None:
        return None
    machine = instance_type(config.cluster.instance_type)
    keys = {
        key: change.get(key, getattr(stage, key))
        for key in ("sharding", "activation_checkpointing", "per_device_batch_size")
    }
    world_size = stage.instances * machine.accelerators
    images = keys["per_device_batch_size"]
    return Fit(
        fixed_bytes(plan, config, keys["sharding"], world_size, machine.accelerators),
        plan.activation_bytes(images, checkpointing=keys["activation_checkpointing"]),
        images,
    )


def changes(stage: Any, machine: InstanceType) -> list[Change]:
    """What may be tried, by about how much speed it costs; the batch of a step stays what it is.

    Computing activations again takes a third more; what splitting and small batches take is
    assumed.
    """
    strategies = _STRATEGIES[_STRATEGIES.index(stage.sharding) :]
    if stage.instances * machine.accelerators == 1:
        strategies = (stage.sharding,)
    whole = stage.per_device_batch_size
    batches = [size for size in range(whole, 0, -1) if whole % size == 0]
    again = sorted({stage.activation_checkpointing, True})
    tried = sorted(
        product(strategies, batches, again),
        key=lambda one: (
            0.05 * _STRATEGIES.index(one[0]) + 0.15 * math.log2(whole / one[1]) + one[2] / 3
        ),
    )
    return [_change(stage, *one) for one in tried]


def _change(stage: Any, sharding: str, size: int, checkpointing: bool) -> Change:
    wanted = {
        "sharding": sharding,
        "per_device_batch_size": size,
        "gradient_accumulation_steps": stage.gradient_accumulation_steps
        * (stage.per_device_batch_size // size),
        "activation_checkpointing": checkpointing,
    }
    return {key: value for key, value in wanted.items() if value != getattr(stage, key)}
