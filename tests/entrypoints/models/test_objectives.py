"""Training targets and loss weights are those of the papers and of diffusers' schedulers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.job_interface.job_config import JobConfigError, ModelConfig
from sm_train.entrypoints.models.components import read_preset
from sm_train.entrypoints.models.objectives import (
    DiffusionObjective,
    Objective,
    RectifiedFlow,
    build_objective,
    loss,
)

PLAIN = ModelConfig("sd2", None, False, None, None)
LEVELS = np.array([0.0005, 0.25, 0.5, 0.9995])


def objective(resolution: int = 512, preset: str = "sd2", **changes: Any) -> Objective:
    model = replace(PLAIN, preset=preset, **changes)
    return build_objective(read_preset(preset), model, resolution)


def images_and_noise() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images, noise = torch.randn(2, 4, 3, 8, 8, generator=generator)
    return images, noise


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_diffusion_adds_noise_by_the_schedule(prediction: str) -> None:
    images, noise = images_and_noise()
    trained = objective(prediction_type=prediction)
    assert isinstance(trained, DiffusionObjective)
    target = trained.make_target(images, noise, LEVELS)
    assert target.timesteps.tolist() == [0, 250, 500, 999]
    alphas = trained.scheduler.alphas_cumprod[target.timesteps][:, None, None, None]
    torch.testing.assert_close(target.noisy, alphas.sqrt() * images + (1 - alphas).sqrt() * noise)
    expected = (
        noise if prediction == "epsilon" else alphas.sqrt() * noise - (1 - alphas).sqrt() * images
    )
    torch.testing.assert_close(target.target, expected)


def test_zero_terminal_snr_ends_in_pure_noise_and_samples_from_it() -> None:
    images, noise = images_and_noise()
    trained = objective(zero_terminal_snr=True)
    target = trained.make_target(images, noise, LEVELS)
    assert torch.equal(target.noisy[-1], noise[-1])
    assert torch.equal(target.target[-1], -images[-1])
    scheduler = trained.inference_scheduler()
    scheduler.set_timesteps(10)
    assert scheduler.timesteps[0] == 999
    assert float(scheduler.alphas_cumprod[-1]) == 0.0
    plain = objective().make_target(images, noise, LEVELS)
    assert not torch.equal(plain.noisy[-1], noise[-1])
    with pytest.raises(JobConfigError, match="needs prediction_type: v_prediction"):
        objective(zero_terminal_snr=True, prediction_type="epsilon")


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_min_snr_weights_are_those_of_diffusers(prediction: str) -> None:
    from diffusers.training_utils import compute_snr

    images, noise = images_and_noise()
    trained = objective(prediction_type=prediction, min_snr_gamma=5.0)
    assert isinstance(trained, DiffusionObjective)
    target = trained.make_target(images, noise, LEVELS)
    snr = compute_snr(trained.scheduler, target.timesteps)
    expected = snr.clamp(max=5.0) / (snr if prediction == "epsilon" else snr + 1)
    assert target.weights is not None
    torch.testing.assert_close(target.weights, expected)
    prediction_ = torch.zeros_like(images)
    expected_loss = ((target.target**2).mean(dim=(1, 2, 3)) * expected).mean()
    torch.testing.assert_close(loss(prediction_, target), expected_loss)


def test_min_snr_weights_are_finite_at_zero_snr() -> None:
    images, noise = images_and_noise()
    target = objective(min_snr_gamma=5.0, zero_terminal_snr=True).make_target(images, noise, LEVELS)
    assert target.weights is not None
    assert torch.isfinite(target.weights).all()


@pytest.mark.parametrize(("resolution", "shift"), [(256, 1.0), (512, 2.0), (1024, 4.0)])
def test_flow_goes_from_image_to_noise_and_shifts_with_resolution(
    resolution: int, shift: float
) -> None:
    images, noise = images_and_noise()
    trained = objective(resolution, "mmdit-2b")
    assert trained == RectifiedFlow(shift)
    target = trained.make_target(images, noise, LEVELS)
    times = (target.timesteps / 1000)[:, None, None, None]
    torch.testing.assert_close(target.noisy, (1 - times) * images + times * noise)
    assert torch.equal(target.target, noise - images)
    # The middle of the logit-normal is a half, shifted.
    assert float(times[2]) == pytest.approx(shift / (1 + shift))
    assert trained.inference_scheduler().config.shift == shift


def test_flow_times_are_logit_normal() -> None:
    uniform = (np.arange(100_000) + 0.5) / 100_000
    images = torch.zeros(len(uniform), 1, 1, 1)
    times = RectifiedFlow(1.0).make_target(images, images, uniform).timesteps.double() / 1000
    logits = torch.log(times / (1 - times))
    assert float(logits.mean()) == pytest.approx(0.0, abs=1e-3)
    assert float(logits.std()) == pytest.approx(1.0, abs=1e-2)


@given(st.floats(1e-6, 1 - 1e-6), st.floats(0.5, 8.0))
def test_flow_velocity_leads_back_to_the_image(level: float, shift: float) -> None:
    images, noise = images_and_noise()
    target = RectifiedFlow(shift).make_target(images[:1], noise[:1], np.array([level]))
    restored = target.noisy - (target.timesteps / 1000)[:, None, None, None] * target.target
    torch.testing.assert_close(restored, images[:1], rtol=1e-3, atol=1e-3)


def test_unsupported_prediction_type_is_refused() -> None:
    with pytest.raises(JobConfigError, match="mmdit-2b cannot learn epsilon"):
        objective(preset="mmdit-2b", prediction_type="epsilon")
    with pytest.raises(JobConfigError, match="sd2 cannot learn flow"):
        objective(prediction_type="flow")
