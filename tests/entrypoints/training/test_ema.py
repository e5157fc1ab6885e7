"""The exponential moving average against diffusers' EMAModel."""

from __future__ import annotations

import pytest
import torch
from sm_train.entrypoints.training.ema import ExponentialMovingAverage


@pytest.mark.parametrize("start", [0, 12])
def test_average_equals_diffusers_ema_model(start: int) -> None:
    from diffusers.training_utils import EMAModel

    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(7, 5, generator=generator)) for _ in range(3)]
    ema = ExponentialMovingAverage(parameters, 0.999, start)
    reference = EMAModel(parameters, decay=0.999, update_after_step=start)
    for _ in range(30):
        with torch.no_grad():
            for parameter in parameters:
                parameter += torch.randn(7, 5, generator=generator)
        ema.update()
        reference.step(parameters)
    for average, expected in zip(ema.averages, reference.shadow_params, strict=True):
        # EMAModel subtracts, ours interpolates: equal up to rounding.
        torch.testing.assert_close(average, expected, rtol=1e-5, atol=1e-6)
