"""Training objectives: predict noise or velocity (diffusion), or the velocity of a rectified flow.

An objective makes noisy samples with their timesteps and targets, and provides the scheduler that
samples from the trained model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from numpy.typing import NDArray
from sm_train.entrypoints.job_interface.job_config import (
    JobConfigError,
    ModelConfig,
    PredictionType,
)
from sm_train.entrypoints.models.device_copy import copy_to_device
from sm_train.entrypoints.models.noise_settings import (
    ContradictionError,
    NoiseSettings,
    noise_settings,
    relearned,
)
from torch import Tensor

INFERENCE_SCHEDULERS = ("DDIMScheduler", "FlowMatchEulerDiscreteScheduler")
"""Diffusers' scheduler classes that a final model can have."""

_BASE_SIDE = 256
"""Side in pixels at which timesteps are not shifted (arXiv 2403.03206, section 5.3)."""


class DiffusionTarget(NamedTuple):
    """The network's input, ``noisy`` (B, C, H, W) at ``timesteps`` (B,), and its ``target``.

    ``weights`` (B,) weigh each sample's mean squared error; None if all samples weigh the same.
    """

    noisy: Tensor
    timesteps: Tensor
    target: Tensor
    weights: Tensor | None = None


class Objective(Protocol):
    """Makes training targets from images and noise."""

    @property
    def prediction_type(self) -> str:
        """What the network predicts, as ``model.prediction_type`` names it."""
        ...

    def noise_levels(self) -> dict[str, Any]:
        """Return the settings that determine the noise levels, as JSON can hold them."""
        ...

    def make_target(
        self, images: Tensor, noise: Tensor, uniform: NDArray[np.float64]
    ) -> DiffusionTarget:
        """Return the target for ``images`` and ``noise`` (both B, C, H, W).

        ``uniform`` (B,) in (0, 1) selects the timesteps.
        """
        ...

    def inference_scheduler(self) -> Any:
        """Return the diffusers scheduler that samples from the trained model."""
        ...


def default_shift(resolution: int) -> float:
    """Return the shift of a flow's timesteps for images of ``resolution`` pixels."""
    return resolution / _BASE_SIDE


def build_objective(
    preset: Mapping[str, Any],
    model: ModelConfig,
    resolution: int,
    scheduler: Mapping[str, Any] | None = None,
    prediction_type: PredictionType | None = None,
) -> Objective:
    """Build the objective of ``preset`` at ``resolution`` pixels with the run file's options.

    ``scheduler`` is the configuration of a pretrained network's scheduler: its noise levels and
    prediction type replace the preset's. ``prediction_type`` is what the stage learns instead, None
    if it is the same.

    Raises:
        JobConfigError: the preset cannot be trained with the options.
    """
    if prediction_type is not None:
        model = replace(model, prediction_type=prediction_type)
        scheduler = scheduler and relearned(scheduler, prediction_type)
    try:
        settings = noise_settings(preset, model, scheduler)
    except ContradictionError as error:
        raise JobConfigError(str(error)) from None
    prediction = settings.prediction_type
    needed = preset["prediction_type"] == "flow" if prediction == "flow" else "diffusion" in preset
    if not needed:
        raise JobConfigError(f"model.prediction_type: {model.preset} cannot learn {prediction}")
    if prediction == "flow":
        return RectifiedFlow(settings.shift or default_shift(resolution))
    return DiffusionObjective.from_settings(settings, model)


