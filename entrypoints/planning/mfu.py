"""How much of its GPUs' arithmetic a job turns into training: model FLOP utilization (MFU).

FLOP that the model needs (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B), not those that
recomputation adds, over what the GPUs could do in the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sm_train.entrypoints.common.job_config import JobConfig
from sm_train.entrypoints.planning.layers import UnplannedModelError
from sm_train.entrypoints.planning.memory import plan_preset

PEAK_FLOPS = {
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A10G": 70e12,
    "L40S": 362e12,
}
"""Dense bf16 FLOP/s by a part of the device's name (NVIDIA's data sheets, SXM forms)."""


@dataclass(frozen=True)
class MfuMeter:
    """``flops_per_image`` of forward and backward pass; ``peak`` FLOP/s of one GPU."""

    flops_per_image: float
    peak: float

    def share(self, images_per_second: float, gpus: int) -> float:
        """The MFU of ``gpus`` that train so many images a second together."""
        return images_per_second * self.flops_per_image / (gpus * self.peak)


def utilization(settings: JobConfig, device: torch.device) -> MfuMeter | None:
    """For this run on ``device``; None where the peak or the model's FLOP are not known.

    In fp32 the peak is not: how much of it runs as TF32 depends on PyTorch's settings.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return of_device(settings, name)


def of_device(settings: JobConfig, name: str) -> MfuMeter | None:
    """:func:`utilization` by the device's name."""
    training = settings.training
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    if peak is None or training.precision != "bf16":
        return None
    try:
        plan = plan_preset(
            settings.model.preset,
            settings.stage.resolution,
            precision=training.precision,
        )
    except UnplannedModelError:
        return None
    return MfuMeter(plan.training_flops_per_image, peak)
