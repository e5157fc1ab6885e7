"""Checks whether a stage fits in GPU memory."""

from __future__ import annotations

from collections.abc import Iterator

from sm_train.cost.instances import USABLE_MEMORY, instance_type
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding
from sm_train.toolkit.memory.memory_fit import smallest_change, stages_over, unplanned

MEMORY_SHORT = Check("memory-short", ("error",))
MEMORY_TIGHT = Check("memory-tight", ("warning",))

MEMORY_UNPLANNED = Check("memory-unplanned", ("error", "warning"))


def memory_findings(config: RunConfig) -> Iterator[Finding]:
    """Compare each stage's planned memory with its GPU's; within the plan's error it is tight."""
    if problem := unplanned(config):
        yield MEMORY_UNPLANNED.found(
            "error" if problem.broken else "warning", "model.preset", problem.reason, problem.fix
        )
        return
    instance = instance_type(config.cluster.instance_type)
    available = instance.accelerator_memory_gib
    if available is None:
        return
    for index, stage, need in stages_over(config, USABLE_MEMORY * available):
        change = smallest_change(config, stage)
        where = f"stages[{index}].per_device_batch_size"
        message = (
            f"{stage.name} needs about {need.gib:.0f} GiB of each {instance.accelerator}'s "
            f"{available:.0f}: {need.states / 2**30:.0f} for weights, gradients and optimizer, "
            f"{need.activations / 2**30:.0f} for activations of {need.images} images"
        )
        fix = (
            "set " + ", ".join(f"{key}: {str(value).lower()}" for key, value in change.items())
            if change
            else "use an instance type with more memory, or a smaller model"
        )
        if need.gib <= available:
            yield MEMORY_TIGHT.found("warning", where, message, fix)
        else:
            yield MEMORY_SHORT.found("error", where, message, fix)
