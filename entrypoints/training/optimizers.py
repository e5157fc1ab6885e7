"""Builds the optimizer that the run file names, from the library that maintains it.

=============  =====================================================================
``adamw``      torch.optim.AdamW, fused
``adamw8bit``  bitsandbytes' AdamW8bit: both moments in 8 bits (arXiv 2110.02861)
``adafactor``  torch.optim.Adafactor: factored second moment (arXiv 1804.04235)
``muon``       torch.optim.Muon for matrices within blocks, AdamW for all other weights
=============  =====================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sm_train.entrypoints.job_interface.job_config import JobConfigError, OptimizerConfig
from sm_train.entrypoints.job_interface.optimizer_rules import (
    NEEDS_WHOLE_WEIGHTS,
    is_hidden_matrix,
    problem,
)
from sm_train.entrypoints.job_interface.user_function import load_user_function
from torch import Tensor

Optimizers = list[torch.optim.Optimizer]

_KEY = "training.optimizer.name"

_WEIGHT_DECAY = 0.01
"""The default of all shipped optimizers, because their libraries' defaults differ."""


def build_optimizers(
    settings: OptimizerConfig, weights: Mapping[str, Tensor], learning_rate: float, *, sharded: bool
) -> Optimizers:
    """Return the optimizers that together train ``weights``, this rank's rows by name.

    Raises:
        JobConfigError: this PyTorch lacks the optimizer, it cannot train sharded weights, or the
            user's function fails.
    """
    if reason := problem(settings.name, torch.__version__, sharded=sharded):
        raise JobConfigError(f"{_KEY}: {settings.name}: {reason}")
    common = {"lr": learning_rate, **_given(settings)}
    build = _SHIPPED.get(settings.name)
    if build is not None:
        return build(weights, {"weight_decay": _WEIGHT_DECAY, **common})
    return [_user_optimizer(settings, [*weights.values()], common, sharded=sharded)]


def _given(settings: OptimizerConfig) -> dict[str, Any]:
    """Return the arguments that the run file sets; the library's defaults hold for the others."""
    arguments = {
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "momentum": settings.momentum,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def _adamw(weights: Mapping[str, Tensor], arguments: dict[str, Any]) -> Optimizers:
    tensors = [*weights.values()]
    return [torch.optim.AdamW(tensors, **arguments, fused=_fused_available(tensors[0].device))]


def _adamw8bit(weights: Mapping[str, Tensor], arguments: dict[str, Any]) -> Optimizers:
    try:
        import bitsandbytes
    except ImportError:
        raise JobConfigError(
            f"{_KEY}: adamw8bit: bitsandbytes is not installed; add it to the image, or run pip "
            "install bitsandbytes"
        ) from None
    adamw8bit: Any = bitsandbytes.optim.AdamW8bit
    return [adamw8bit([*weights.values()], **arguments)]


def _adafactor(weights: Mapping[str, Tensor], arguments: dict[str, Any]) -> Optimizers:
    return [torch.optim.Adafactor([*weights.values()], **arguments)]


def _muon(weights: Mapping[str, Tensor], arguments: dict[str, Any]) -> Optimizers:
    """Split the weights as Muon's author does: matrices of hidden layers, and everything else.

    ``match_rms_adamw`` scales Muon's update to AdamW's size, so that both share a learning rate and
    weight decay (arXiv 2502.16982, section 2.2).
    """
    momentum = arguments.pop("momentum", 0.95)
    matrices = {
        name: weight for name, weight in weights.items() if is_hidden_matrix(name, weight.shape)
    }
    others = {name: weight for name, weight in weights.items() if name not in matrices}
    shared = {name: arguments[name] for name in ("lr", "weight_decay")}
    optimizers = _adamw(others, arguments) if others else []
    if matrices:
        optimizers += [
            torch.optim.Muon(
                [*matrices.values()], **shared, momentum=momentum, adjust_lr_fn="match_rms_adamw"
            )
        ]
    return optimizers


def _user_optimizer(
    settings: OptimizerConfig,
    weights: Sequence[Tensor],
    arguments: dict[str, Any],
    *,
    sharded: bool,
) -> torch.optim.Optimizer:
    function = load_user_function(_KEY, settings.name)
    try:
        optimizer = function(weights, **arguments, **settings.options)
    except TypeError as error:
        raise JobConfigError(f"{_KEY}: {settings.name}: {error}") from None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobConfigError(
            f"{_KEY}: {settings.name} returned a {type(optimizer).__name__}; return a "
            "torch.optim.Optimizer"
        )
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    if held != {id(weight) for weight in weights}:
        raise JobConfigError(
            f"{_KEY}: {settings.name} trains {len(held)} of {len(weights)} weights; give it all"
        )
    class_name = type(optimizer).__name__
    if sharded and class_name in NEEDS_WHOLE_WEIGHTS:
        raise JobConfigError(f"{_KEY}: {settings.name}: {NEEDS_WHOLE_WEIGHTS[class_name]}")
    return optimizer


_SHIPPED: dict[str, Callable[[Mapping[str, Tensor], dict[str, Any]], Optimizers]] = {
    "adamw": _adamw,
    "adamw8bit": _adamw8bit,
    "adafactor": _adafactor,
    "muon": _muon,
}


def is_fused_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's kernel scales gradients and skips steps on the device."""
    return type(optimizer) is torch.optim.AdamW and bool(optimizer.defaults["fused"])


def _fused_available(device: torch.device) -> bool:
    """Return whether this PyTorch has fused AdamW on ``device``; the CPU has it from 2.4 on."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return device.type in _get_fused_kernels_supported_devices()
