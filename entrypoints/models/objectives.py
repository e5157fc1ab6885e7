"""What a network learns to predict: noise or velocity by diffusion, or the flow between the two.

Both kinds offer the same: noisy samples with their timesteps and targets, and the scheduler that
samples what was learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from numpy.typing import NDArray
from sm_train.entrypoints.common.job_config import JobConfigError, ModelConfig
from torch import Tensor

SAMPLERS = ("DDIMScheduler", "FlowMatchEulerDiscreteScheduler")
"""Diffusers' classes that draw what was learned."""

_BASE_SIDE = 256
"""Pixels of the side at which timesteps are not shifted (arXiv 2403.03206, section 5.3)."""


class DiffusionTarget(NamedTuple):
    """What the network sees, ``noisy`` (B, C, H, W) at ``timesteps`` (B,), and what it should say.

    ``weights`` (B,) weigh each sample's mean squared error; None where all weigh the same.
    """

    noisy: Tensor
    timesteps: Tensor
    target: Tensor
    weights: Tensor | None = None


class Objective(Protocol):
    """How ``images`` and ``noise`` (both B, C, H, W) become a task.

    ``uniform`` (B,) in (0, 1) chooses the timesteps. ``sampler`` draws what was learned.
    """

    def task(
        self, images: Tensor, noise: Tensor, uniform: NDArray[np.float64]
    ) -> DiffusionTarget: ...

    def sampler(self) -> Any: ...


def objective_of(preset: Mapping[str, Any], model: ModelConfig, resolution: int) -> Objective:
    """What ``preset`` learns at ``resolution`` pixels, as the run file has it.

    Raises:
        SettingsError: the two do not go together.
    """
    prediction = model.prediction_type or preset["prediction_type"]
    if (prediction == "flow") != (preset["prediction_type"] == "flow"):
        raise JobConfigError(f"model.prediction_type: {model.preset} cannot learn {prediction}")
    if prediction == "flow":
        return RectifiedFlow(model.timestep_shift or resolution / _BASE_SIDE)
    return Diffusion.of(preset["diffusion"], prediction, model)


@dataclass(frozen=True)
class Diffusion:
    """DDPM (Ho et al., arXiv 2006.11239) on ``scheduler``'s noise levels.

    A noisy sample is α·image + σ·noise. The target is the noise or the velocity α·noise − σ·image
    (Salimans and Ho, arXiv 2202.00512). ``levels`` (2 or 3, timesteps, 1, 1, 1) are α, σ and, where
    samples are weighted, the weights of min-SNR-γ (Hang et al., arXiv 2303.09556).
    """

    scheduler: Any
    levels: Tensor

    @classmethod
    def of(cls, schedule: Mapping[str, Any], prediction: str, model: ModelConfig) -> Diffusion:
        """Zero terminal SNR rescales the schedule so that its last step is pure noise
        (Lin et al., arXiv 2305.08891); it needs the velocity, since noise alone tells no noise.
        """
        from diffusers import DDPMScheduler

        if model.zero_terminal_snr and prediction == "epsilon":
            raise JobConfigError("model.zero_terminal_snr: needs prediction_type: v_prediction")
        scheduler = DDPMScheduler(
            **schedule,
            prediction_type=prediction,
            rescale_betas_zero_snr=model.zero_terminal_snr,
            # From the last timestep on, which "leading" would leave out (the same paper, 3.3).
            timestep_spacing="trailing" if model.zero_terminal_snr else "leading",
        )
        kept = scheduler.alphas_cumprod.double()
        levels = [kept.sqrt(), (1 - kept).sqrt()]
        if model.min_snr_gamma is not None:
            levels.append(_min_snr_weights(kept, prediction, model.min_snr_gamma))
        return cls(scheduler, torch.stack(levels).float()[:, :, None, None, None])

    def task(self, images: Tensor, noise: Tensor, uniform: NDArray[np.float64]) -> DiffusionTarget:
        # Looked up on the host: what the device needs of the tables are a few numbers a sample.
        drawn = torch.from_numpy((uniform * self.levels.shape[1]).astype(np.int64))
        timesteps = drawn.to(images.device, non_blocking=True)
        levels = self.levels.index_select(1, drawn).to(images.device, non_blocking=True)
        signal, sigma, *weights = levels
        noisy = torch.addcmul(signal * images, sigma, noise)
        target = noise
        if self.scheduler.config.prediction_type == "v_prediction":
            target = torch.addcmul(signal * noise, sigma, images, value=-1)
        return DiffusionTarget(noisy, timesteps, target, weights[0].flatten() if weights else None)

    def sampler(self) -> Any:
        """DDIM (Song et al., arXiv 2010.02502)."""
        from diffusers import DDIMScheduler

        return DDIMScheduler.from_config(self.scheduler.config)


def _min_snr_weights(alphas_cumprod: Tensor, prediction: str, gamma: float) -> Tensor:
    """min(SNR, γ) / SNR for the noise, / (SNR + 1) for the velocity; (timesteps,)."""
    snr = alphas_cumprod / (1 - alphas_cumprod)
    # As factors of SNR, so that no SNR of zero is divided by.
    clipped = torch.clamp(gamma / snr, max=1.0)
    return clipped if prediction == "epsilon" else clipped * snr / (snr + 1)


@dataclass(frozen=True)
class RectifiedFlow:
    """Straight lines from image to noise, z = (1 − t)·image + t·noise; the target is their slope.

    t is logit-normal, then moved towards noise by ``shift``: t' = shift·t / (1 + (shift − 1)·t),
    with the root of the number of pixels, since more pixels hide less under the same noise (Esser
    et al., arXiv 2403.03206, sections 3.1 and 5.3).
    """

    shift: float

    def task(self, images: Tensor, noise: Tensor, uniform: NDArray[np.float64]) -> DiffusionTarget:
        normal = torch.special.ndtri(torch.from_numpy(uniform))
        unshifted = torch.sigmoid(normal)
        drawn = self.shift * unshifted / (1 + (self.shift - 1) * unshifted)
        times = drawn.float().to(images.device, non_blocking=True)
        noisy = torch.lerp(images, noise, times[:, None, None, None])
        return DiffusionTarget(noisy, 1000.0 * times, noise - images)

    def sampler(self) -> Any:
        """Euler's steps along the flow."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        return FlowMatchEulerDiscreteScheduler(shift=self.shift)


def loss(prediction: Tensor, task: DiffusionTarget) -> Tensor:
    """The mean squared error of a micro-batch, a scalar."""
    if task.weights is None:
        return F.mse_loss(prediction.float(), task.target.float())
    return per_sample_loss(prediction, task).mean()


def per_sample_loss(prediction: Tensor, task: DiffusionTarget) -> Tensor:
    """The mean squared error of each sample, weighted as in training; (B,)."""
    squares = F.mse_loss(prediction.float(), task.target.float(), reduction="none")
    each = squares.mean(dim=(1, 2, 3))
    return each if task.weights is None else each * task.weights
