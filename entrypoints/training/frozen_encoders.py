"""Places the components that are not trained: on each GPU, sharded, or on the CPU between uses."""

from __future__ import annotations

from typing import Any

import torch
from sm_train.cost.speed_model import TextEncoderPlacement
from sm_train.entrypoints.distributed.fsdp import shard_frozen
from sm_train.entrypoints.models.builder import ModelComponents
from torch import nn


def place_frozen(
    components: ModelComponents,
    device: torch.device,
    text_encoders: TextEncoderPlacement,
    *,
    text_bf16: bool,
    world_size: int,
    per_node: int,
) -> None:
    """Move the components that are not trained to ``device``, text encoders as ``text_encoders``.

    ``per_node`` of the ``world_size`` processes share a node. All of them call this together.
    """
    for module in components.frozen_modules():
        if module is components.vae:
            module.to(device)
            continue
        if text_bf16:
            module.to(torch.bfloat16)
        if text_encoders == "cpu":
            WeightsOnHost(module, device)
        elif text_encoders == "sharded":
            shard_frozen(module, world_size=world_size, per_node=per_node, device=device.type)
            module.to(device)
        else:
            module.to(device)


class WeightsOnHost:
    """Keeps the weights of a frozen module in the CPU's memory, and copies them for each forward.

    Between two passes the module's parameters stay on ``device`` by name, without memory: their
    storages are empty. The copy is asynchronous on a GPU, so the host's memory is page-locked; the
    kernels of the pass follow it in the same stream.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        hosts = {
            parameter: parameter.data.pin_memory() if device.type == "cuda" else parameter.data
            for parameter in module.parameters()
        }
        weights = {
            parameter: nn.Parameter(torch.empty_like(host, device=device), requires_grad=False)
            for parameter, host in hosts.items()
        }
        for layer in module.modules():
            # A T5 has its table of tokens twice.
            for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
                setattr(layer, name, weights[parameter])
        self._weights = [(weights[parameter], host) for parameter, host in hosts.items()]
        module.to(device)  # buffers, such as the numbers of positions
        self._release()
        module.register_forward_pre_hook(self._copy)
        # Also after an error: a retry must not find half of the weights.
        module.register_forward_hook(self._release, always_call=True)

    @torch.no_grad()
    def _copy(self, *_: Any) -> None:
        for weight, host in self._weights:
            weight.untyped_storage().resize_(host.nbytes)
            weight.copy_(host, non_blocking=True)

    def _release(self, *_: Any) -> None:
        for weight, _host in self._weights:
            weight.untyped_storage().resize_(0)