@dataclass(frozen=True)
class DiffusionObjective:
    """DDPM (Ho et al., arXiv 2006.11239) on ``scheduler``'s noise levels.

    A noisy sample is α·image + σ·noise. The target is the noise or the velocity α·noise − σ·image
    (Salimans and Ho, arXiv 2202.00512). ``levels`` (2 or 3, timesteps, 1, 1, 1) are α, σ and, if
    samples are weighted, the weights of min-SNR-γ (Hang et al., arXiv 2303.09556).
    """

    scheduler: Any
    levels: Tensor

    @property
    def prediction_type(self) -> str:
        """See :attr:`Objective.prediction_type`."""
        return str(self.scheduler.config.prediction_type)

    def noise_levels(self) -> dict[str, Any]:
        """See :meth:`Objective.noise_levels`."""
        config = self.scheduler.config
        betas = config.trained_betas
        return {
            "zero_terminal_snr": config.rescale_betas_zero_snr,
            "num_train_timesteps": config.num_train_timesteps,
            "beta_schedule": config.beta_schedule,
            "beta_start": config.beta_start,
            "beta_end": config.beta_end,
            "trained_betas": None if betas is None else list(betas),
        }

    @classmethod
    def from_settings(cls, settings: NoiseSettings, model: ModelConfig) -> DiffusionObjective:
        """Build the objective from a noise schedule.

        Zero terminal SNR rescales the schedule so that its last timestep is pure noise (Lin et
        al., arXiv 2305.08891). It needs the velocity: at pure noise, predicting the noise gives
        no information about the image.
        """
        from diffusers import DDPMScheduler

        prediction, zero_snr = settings.prediction_type, settings.zero_terminal_snr
        if zero_snr and prediction == "epsilon":
            raise JobConfigError("model.zero_terminal_snr: needs prediction_type: v_prediction")
        scheduler = DDPMScheduler(
            **settings.schedule,
            prediction_type=prediction,
            rescale_betas_zero_snr=zero_snr,
            # "trailing" starts at the last timestep, which "leading" omits (the same paper, 3.3).
            timestep_spacing="trailing" if zero_snr else "leading",
            # Diffusers' Stable Diffusion pipelines set it, whatever the configuration says.
            steps_offset=1,
        )
        alphas_cumprod = scheduler.alphas_cumprod.double()
        levels = [alphas_cumprod.sqrt(), (1 - alphas_cumprod).sqrt()]
        if model.min_snr_gamma is not None:
            levels.append(_min_snr_weights(alphas_cumprod, prediction, model.min_snr_gamma))
        return cls(scheduler, torch.stack(levels).float()[:, :, None, None, None])

    def make_target(
        self, images: Tensor, noise: Tensor, uniform: NDArray[np.float64]
    ) -> DiffusionTarget:
        """See :meth:`Objective.make_target`."""
        # The lookup runs on the CPU: the device needs only a few numbers per sample.
        indices = torch.from_numpy((uniform * self.levels.shape[1]).astype(np.int64))
        timesteps = copy_to_device(indices, images.device)
        levels = copy_to_device(self.levels.index_select(1, indices), images.device)
        alpha, sigma, *weights = levels
        noisy = torch.addcmul(alpha * images, sigma, noise)
        target = noise
        if self.prediction_type == "v_prediction":
            target = torch.addcmul(alpha * noise, sigma, images, value=-1)
        return DiffusionTarget(noisy, timesteps, target, weights[0].flatten() if weights else None)

    def inference_scheduler(self) -> Any:
        """Return a DDIM scheduler (Song et al., arXiv 2010.02502)."""
        from diffusers import DDIMScheduler

        return DDIMScheduler.from_config(self.scheduler.config)


def _min_snr_weights(alphas_cumprod: Tensor, prediction: str, gamma: float) -> Tensor:
    """Return min(SNR, γ) / SNR for the noise, / (SNR + 1) for the velocity; (timesteps,)."""
    snr = alphas_cumprod / (1 - alphas_cumprod)
    # Rearranged to avoid a division by an SNR of zero.
    clipped = torch.clamp(gamma / snr, max=1.0)
    return clipped if prediction == "epsilon" else clipped * snr / (snr + 1)


@dataclass(frozen=True)
class RectifiedFlow:
    """Straight lines from image to noise, z = (1 − t)·image + t·noise; the target is their slope.

    t is logit-normal, then shifted towards noise by ``shift``: t' = shift·t / (1 + (shift − 1)·t).
    The shift grows with the square root of the number of pixels, because the same noise hides less
    of a larger image (Esser et al., arXiv 2403.03206, sections 3.1 and 5.3).
    """

    shift: float

    @property
    def prediction_type(self) -> str:
        """See :attr:`Objective.prediction_type`."""
        return "flow"

    def noise_levels(self) -> dict[str, Any]:
        """See :meth:`Objective.noise_levels`."""
        return {"timestep_shift": self.shift}

    def make_target(
        self, images: Tensor, noise: Tensor, uniform: NDArray[np.float64]
    ) -> DiffusionTarget:
        """See :meth:`Objective.make_target`."""
        normal = torch.special.ndtri(torch.from_numpy(uniform))
        unshifted = torch.sigmoid(normal)
        shifted = self.shift * unshifted / (1 + (self.shift - 1) * unshifted)
        times = copy_to_device(shifted.float(), images.device)
        noisy = torch.lerp(images, noise, times[:, None, None, None])
        return DiffusionTarget(noisy, 1000.0 * times, noise - images)

    def inference_scheduler(self) -> Any:
        """Return a scheduler that takes Euler steps along the flow."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        return FlowMatchEulerDiscreteScheduler(shift=self.shift)


def loss(prediction: Tensor, target: DiffusionTarget) -> Tensor:
    """Return the mean squared error of a micro-batch, a scalar."""
    if target.weights is None:
        return F.mse_loss(prediction.float(), target.target.float())
    return per_sample_loss(prediction, target).mean()


def per_sample_loss(prediction: Tensor, target: DiffusionTarget) -> Tensor:
    """Return the mean squared error of each sample (B,), weighted as in training."""
    squares = F.mse_loss(prediction.float(), target.target.float(), reduction="none")
    errors = squares.mean(dim=(1, 2, 3))
    return errors if target.weights is None else errors * target.weights
