"""Whether each process keeps whole gradients while micro-batches accumulate.

Then they are summed over processes once a step, and not with every micro-batch.
"""

from __future__ import annotations

from sm_train.entrypoints.common.job_config import JobConfig
from sm_train.entrypoints.planning.layers import UnplannedModelError
from sm_train.entrypoints.planning.memory import plan_preset

_BYTES = 4
"""Of each weight's gradient: FSDP2 accumulates in the precision in which it sums, fp32."""

_USABLE = 0.9
"""Of a GPU's memory: CUDA's context, NCCL's buffers and fragmentation need some (assumed)."""


def keeps_whole_gradients(
    settings: JobConfig, processes: int, per_node: int, gpu_memory: int | None
) -> bool:
    """Where they fit beside all else, by the plan of the model; DDP has them anyway.

    ``per_node`` of the ``processes`` share a machine. ``gpu_memory`` are the bytes of each one's
    GPU, None where it has none.
    """
    stage, training = settings.stage, settings.training
    if stage.sharding == "none" or processes == 1 or gpu_memory is None:
        return True
    try:
        plan = plan_preset(settings.model.preset, stage.resolution, precision=training.precision)
    except UnplannedModelError:
        return False
    fixed = plan.fixed_bytes(
        ema=training.ema_decay > 0,
        strategy=stage.sharding,
        world_size=processes,
        per_node=per_node,
    )
    activations = plan.activation_bytes(
        stage.per_device_batch_size, checkpointing=stage.activation_checkpointing
    )
    needed = fixed + activations + _BYTES * plan.parameters
    return needed <= _USABLE * gpu_memory
