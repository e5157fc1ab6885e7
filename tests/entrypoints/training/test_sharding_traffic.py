"""What a sharded step gathers: blocks one ahead, and no modulation layers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sm_train.entrypoints.distributed.fsdp import (
    exchanging_layers,
    in_order_of_execution,
    shard,
    sharded_modules,
)
from sm_train.entrypoints.models.components import preset_caption_tokens, read_preset
from sm_train.entrypoints.models.pipeline import predict
from sm_train.entrypoints.models.trained_network import Network
from sm_train.entrypoints.planning.measure import network_inputs
from sm_train.entrypoints.planning.memory import plan_preset
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.integration

RANKS = 8


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    """A group of which only rank 0 exists; its collectives return at once."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


class Gathers(TorchDispatchMode):
    """Counts the gathers of weights that FSDP2 has started, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.count += 1
            self.bytes += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def sharded_network(preset: str, **options: bool) -> nn.Module:
    configuration = read_preset(preset)["network"]
    module = nn.Module()
    module.network = Network(configuration, None, configuration["sample_size"]).module
    shard(
        module,
        "full_shard",
        world_size=RANKS,
        per_node=RANKS,
        device="cpu",
        bf16=False,
        reduce_bf16=False,
        **options,
    )
    network: nn.Module = module.network.to_empty(device="cpu")
    for parameter in network.parameters():
        nn.init.zeros_(parameter)
    return network


def _no_output(layer: nn.Linear, vectors: torch.Tensor) -> torch.Tensor:
    return vectors.new_zeros(len(vectors), layer.out_features)


def forward(network: Any, preset: str) -> None:
    tokens = preset_caption_tokens(read_preset(preset))
    noisy, text = network_inputs(dict(network.config), network.config.sample_size, tokens)
    noisy = torch.zeros(noisy.shape)
    text = type(text)(*(None if part is None else torch.zeros(part.shape) for part in text))
    predict(network, noisy, torch.tensor([500.0]), text, 8)


@pytest.mark.parametrize("preset", ["tiny-mmdit", "tiny-dit", "tiny-sd2"])
def test_a_block_starts_after_the_gather_of_the_next_one(preset: str) -> None:
    network = sharded_network(preset, gather_modulation=True)
    units = in_order_of_execution([unit for unit in sharded_modules(network) if unit != network])
    started, gathers = list[int](), Gathers()
    for unit in units:
        # After FSDP's own hook, which waits for the weights of the unit itself.
        unit.register_forward_pre_hook(lambda *_: started.append(gathers.count))
    with gathers:
        forward(network, preset)
    assert len(units) >= 2
    # The network's other weights, and the blocks up to the next one.
    assert started == [min(number + 3, len(units) + 1) for number in range(len(units))]


def test_modulation_layers_are_not_gathered() -> None:
    measured = {}
    for gather_modulation in (True, False):
        network = sharded_network("tiny-mmdit", gather_modulation=gather_modulation)
        if not gather_modulation:
            # Their exchanges are no gathers of weights.
            for layer in exchanging_layers(network):
                layer.forward = partial(_no_output, layer)  # type: ignore[method-assign]
        with Gathers() as gathers:
            forward(network, "tiny-mmdit")
        measured[gather_modulation] = gathers.bytes
    saved = plan_preset("tiny-mmdit", 64, precision="bf16", modulation="exchanged")
    assert saved.exchanged_parameters > 0
    # FSDP2 pads the rows of each weight to a multiple of the ranks.
    assert measured[True] - measured[False] == pytest.approx(
        4 * saved.exchanged_parameters, rel=0.05
    )
