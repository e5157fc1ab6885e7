"""Print the utilization that the options of a stage are predicted to reach, and published ones.

    python benchmarks/utilization.py

For each preset and GPU the fastest setting without and with compilation is shown: sharding,
activation checkpointing and images per pass that fit the GPU's memory, on 16 instances in bf16 from
precomputed latents. Published figures are those of ``data/speeds.csv``: the best one of a source,
model and GPU. MFU is model FLOP/s ÷ the dense bf16 peak, without recomputation (PaLM, appendix B).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from sm_train.cost.instances import USABLE_MEMORY, InstanceType, instance_type
from sm_train.cost.speed_model import (
    RECOMPUTATION,
    ActivationCheckpointing,
    StepWork,
    images_per_second,
)
from sm_train.entrypoints.planning.memory import ModelPlan, plan_preset
from speed_calibration import speed_points

PRESETS = (
    ("sd2", 512),
    ("sdxl", 1024),
    ("dit-xl", 512),
    ("mmdit-2b", 512),
    ("mmdit-8b", 1024),
    ("mmdit-20b", 1024),
)
TYPES = ("ml.p4de.24xlarge", "ml.p5.48xlarge", "ml.p6-b200.48xlarge")
INSTANCES = 16
WAYS = (("bf16", False, "bf16"), ("bf16, compiled", True, "bf16"), ("fp8, compiled", True, "fp8"))
STRATEGIES = ("none", "hybrid_shard", "full_shard")
CHECKPOINTING: tuple[ActivationCheckpointing, ...] = tuple(RECOMPUTATION)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
_GIB = 2**30
LANGUAGE_MODELS = "MosaicML llm-foundry"
"""Left out of the published figures: torchtitan stands for language models."""


@dataclass(frozen=True)
class Setting:
    """Options of a stage and the MFU that is predicted with them."""

    mfu: float
    strategy: str
    checkpointing: ActivationCheckpointing
    images: int

    def __str__(self) -> str:
        checkpointing = {False: "", "selective": ", selective", True: ", checkpointing"}
        options = f"{self.strategy}{checkpointing[self.checkpointing]}, {self.images} images"
        return f"**{self.mfu:.0%}** ({options})"


def main() -> None:
    """Print both tables in Markdown."""
    kinds = [instance_type(name) for name in TYPES]
    names = [kind.accelerator.split("-")[0] for kind in kinds]
    print(f"| preset | precision | {' | '.join(names)} |\n|---|---|{'---|' * len(kinds)}")
    for preset, resolution in PRESETS:
        plan = plan_preset(preset, resolution, precision="bf16")
        for options, compiled, precision in WAYS:
            shown = " | ".join(cell(plan, kind, precision, compiled=compiled) for kind in kinds)
            print(f"| `{preset}`, {resolution} px | {options} | {shown} |")
    print("\n| published | GPUs | compiled | MFU |\n|---|---|---|---|")
    for line in published():
        print(line)


def cell(plan: ModelPlan, kind: InstanceType, precision: str, *, compiled: bool) -> str:
    """Return the fastest setting as a cell of the table."""
    if kind.gpu(precision) is None:
        return f"no {precision}"
    found = best(plan, kind, precision, compiled=compiled)
    return "does not fit" if found is None else str(found)


def best(plan: ModelPlan, kind: InstanceType, precision: str, *, compiled: bool) -> Setting | None:
    """Return the fastest setting that fits; None if none does."""
    settings = (
        setting(plan, kind, strategy, checkpointing, images, precision, compiled=compiled)
        for strategy, checkpointing, images in product(STRATEGIES, CHECKPOINTING, BATCHES)
        if fits(plan, kind, strategy, checkpointing, images)
    )
    return max(settings, key=lambda found: found.mfu, default=None)


def fits(
    plan: ModelPlan,
    kind: InstanceType,
    strategy: str,
    checkpointing: ActivationCheckpointing,
    images: int,
) -> bool:
    """Return whether the plan leaves a tenth of the GPU's memory free; latents are precomputed."""
    fixed = plan.fixed_bytes(
        ema=True,
        optimizer="adamw",
        strategy=strategy,
        world_size=INSTANCES * kind.accelerators,
        per_node=kind.accelerators,
    )
    used = (
        fixed
        - plan.frozen_bytes("replicated", 1)
        + plan.activation_bytes(images, checkpointing=checkpointing)
    )
    return used <= USABLE_MEMORY * (kind.accelerator_memory_gib or 0) * _GIB


def setting(
    plan: ModelPlan,
    kind: InstanceType,
    strategy: str,
    checkpointing: ActivationCheckpointing,
    images: int,
    precision: str,
    *,
    compiled: bool,
) -> Setting:
    """Return the predicted MFU of one setting, relative to the peak of bf16."""
    gpu = kind.gpu(precision)
    assert gpu is not None
    work = StepWork(
        images=images,
        passes=1,
        flops=plan.training_flops_per_image,
        activation_bytes=plan.kept_bytes,
        parameters=plan.parameters,
        sharding=strategy,
        communication_units=plan.communication_units(strategy),
        activation_checkpointing=checkpointing,
        compiled=compiled,
        precision=precision,
        fp8=plan.fp8 if precision == "fp8" else None,
    )
    speed = images_per_second(work, gpu, kind.network(INSTANCES))
    gpus = INSTANCES * kind.accelerators
    return Setting(speed * work.flops / (gpus * gpu.peak_flops), strategy, checkpointing, images)


def published() -> Iterator[str]:
    """Yield the row with the highest MFU of each source, model and GPU."""
    rows: dict[tuple[str, str, str, bool], tuple[float, int, int]] = {}
    for point in speed_points():
        if point.source.startswith(LANGUAGE_MODELS):
            continue
        name = point.gpu.name.split("-")[0]
        key = (point.source, point.model, name, point.work.compiled)
        gpus = point.network.gpus
        mfu = point.images_per_second * point.work.flops / (gpus * point.gpu.peak_flops)
        rows[key] = max(rows.get(key, (0.0, 0, 0)), (mfu, gpus, point.resolution))
    for (source, model, name, compiled), (mfu, gpus, resolution) in sorted(rows.items()):
        unit = "tokens" if model.startswith("llama") else "px"
        fused = "yes" if compiled else "no"
        print_name = f"{source}: {model}, {resolution:,} {unit}"
        yield f"| {print_name} | {gpus} × {name} | {fused} | {mfu:.0%} |"


if __name__ == "__main__":
    main()
