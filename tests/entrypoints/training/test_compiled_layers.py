"""Every family compiles: each repeated layer is one graph, and computes what it did before."""

from __future__ import annotations

import copy

import pytest
import torch
from sm_train.cost.speed_model import ActivationCheckpointing
from sm_train.entrypoints.training.compilation import compile_repeated
from sm_train.entrypoints.training.parallelize import checkpoint_every_second

from tests.entrypoints.training.compiled_layers_support import FAMILIES, output_and_gradients
from tests.support.models import build

pytestmark = pytest.mark.integration


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
