"""What networks learn: targets and weights are those of the papers and of diffusers' schedulers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.common.job_config import JobConfigError, ModelConfig
from sm_train.entrypoints.models.components import read_preset
from sm_train.entrypoints.models.objectives import (
    Diffusion,
    Objective,
    RectifiedFlow,
    loss,
    objective_of,
)

PLAIN = ModelConfig("sd2", None, False, None, None)
LEVELS = np.array([0.0005, 0.25, 0.5, 0.9995])


def objective(resolution: int = 512, preset: str = "sd2", **changes: Any) -> Objective:
    model = replace(PLAIN, preset=preset, **changes)
    return objective_of(read_preset(preset), model, resolution)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images, noise = torch.randn(2, 4, 3, 8, 8, generator=generator)
    return images, noise


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_diffusion_mixes_by_the_schedule(prediction: str) -> None:
    images, noise = pair()
    kind = objective(prediction_type=prediction)
    assert isinstance(kind, Diffusion)
    task = kind.task(images, noise, LEVELS)
    assert task.timesteps.tolist() == [0, 250, 500, 999]
    kept = kind.scheduler.alphas_cumprod[task.timesteps][:, None, None, None]
    torch.testing.assert_close(task.noisy, kept.sqrt() * images + (1 - kept).sqrt() * noise)
    wanted = noise if prediction == "epsilon" else kept.sqrt() * noise - (1 - kept).sqrt() * images
    torch.testing.assert_close(task.target, wanted)


def test_zero_terminal_snr_ends_in_pure_noise_and_samples_from_there() -> None:
    images, noise = pair()
    kind = objective(zero_terminal_snr=True)
    task = kind.task(images, noise, LEVELS)
    assert torch.equal(task.noisy[-1], noise[-1])
    assert torch.equal(task.target[-1], -images[-1])
    sampler = kind.sampler()
    sampler.set_timesteps(10)
    assert sampler.timesteps[0] == 999
    assert float(sampler.alphas_cumprod[-1]) == 0.0
    plain = objective().task(images, noise, LEVELS)
    assert not torch.equal(plain.noisy[-1], noise[-1])
    with pytest.raises(JobConfigError, match="needs prediction_type: v_prediction"):
        objective(zero_terminal_snr=True, prediction_type="epsilon")


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_min_snr_weighs_as_diffusers_does(prediction: str) -> None:
    from diffusers.training_utils import compute_snr

    images, noise = pair()
    kind = objective(prediction_type=prediction, min_snr_gamma=5.0)
    assert isinstance(kind, Diffusion)
    task = kind.task(images, noise, LEVELS)
    snr = compute_snr(kind.scheduler, task.timesteps)
    wanted = snr.clamp(max=5.0) / (snr if prediction == "epsilon" else snr + 1)
    assert task.weights is not None
    torch.testing.assert_close(task.weights, wanted)
    prediction_ = torch.zeros_like(images)
    by_hand = ((task.target**2).mean(dim=(1, 2, 3)) * wanted).mean()
    torch.testing.assert_close(loss(prediction_, task), by_hand)


def test_min_snr_has_no_division_by_a_zero_snr() -> None:
    images, noise = pair()
    task = objective(min_snr_gamma=5.0, zero_terminal_snr=True).task(images, noise, LEVELS)
    assert task.weights is not None
    assert torch.isfinite(task.weights).all()


@pytest.mark.parametrize(("resolution", "shift"), [(256, 1.0), (512, 2.0), (1024, 4.0)])
def test_a_flow_runs_from_image_to_noise_and_shifts_with_the_resolution(
    resolution: int, shift: float
) -> None:
    images, noise = pair()
    kind = objective(resolution, "mmdit-2b")
    assert kind == RectifiedFlow(shift)
    task = kind.task(images, noise, LEVELS)
    times = (task.timesteps / 1000)[:, None, None, None]
    torch.testing.assert_close(task.noisy, (1 - times) * images + times * noise)
    assert torch.equal(task.target, noise - images)
    # The middle of the logit-normal is a half, shifted.
    assert float(times[2]) == pytest.approx(shift / (1 + shift))
    assert kind.sampler().config.shift == shift


def test_times_are_logit_normal() -> None:
    uniform = (np.arange(100_000) + 0.5) / 100_000
    images = torch.zeros(len(uniform), 1, 1, 1)
    times = RectifiedFlow(1.0).task(images, images, uniform).timesteps.double() / 1000
    logits = torch.log(times / (1 - times))
    assert float(logits.mean()) == pytest.approx(0.0, abs=1e-3)
    assert float(logits.std()) == pytest.approx(1.0, abs=1e-2)


@given(st.floats(1e-6, 1 - 1e-6), st.floats(0.5, 8.0))
def test_a_perfect_flow_is_walked_back_to_the_image(level: float, shift: float) -> None:
    """From any point of the line, its slope leads to the image."""
    images, noise = pair()
    task = RectifiedFlow(shift).task(images[:1], noise[:1], np.array([level]))
    back = task.noisy - (task.timesteps / 1000)[:, None, None, None] * task.target
    torch.testing.assert_close(back, images[:1], rtol=1e-3, atol=1e-3)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(JobConfigError, match="mmdit-2b cannot learn epsilon"):
        objective(preset="mmdit-2b", prediction_type="epsilon")
    with pytest.raises(JobConfigError, match="sd2 cannot learn flow"):
        objective(prediction_type="flow")
