"""Whether a stage fits in GPU memory, and the smallest change with which it does."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.cost.instances import USABLE_MEMORY, InstanceType, instance_type
from sm_train.cost.speed_model import RECOMPUTATION, ActivationCheckpointing, TextEncoderPlacement
from sm_train.entrypoints.job_interface.job_config import (
    FSDP2_PYTORCH,
    JobConfigError,
    ModelConfig,
    choose_modulation,
    major_minor,
)
from sm_train.entrypoints.planning.memory import (
    MEASURE_MODULE,
    UNMEASURED,
    MemoryFit,
    ModelPlan,
    StageLayout,
    TextEncoderChoice,
    UnplannedModelError,
    choose_text_encoders,
    plan_model,
    plan_path,
    plan_preset,
)
from sm_train.estimators.request.launch_plan import pytorch_version

if TYPE_CHECKING:
    from sm_train.estimators.config.schema import RunConfig
    from sm_train.estimators.config.stage import StageSection

STRATEGIES = ("none", "shard_grad_op", "hybrid_shard", "full_shard")
"""Sharding strategies by the amount of communication, least first."""

CHECKPOINTING: tuple[ActivationCheckpointing, ...] = tuple(RECOMPUTATION)
"""Choices of activation checkpointing by the memory that they need, most first."""

StageChange = dict[str, Any]
"""Keys of a stage and their new values."""


def plan_for(config: RunConfig, resolution: int | None) -> ModelPlan | None:
    """Return the plan of the run's model; None if it has none (:func:`unplanned`)."""
    if unplanned(config):
        return None
    model = config.model.job_config()
    training = config.training
    return plan_model(
        model,
        resolution or 0,
        precision=training.precision,
        vae_precision=training.vae_precision,
        # Where a stage is not sharded, the plan does not depend on it.
        modulation=choose_modulation(
            training.modulation, "full_shard", pytorch_version(config), model.lora
        ),
    )


@dataclass(frozen=True)
class Unplanned:
    """Why a model has no plan, and the fix; ``broken`` if it can never have one."""

    reason: str
    fix: str
    broken: bool = False


def unplanned(config: RunConfig) -> Unplanned | None:
    """Return why the run's model has no plan; None if it has one.

    Shipped presets have plans. Where PyTorch is installed, an added, edited or custom preset is
    measured now, once.
    """
    model = config.model.job_config()
    if model.preset is None:
        return Unplanned(
            "model.preset is not set: the FLOPs and memory of the script's model are unknown",
            "name the preset that is closest to it, or state steps_per_second",
        )
    return _unplanned(model.preset, model.preset_content) or _wrong_targets(model)


def custom_plan(config: RunConfig) -> str | None:
    """Return the JSON of a custom preset's plan for the job; None for other presets."""
    model = config.model
    if model.preset is None or model.preset_content is None or unplanned(config):
        return None
    return plan_path(model.preset, model.preset_content).read_text(encoding="utf-8")


@cache
def _unplanned(preset: str, content: str | None) -> Unplanned | None:
    problem = _plan_problem(preset, content)
    if problem is None or not (find_spec("torch") and find_spec("diffusers")):
        return problem
    with tempfile.TemporaryDirectory() as folder:
        argument = preset
        if content is not None:
            path = Path(folder) / Path(preset).name
            path.write_text(content, encoding="utf-8")
            argument = str(path)
        # In its own process: PyTorch takes seconds to import, and memory.
        command = [sys.executable, "-m", MEASURE_MODULE, argument]
        result = subprocess.run(command, capture_output=True, check=False, text=True)
    plan_preset.cache_clear()
    if result.returncode and content is not None:
        line = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        reason = line.removeprefix(f"{argument}: ")
        if result.returncode == UNMEASURED:
            return Unplanned(
                f"{preset}: its FLOPs and memory cannot be measured: {reason}",
                "measure a stage with `sm-train measure`, and state its steps_per_second",
            )
        return Unplanned(
            f"{preset}: the model cannot be built: {reason}",
            "correct the preset's sizes",
            broken=True,
        )
    return _plan_problem(preset, content)


def _wrong_targets(model: ModelConfig) -> Unplanned | None:
    """Return which target of an adapter is no layer of a preset that was measured just now."""
    try:
        plan_model(model, 64, precision="fp32")
    except JobConfigError as error:
        return Unplanned(str(error), "name layers of the preset", broken=True)
    return None


def _plan_problem(preset: str, content: str | None) -> Unplanned | None:
    try:
        # Whether there is a plan does not depend on the size.
        plan_preset(preset, 64, precision="fp32", content=content)
    except UnplannedModelError as error:
        reason, _, fix = str(error).partition("; ")
        return Unplanned(reason, fix)
    return None


def stage_layout(
    config: RunConfig, stage: Any, instance: InstanceType, **change: Any
) -> StageLayout:
    """Return the layout of a stage, with some keys changed, as its memory depends on it.

    ``stage`` is a section of the run file or a stage that is priced.
    """

    def key(name: str) -> Any:
        return change.get(name, getattr(stage, name))

    return StageLayout(
        ema=config.training.ema_decay > 0,
        optimizer=config.training.optimizer.name,
        strategy=key("sharding"),
        world_size=stage.instances * instance.accelerators,
        per_node=instance.accelerators,
        images=key("per_device_batch_size"),
        checkpointing=key("activation_checkpointing"),
    )


def text_encoder_choice(
    config: RunConfig, plan: ModelPlan, layout: StageLayout, instance: InstanceType
) -> TextEncoderChoice:
    """Return where the jobs place frozen text encoders, as they will decide, and why."""
    memory = instance.accelerator_memory_gib
    return choose_text_encoders(
        config.training.text_encoders,
        plan,
        layout,
        gpu_memory=None if memory is None else memory * 2**30,
        pytorch=pytorch_version(config),
    )


