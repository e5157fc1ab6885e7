"""Whether a stage fits on its GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from sm_train.cost.alternatives import USABLE_MEMORY
from sm_train.cost.instances import instance_type
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.costing.memory_fit import changes, fit

_IMPACT = (
    "A job that runs out of memory fails in its first steps, after machines, image and data were "
    "paid for; nothing restarts it, since it would fail again."
)
_FIX = (
    "Write what the finding names: the smallest change with which the stage fits at the same "
    "effective batch size."
)
_SOURCE = (
    "the plan of the model's layers (`entrypoints/planning/memory.py`), held against real processes"
)

MEMORY_SHORT = Check(
    "memory-short",
    ("error",),
    means="Weights, gradients, optimizer and activations take more than a GPU has.",
    impact=_IMPACT,
    fix=_FIX,
    source=_SOURCE,
)
MEMORY_TIGHT = Check(
    "memory-tight",
    ("warning",),
    means=f"They take more than {USABLE_MEMORY:.0%} of a GPU's memory. CUDA's context, NCCL's "
    "buffers and fragmentation need some of the rest (assumed).",
    impact=_IMPACT,
    fix=_FIX,
    source=_SOURCE,
)


def memory_findings(config: RunConfig) -> Iterator[Finding]:
    """By the plan of the model: within its error the GPU's memory is called tight."""
    machine = instance_type(config.cluster.instance_type)
    have = machine.accelerator_memory_gib
    for index, stage in enumerate(config.stages):
        found = fit(config, stage)
        if found is None or have is None or found.gib <= USABLE_MEMORY * have:
            continue
        mend = next(
            (
                change
                for change in changes(stage, machine)
                if (other := fit(config, stage, **change)) and other.gib <= USABLE_MEMORY * have
            ),
            None,
        )
        where = f"stages[{index}].per_device_batch_size"
        message = (
            f"{stage.name} takes about {found.gib:.0f} GiB of each {machine.accelerator}'s "
            f"{have:.0f}: {found.states / 2**30:.0f} of weights, gradients and optimizer, "
            f"{found.activations / 2**30:.0f} of activations for {found.images} images"
        )
        fix = (
            "write " + ", ".join(f"{key}: {str(value).lower()}" for key, value in mend.items())
            if mend
            else "take a type with more memory, or a smaller model"
        )
        if found.gib <= have:
            yield MEMORY_TIGHT.found("warning", where, message, fix)
        else:
            yield MEMORY_SHORT.found("error", where, message, fix)
