"""Model FLOP utilization (MFU): the share of the GPUs' peak arithmetic that trains the model.

Counts the FLOPs that the model needs (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B),
without those of recomputation, over the FLOPs that the GPUs could do in the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_train.entrypoints.job_interface.job_config import JobConfig
from sm_train.entrypoints.planning.memory import UnplannedModelError, plan_model

if TYPE_CHECKING:
    import torch

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
    """``flops_per_image`` are those of forward and backward pass; ``peak`` is one GPU's FLOP/s."""

    flops_per_image: float
    peak: float

    def mfu(self, images_per_second: float, gpus: int) -> float:
        """Return the MFU of ``gpus`` that train ``images_per_second`` together."""
        return images_per_second * self.flops_per_image / (gpus * self.peak)


def mfu_meter(settings: JobConfig, device: torch.device) -> MfuMeter | None:
    """Return the meter of this run on ``device``; None if the peak or the model's plan is unknown.

    That of fp8 is relative to the peak of bf16, as is usual. The peak of fp32 is unknown: how much
    of it runs as TF32 depends on PyTorch's settings.
    """
    if device.type != "cuda":
        return mfu_meter_of(settings, device.type)
    import torch

    return mfu_meter_of(settings, torch.cuda.get_device_name(device))


def mfu_meter_of(settings: JobConfig, device_name: str) -> MfuMeter | None:
    """Create :func:`mfu_meter` from the device's name."""
    training = settings.training
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in device_name), None)
    if peak is None or not training.bf16:
        return None
    try:
        plan = plan_model(
            settings.model,
            settings.stage.resolution,
            precision=training.precision,
            plan=settings.expected.model_plan,
        )
    except UnplannedModelError:
        return None
    return MfuMeter(plan.training_flops_per_image, peak)