def planned_text_encoders(
    config: RunConfig, plan: ModelPlan, layout: StageLayout, instance: InstanceType
) -> tuple[TextEncoderPlacement, bool]:
    """Return where frozen text encoders are planned to be, and whether the jobs surely agree.

    They decide by the memory that the GPU reports, and by their PyTorch.
    """
    placement = text_encoder_choice(config, plan, layout, instance).placement
    if config.training.text_encoders != "auto":
        return placement, True
    if pytorch_version(config) is None or instance.accelerator_memory_gib is None:
        return placement, False
    smaller = replace(
        instance, accelerator_memory_gib=_REPORTED_MEMORY * instance.accelerator_memory_gib
    )
    return placement, text_encoder_choice(config, plan, layout, smaller).placement == placement


_REPORTED_MEMORY = 0.9
"""The least share of its nominal memory that a GPU reports: 22.1 of an A10G's 24 GiB."""


def memory_fit(config: RunConfig, stage: Any, **change: Any) -> MemoryFit | None:
    """Return the memory of a stage with some keys changed; None if the model has no plan.

    Text encoders are where the job will place them.
    """
    plan = plan_for(config, stage.resolution)
    if plan is None:
        return None
    instance = instance_type(config.cluster.instance_type)
    layout = stage_layout(config, stage, instance, **change)
    chosen = text_encoder_choice(config, plan, layout, instance)
    return plan.memory(layout, chosen.placement)


def moved_text_encoders(config: RunConfig, stage: Any) -> TextEncoderChoice | None:
    """Return where text encoders are that not every GPU holds, and why; None if each does."""
    plan, instance = plan_for(config, stage.resolution), instance_type(config.cluster.instance_type)
    if plan is None:
        return None
    chosen = text_encoder_choice(config, plan, stage_layout(config, stage, instance), instance)
    return None if chosen.placement == "replicated" else chosen


def possible_placements(config: RunConfig, plan: ModelPlan) -> Sequence[TextEncoderPlacement]:
    """Return where a run's text encoders may be on any cluster, preferred places first."""
    setting = config.training.text_encoders
    if setting != "auto":
        return (setting,)
    if not plan.text_bytes:
        return ("replicated",)
    version = pytorch_version(config)
    if version is None or major_minor(version) < FSDP2_PYTORCH:
        return ("replicated", "cpu")
    return ("replicated", "sharded", "cpu")


def fits(config: RunConfig, stage: Any, **change: Any) -> bool:
    """Return whether a stage, with some keys changed, is planned to fit a GPU; False if unknown."""
    need = memory_fit(config, stage, **change)
    memory = instance_type(config.cluster.instance_type).accelerator_memory_gib
    return need is not None and memory is not None and need.gib <= USABLE_MEMORY * memory


def stages_over(config: RunConfig, gib: float) -> Iterator[tuple[int, StageSection, MemoryFit]]:
    """Yield the number, the stage and the memory of stages that need more than ``gib`` of a GPU."""
    for number, stage in enumerate(config.stages):
        need = memory_fit(config, stage)
        if need is not None and need.gib > gib:
            yield number, stage, need


def stages_short_of_memory(config: RunConfig) -> list[str]:
    """Return a sentence for each stage that needs more memory than a GPU has."""
    available = instance_type(config.cluster.instance_type).accelerator_memory_gib or math.inf
    return [
        f"{stage.name} does not fit: it needs about {need.gib:.0f} GiB of each GPU's "
        f"{available:.0f}; `sm-train check` names a change that fits"
        for _, stage, need in stages_over(config, available)
    ]


def candidate_changes(stage: Any, instance: InstanceType) -> list[StageChange]:
    """List changes that save memory, by their estimated slowdown; the effective batch stays.

    Activation checkpointing takes a third more time, or a sixth; the slowdowns of sharding and of
    smaller batches are assumed.
    """
    strategies = STRATEGIES[STRATEGIES.index(stage.sharding) :]
    if stage.instances * instance.accelerators == 1:
        strategies = (stage.sharding,)
    batch_size = stage.per_device_batch_size
    batch_sizes = [size for size in range(batch_size, 0, -1) if batch_size % size == 0]
    checkpointing = CHECKPOINTING[CHECKPOINTING.index(stage.activation_checkpointing) :]

    def slowdown(candidate: tuple[str, int, ActivationCheckpointing]) -> float:
        strategy, size, recompute = candidate
        communication = 0.05 * STRATEGIES.index(strategy)
        batches = 0.15 * math.log2(batch_size / size)
        return communication + batches + RECOMPUTATION[recompute] - 1

    candidates = sorted(product(strategies, batch_sizes, checkpointing), key=slowdown)
    return [_change(stage, *candidate) for candidate in candidates]


def smallest_change(config: RunConfig, stage: Any) -> StageChange | None:
    """Return the first of :func:`candidate_changes` with which a stage fits; None if none does."""
    changes = candidate_changes(stage, instance_type(config.cluster.instance_type))
    return next((change for change in changes if fits(config, stage, **change)), None)


def _change(
    stage: Any, sharding: str, size: int, checkpointing: ActivationCheckpointing
) -> StageChange:
    keys = {
        "sharding": sharding,
        "per_device_batch_size": size,
        "gradient_accumulation_steps": stage.gradient_accumulation_steps
        * (stage.per_device_batch_size // size),
        "activation_checkpointing": checkpointing,
    }
    return {key: value for key, value in keys.items() if value != getattr(stage, key)}
