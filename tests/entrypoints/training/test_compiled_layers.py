"""Every family compiles: each repeated layer is one graph, and computes what it did before."""

from __future__ import annotations

import copy

import pytest
import torch
from sm_train.cost.speed_model import ActivationCheckpointing
from sm_train.entrypoints.models.components import preset_caption_tokens, read_preset
from sm_train.entrypoints.models.pipeline import Text, predict
from sm_train.entrypoints.planning.measure import network_inputs
from sm_train.entrypoints.training.compilation import compile_repeated
from sm_train.entrypoints.training.parallelize import checkpoint_every_second
from torch import Tensor, nn

from tests.support.models import build

pytestmark = pytest.mark.integration

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


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, "selective", True])
@pytest.mark.parametrize("preset", FAMILIES)
def test_each_repeated_layer_is_one_graph(
    preset: str, checkpointing: ActivationCheckpointing
) -> None:
    """``fullgraph`` raises at a graph break; the arithmetic is PyTorch's own, without kernels."""
    network = build(preset).network
    expected, expected_gradients = output_and_gradients(copy.deepcopy(network).train(), preset)
    if checkpointing == "selective":
        checkpoint_every_second(network)
    elif checkpointing:
        network.enable_gradient_checkpointing()
    torch._dynamo.reset()
    layers = compile_repeated(network.train(), one_shape=True, fullgraph=True, backend="aot_eager")
    assert len(layers) >= 2
    output, gradients = output_and_gradients(network, preset)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients, expected_gradients)
