"""Helpers of the tests of compiled layers, which other tests use as well."""

from __future__ import annotations

import torch
from sm_train.entrypoints.models.components import preset_caption_tokens, read_preset
from sm_train.entrypoints.models.pipeline import Text, predict
from sm_train.entrypoints.planning.measure import network_inputs
from torch import Tensor, nn

FAMILIES = ("tiny-sd2", "tiny-sdxl", "tiny-dit", "tiny-mmdit", "tiny-pixels", "digits")


def output_and_gradients(network: nn.Module, preset: str) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)
    side = network.config.sample_size
    noisy, text = network_inputs(
        dict(network.config), side, preset_caption_tokens(read_preset(preset))
    )
    noisy, *parts = (
        None if tensor is None else torch.randn(tensor.shape) for tensor in (noisy, *text)
    )
    text = Text(*parts)
    output = predict(network, noisy, torch.tensor([500.0] * len(noisy)), text, 8)
    output.square().mean().backward()
    return output.detach(), [
        parameter.grad for parameter in network.parameters() if parameter.grad is not None
    ]
